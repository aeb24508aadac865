// Bandwidth over time by parallelism, and the map of waiting; what all charts have in common.
/* global Plotly */

import { byId, colour, element, kindOf, nothingIn, plain, plotIn, replace, setText } from "./dom.js";
import { bandwidth, isKnown, sizeClass } from "./format.js";

export const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false };
const FONT = "Inter, 'Segoe UI', system-ui, Roboto, Arial, sans-serif";

// Seconds before now of the middle of each bucket.
export const ages = (overview, count) => {
  const nowSeconds = (overview.now_ns - overview.window_begin_ns) / 1e9;
  return Array.from({ length: count }, (_, i) => (i + 0.5) * overview.bucket_seconds - nowSeconds);
};

export const timeAxis = (overview, count) => {
  const span = overview.bucket_seconds * count;
  const minutes = Array.from({ length: Math.floor(span / 60) + 1 }, (_, i) => i);
  return {
    range: [-span, 0], fixedrange: true, zeroline: false, showgrid: false, ticks: "outside", ticklen: 3,
    tickcolor: colour("line"), linecolor: colour("line"), showline: true, automargin: false,
    tickvals: minutes.map((minute) => -60 * minute), ticktext: minutes.map((m) => (m === 0 ? "now" : `−${m} min`)),
    tickfont: { size: 10.5, color: colour("quiet") },
  };
};

export const layout = (extra) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
  font: { family: FONT, size: 11, color: colour("quiet") }, hovermode: "closest",
  hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { family: FONT, size: 12, color: colour("ink") } },
  ...extra,
});

export const drawBandwidth = (overview, job, { slowed }) => {
  const hasBandwidth = job.communicators.some((each) => each.busbw_history.some(isKnown));
  const field = hasBandwidth ? "busbw_history" : "bytes_history";
  const hasLimit = job.communicators.some((each) => isKnown(each.limit) && isWorthALine(each, field));
  setText("bandwidth-title", hasBandwidth ? "Bus bandwidth" : "Logged volume");
  setText("bandwidth-note", hasBandwidth
    ? `of the transfer, waiting left out${hasLimit ? "; dashed: limit by topology" : ""}; dotted: the best shown so far`
    : "bytes per second by the logs; bus bandwidth is not recorded without kernels");
  const kinds = job.parallelisms.map((each) => each.parallelism)
    .filter((kind) => own(job, kind).some((each) => isWorthALine(each, field))).slice(0, 6);
  const parent = byId("bandwidth");
  if (kinds.length === 0) {
    replace(parent, element("p", { class: "nothing" }, "Nothing in the last five minutes."));
    return;
  }
  const keys = kinds.map((kind) => kind ?? "unknown").join();
  if (parent.dataset.keys !== keys || !parent.querySelector(".multiple")) {
    replace(parent, ...kinds.map(frame));
    parent.dataset.keys = keys;
  }
  kinds.forEach((kind, position) => {
    const lines = own(job, kind).filter((each) => isWorthALine(each, field));
    drawMultiple(parent.children[position], overview, kind, lines, field, slowed);
  });
};

const level = (value, factor, dash) => (value === null ? null : { type: "line", xref: "paper", x0: 0, x1: 1, y0: value * factor, y1: value * factor,
  line: { dash, width: 1.2, color: colour("faint") } });

const SMALL = new Set(["4KiB", "64KiB"]);
const own = (job, kind) => job.communicators.filter((each) => each.parallelism === kind);
// A bandwidth of messages this small is a latency in disguise.
const isWorthALine = (each, field) =>
  each[field].some(isKnown) && !(field === "busbw_history" && SMALL.has(each.main_size_class));

const frame = (kind) =>
  element("div", { class: "multiple", kind: kindOf(kind) },
    element("h3", {}, element("span", { class: "swatch" }), element("span", { class: "title" }), element("span", { class: "quiet about" }), element("span", { class: "quiet unit" })),
    element("div", { class: "plot" }));

