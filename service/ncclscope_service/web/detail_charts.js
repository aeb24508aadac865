// The charts of what is asked for beside the overview: traffic, sizes against speed, one group's course.
/* global Plotly */

import { CONFIG, bucketTimes, layout } from "./charts.js";
import { byId, colour, drawLegend, element, kindOf, nothingIn, plain, plotIn, replace, setText } from "./dom.js";
import { bandwidth, bytes, isKnown, percent, sizeClass } from "./format.js";
import { follow, timeAxis } from "./span.js";

const SCALE = [0, 1, 2, 3, 4];
const scale = () => SCALE.map((step) => [step / 4, colour(`wait-${step}`)]);
const TICK = { size: 10.5 };

export const drawTraffic = (view) => {
  const parent = byId("traffic");
  const values = view.bytes.flat().filter((value) => value > 0);
  if (values.length === 0) {
    setText("traffic-note", "");
    nothingIn(parent, "Nothing was sent between ranks that are known.");
    return;
  }
  const switched = view.to_switches.reduce((sum, value) => sum + value, 0);
  setText("traffic-note", [`by ${view.by}, of what is in memory`,
    view.assumed_ratio > 0.01 ? `for ${percent(view.assumed_ratio)} no line names the algorithm: a ring is taken` : null,
    switched > 0 ? `${bytes(switched)} more into switches` : null].filter(isKnown).join("; "));
  drawSquare(parent, view.by, view.places, view.bytes, values);
};

// Bytes from each place to each; `values`: all amounts above 0 whose colours are the same.
export const drawSquare = (parent, by, names, amounts, values) => {
  const [low, high] = [Math.log10(Math.min(...values)), Math.log10(Math.max(...values))];
  const places = names.map((_, position) => position);
  const step = Math.ceil(places.length / 12);
  const shown = places.filter((place) => place % step === 0);
  const axis = { tickvals: shown, ticktext: shown.map((place) => plain(names[place])), fixedrange: true, zeroline: false,
    showgrid: false, tickfont: TICK, automargin: true };
  const marks = Array.from({ length: 13 }, (_, i) => 2 ** (5 * i)).filter((mark) => mark >= 10 ** low && mark <= 10 ** high);
  Plotly.react(plotIn(parent), [{
    type: "heatmap", x: places, y: places, z: amounts.map((row) => row.map((value) => (value > 0 ? Math.log10(value) : null))),
    zmin: low - 0.3, zmax: Math.max(high, low + 0.1), colorscale: scale(), xgap: 0.5, ygap: 0.5, hoverongaps: false,
    customdata: amounts.map((row, i) => row.map((value, j) => [plain(names[i]), plain(names[j]), bytes(value)])),
    hovertemplate: `%{customdata[0]} → %{customdata[1]}<br><b>%{customdata[2]}</b><extra></extra>`,
    colorbar: { thickness: 8, outlinewidth: 0, len: 0.9, tickvals: marks.map(Math.log10), ticktext: marks.map(bytes), tickfont: { ...TICK, color: colour("quiet") } },
  }], layout({
    margin: { l: 46, r: 10, t: 8, b: 36 }, plot_bgcolor: colour("empty-cell"),
    xaxis: { ...axis, title: { text: `to ${by}`, font: TICK, standoff: 2 } },
    yaxis: { ...axis, autorange: "reversed", title: { text: `from ${by}`, font: TICK, standoff: 2 } },
  }), CONFIG);
};

const SYMBOLS = { AllReduce: "circle", AllGather: "diamond", ReduceScatter: "square", Send: "triangle-right", Recv: "triangle-left",
  AlltoAll: "star", Broadcast: "cross", Reduce: "x" };