const drawMultiple = (parent, overview, kind, lines, field, slowed) => {
  const first = lines[0];
  parent.querySelector(".title").textContent = kind ?? "Kind not known";
  const sameMain = lines.every((each) => each.main_op === first.main_op && each.main_size_class === first.main_size_class);
  parent.querySelector(".about").textContent = `${lines.length === 1 ? "1 communicator" : `${lines.length} communicators`}`
    + (sameMain && first.main_op ? ` · ${first.main_op} ${sizeClass(first.main_size_class)}` : "");
  const x = ages(overview, first[field].length);
  const calm = colour(kindOf(kind));
  const traces = lines.map((each) => {
    const isAlarmed = slowed.has(each.alias);
    return {
      type: "scatter", mode: "lines", name: each.alias, x, y: each[field].map((value) => (isKnown(value) ? value / 1e9 : null)),
      line: { width: isAlarmed ? 2.2 : 1.4, color: isAlarmed ? colour("bad") : calm }, connectgaps: false,
      opacity: isAlarmed ? 1 : Math.max(0.35, 0.9 - lines.length * 0.03),
      hovertemplate: `<b>${plain(each.alias)}</b> %{y:.4g}<extra></extra>`,
    };
  });
  traces.sort((a, b) => a.line.width - b.line.width);
  const limits = field === "busbw_history" ? lines.map((each) => each.limit).filter(isKnown) : [];
  const limit = limits.length ? Math.max(...limits) / 1e9 : null;
  const bests = field === "busbw_history" ? lines.map((each) => each.baseline).filter(isKnown).sort((a, b) => a - b) : [];
  const best = bests.length ? bests[bests.length >> 1] / 1e9 : null;
  const top = Math.max(...traces.flatMap((trace) => trace.y.filter(isKnown)), limit ?? 0, best ?? 0, 1e-9);
  const [factor, unit] = top >= 0.1 ? [1, "GB/s"] : top >= 1e-4 ? [1e3, "MB/s"] : [1e6, "kB/s"];
  for (const trace of traces) trace.y = trace.y.map((value) => (value === null ? null : value * factor));
  parent.querySelector(".unit").textContent = unit;
  Plotly.react(parent.querySelector(".plot"), traces, layout({
    margin: { l: 38, r: 20, t: 6, b: 20 }, xaxis: timeAxis(overview, first[field].length),
    yaxis: { range: [0, top * factor * 1.2], fixedrange: true, zeroline: false, nticks: 4, gridcolor: colour("line"), tickfont: { size: 10.5 } },
    shapes: [level(limit, factor, "4px,4px"), level(best, factor, "1px,3px")].filter(isKnown),
    annotations: limit === null ? [] : [{ xref: "paper", x: 1, y: limit * factor, text: `limit ${bandwidth(limit * 1e9)}`, showarrow: false,
      xanchor: "right", yanchor: "bottom", yshift: -1, font: { size: 10.5, color: colour("quiet") } }],
  }), CONFIG);
};

// The map of a job or of one communicator; `times` says when (an overview, or the detail that carries the map).
export const drawWaits = (parent, note, times, map, { lateRanks, onRank, calm }) => {
  if (map === null) {
    setText(note, "");
    nothingIn(parent, "Not recorded: waiting shows in the kernels of at least two ranks,", element("br"),
      "and no capture of them has come yet.");
    return;
  }
  setText(note, map.ranks.length < map.ranks_known
    ? `${map.ranks.length} of ${map.ranks_known.toLocaleString("en")} ranks: those that wait least or most` : calm);
  const isNew = !parent.querySelector(":scope > .plot");
  const plot = plotIn(parent);
  const values = map.percent.flat().filter(isKnown).sort((a, b) => a - b);
  const top = Math.max(20, values[Math.floor(values.length * 0.98)] ?? 0);
  const rows = map.ranks.map((_, position) => position);
  const labelled = rankLabels(map);
  Plotly.react(plot, [{
    type: "heatmap", z: map.percent, x: ages(times, map.percent[0].length), y: rows, zmin: 0, zmax: top, hoverongaps: false,
    colorscale: [0, 1, 2, 3, 4].map((step) => [step / 4, colour(`wait-${step}`)]), xgap: 0.4, ygap: map.ranks.length <= 64 ? 0.6 : 0,
    customdata: map.percent.map((row, i) => row.map(() => `rank ${map.ranks[i]}${map.hosts[i] === null ? "" : ` on ${plain(map.hosts[i])}`}`)),
    hovertemplate: "<b>%{customdata}</b><br>waited %{z} % of its kernel time<extra></extra>",
    colorbar: { orientation: "h", thickness: 7, len: 0.42, x: 1, xanchor: "right", y: 0, yanchor: "top", ypad: 22, outlinewidth: 0,
      ticksuffix: " %", nticks: 3, tickfont: { size: 10.5, color: colour("quiet") } },
  }], layout({
    margin: { l: 44, r: 30, t: 8, b: 56 }, plot_bgcolor: colour("empty-cell"), xaxis: timeAxis(times, map.percent[0].length),
    yaxis: { autorange: "reversed", fixedrange: true, zeroline: false, showgrid: false, tickvals: labelled, ticktext: labelled.map((row) => String(map.ranks[row])),
      tickfont: { size: 10.5 }, title: { text: "global rank", font: { size: 10.5 }, standoff: 4 } },
    annotations: map.ranks.flatMap((rank, row) => (lateRanks.has(rank) ? [{ xref: "paper", x: 1, xanchor: "left", y: row, showarrow: false,
      text: `◀ ${rank}`, font: { size: 11, color: colour("bad") } }] : [])),
  }), CONFIG);
  plot.ranks = map.ranks;
  if (isNew) plot.on("plotly_click", (event) => onRank(plot.ranks[event.points[0].y]));
};

// At most about a dozen labels; by the first rank of each host where that is few enough.
const rankLabels = (map) => {
  const rows = map.ranks.map((_, position) => position);
  if (rows.length <= 16) return rows;
  const starts = rows.filter((row) => row === 0 || map.hosts[row] !== map.hosts[row - 1]);
  if (starts.length > 2 && starts.length <= 16) return starts;
  const step = Math.ceil(rows.length / 12);
  return rows.filter((row) => row % step === 0);
};