export const drawSizes = (parent, note, { points, known, advice }, onCommunicator) => {
  // One list, of the whole job: a communicator has none.
  if (advice.length > 0) replace(byId("sizes-advice"), ...advice.map((text) => element("li", {}, text)));
  if (points.length === 0) {
    setText(note, "");
    drawLegend(byId(`${parent.id}-legend`), []);
    nothingIn(parent, "Not recorded: bandwidth shows in the kernels of at least two ranks.");
    return;
  }
  setText(note, `median of each communicator, operation and size${known > points.length ? `; ${points.length} of ${known}, those that moved most` : ""}`);
  const kinds = [...new Set(points.map((point) => point.parallelism))];
  const isNew = !parent.querySelector(":scope > .plot");
  const plot = plotIn(parent);
  // What should be reached: four of five between both ends.
  const expected = points.filter((point) => isKnown(point.expected));
  const bands = expected.length === 0 ? [] : [{
    type: "scatter", mode: "lines", name: "expected (80 %)", hoverinfo: "skip", opacity: 0.3, line: { color: colour("ink"), width: 7 },
    x: expected.flatMap((point) => [point.message_bytes, point.message_bytes, null]), y: expected.flatMap((point) => [point.expected_low / 1e9, point.expected_high / 1e9, null]),
  }];
  Plotly.react(plot, bands.concat(kinds.map((kind) => {
    const own = points.filter((point) => point.parallelism === kind);
    return {
      type: "scatter", mode: "markers", name: kind ?? "kind not known", x: own.map((point) => point.message_bytes), y: own.map((point) => point.busbw / 1e9),
      marker: { color: colour(kindOf(kind)), symbol: own.map((point) => SYMBOLS[point.op] ?? "circle"), size: 8, opacity: 0.8, line: { width: 0 } },
      error_y: own.length > 80 ? undefined : { type: "data", symmetric: false, array: own.map((point) => (point.high - point.busbw) / 1e9),
        arrayminus: own.map((point) => (point.busbw - point.low) / 1e9), color: colour(kindOf(kind)), thickness: 1, width: 0 },
      customdata: own.map((point) => [plain(point.communicator), plain(point.op), bytes(point.message_bytes), bandwidth(point.busbw),
        `${bandwidth(point.low)} to ${bandwidth(point.high)}`, isKnown(point.limit) ? `${percent(point.busbw / point.limit)} of the limit` : "limit not known", point.communicator,
        isKnown(point.expected) ? `expected ${bandwidth(point.expected)} (${bandwidth(point.expected_low)} to ${bandwidth(point.expected_high)}) by ${point.basis.replace("_", " ")}` : "expected: not known"]),
      hovertemplate: "<b>%{customdata[0]}</b> %{customdata[1]} %{customdata[2]}<br>%{customdata[3]} (%{customdata[4]})<br>%{customdata[7]}<br>%{customdata[5]}<extra></extra>",
    };
  })), layout({
    margin: { l: 62, r: 12, t: 8, b: 36 },
    xaxis: { type: "log", fixedrange: true, gridcolor: colour("line"), zeroline: false, tickfont: TICK, tickangle: 0, ...sizeTicks(points.map((point) => point.message_bytes), plot.clientWidth < 400 ? 5 : 10), title: { text: "message size", font: TICK, standoff: 2 } },
    yaxis: { type: "log", fixedrange: true, gridcolor: colour("line"), zeroline: false, tickfont: TICK, ...logTicks(points.flatMap((point) => [point.low / 1e9, point.high / 1e9]), (value) => bandwidth(value * 1e9)) },
  }), CONFIG);
  drawLegend(byId(`${parent.id}-legend`), [...(bands.length ? [["expected (80 %)", "faint"]] : []), ...kinds.map((kind) => [kind ?? "kind not known", kindOf(kind)])]);
  if (isNew && onCommunicator) plot.on("plotly_click", (event) => onCommunicator(event.points[0].customdata[6]));
};

// At powers of ten where there are some, else at 1, 2 and 5 between them; a little room on both sides.
const logTicks = (values, format) => {
  const known = values.filter((value) => value > 0).map(Math.log10);
  const [low, high] = [Math.min(...known) - 0.12, Math.max(...known) + 0.12];
  const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => Math.floor(low) + i);
  const step = Math.ceil((high - low) / 8);
  const marks = high - low < 2.2 ? powers.flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)) : powers.filter((power) => power % step === 0).map((power) => 10 ** power);
  return { range: [low, high], tickvals: marks, ticktext: marks.map(format) };
};

// At powers of two: sizes are binary.
const sizeTicks = (values, most) => {
  const { range } = logTicks(values, bytes);
  const [low, high] = range.map((power) => Math.ceil(power * Math.log2(10)));
  const step = Math.ceil((high - low) / most);
  const marks = Array.from({ length: high - low }, (_, i) => low + i).filter((power) => power % step === 0).map((power) => 2 ** power);
  return { range, tickvals: marks, ticktext: marks.map(bytes) };
};

// One communicator: each operation and size, with its limit dashed and its baseline dotted.
export const drawSeries = (parent, detail) => {
  const lines = detail.series.filter((each) => each.busbw_history.some(isKnown));
  if (lines.length === 0) {
    nothingIn(parent, "Not recorded: bandwidth shows in the kernels of at least two ranks.");
    return;
  }
  const tones = ["tp", "dp", "pp", "ep", "cp", "world", "optimizer", "embedding"].map(colour);
  const count = lines[0].busbw_history.length;
  const x = bucketTimes(detail, count);
  const traces = lines.flatMap((each, i) => {
    const name = `${each.op} ${sizeClass(each.size_class)}`;
    const tone = tones[i % tones.length];
    const flat = (value, dash, what) => (isKnown(value) ? [{ type: "scatter", mode: "lines", x: [x[0], x.at(-1)], y: [value / 1e9, value / 1e9], showlegend: false,
      line: { color: tone, width: 1.2, dash }, hovertemplate: `${plain(name)}<br>${what} %{y:.4g} GB/s<extra></extra>` }] : []);
    return [{ type: "scatter", mode: "lines", name: plain(name), x, y: each.busbw_history.map((value) => (isKnown(value) ? value / 1e9 : null)), connectgaps: false,
      line: { color: tone, width: 1.9 }, hovertemplate: `<b>${plain(name)}</b> %{y:.4g} GB/s<extra></extra>` },
    ...flat(each.limit, "dash", "limit by topology"), ...flat(each.baseline, "dot", "best so far")];
  });
  const top = Math.max(...traces.flatMap((trace) => trace.y.filter(isKnown)), 1e-6);
  const plot = plotIn(parent);
  Plotly.react(plot, traces, layout({
    margin: { l: 46, r: 16, t: 8, b: 22 }, showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: TICK }, xaxis: timeAxis(plot),
    yaxis: { range: [0, top * 1.12], fixedrange: true, zeroline: false, gridcolor: colour("line"), nticks: 5, tickfont: TICK, title: { text: "GB/s", font: TICK, standoff: 2 } },
  }), CONFIG);
  follow(plot);
};

// One rank's waiting beside that of the median rank.
export const drawRankHistory = (parent, detail) => {
  if (!detail.wait_history.some(isKnown)) {
    nothingIn(parent, "Not recorded: waiting shows in the kernels of at least two ranks.");
    return;
  }
  const x = bucketTimes(detail, detail.wait_history.length);
  const top = Math.min(100, Math.max(10, ...[...detail.wait_history, ...detail.median_wait_history].filter(isKnown).map((value) => value * 125)));
  const line = (name, values, tone, dash) => ({ type: "scatter", mode: "lines", name, x, y: values.map((value) => (isKnown(value) ? value * 100 : null)), connectgaps: false,
    line: { color: tone, width: dash === "solid" ? 2 : 1.3, dash }, hovertemplate: `<b>${name}</b> %{y:.1f} %<extra></extra>` });
  const plot = plotIn(parent);
  Plotly.react(plot, [line("median rank", detail.median_wait_history, colour("faint"), "dash"), line(`rank ${detail.rank}`, detail.wait_history, colour("accent"), "solid")], layout({
    margin: { l: 46, r: 16, t: 8, b: 22 }, showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: TICK }, xaxis: timeAxis(plot),
    yaxis: { range: [0, top], fixedrange: true, zeroline: false, gridcolor: colour("line"), nticks: 5, ticksuffix: " %", tickfont: TICK },
  }), CONFIG);
  follow(plot);
};
