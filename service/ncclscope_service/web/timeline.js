// Some seconds as bars: a lane for each rank (or communicator of one rank); a bar is cut where waiting ends and the transfer begins.
/* global Plotly */

import { CONFIG, layout } from "./charts.js";
import { byId, colour, drawLegend, element, kindOf, nothingIn, plain, plotIn, replace, setText } from "./dom.js";
import { amount, bytes, duration, isKnown, timeOfDay } from "./format.js";
import { table } from "./panels.js";

const TICK = { size: 10.5 };
const us = (value) => duration(value * 1e-6);

// `id` is the card's: its chart, `-note` and `-sums`. `onZoom(until_ns, seconds)` is told what was dragged over, or null for all.
export const drawTimeline = (id, view, { what, onLane, onZoom }) => {
  const parent = byId(id);
  if (view.begin_ns === null) {
    setText(`${id}-note`, "");
    nothingIn(parent, "Not recorded: no kernel of these was captured in the last minutes.");
    replace(byId(`${id}-sums`));
    drawLegend(byId(`${id}-legend`), []);
    return;
  }
  const end = timeOfDay(view.begin_ns + view.seconds * 1e9);
  const joined = view.resolution_us > 0 ? `; kernels below ${us(view.resolution_us)} are drawn together` : "";
  setText(`${id}-note`, `${spelled(view.seconds)} ending ${end}${joined} · drag to zoom`);
  const height = Math.max(150, Math.min(540, view.lanes.length * 17 + 40));
  parent.style.height = `${height}px`;
  const thick = Math.max(3, Math.min(13, ((height - 40) / view.lanes.length) * 0.62));
  const waiting = segments("waiting", colour("waiting"), thick);
  const unknown = segments("not told apart", colour("faint"), thick);
  const transfers = new Map();
  const ticks = new Map();
  const narrow = (view.seconds * 1000) / 700;
  view.start_us.forEach((start, i) => {
    const kind = view.parallelisms[view.communicator[i]];
    const text = label(view, i);
    // The sums of kernels that overlap may be longer than the bar that stands for them.
    const scale = Math.min(1, (view.end_us[i] - start) / Math.max(view.duration_us[i], 1e-9)) / 1000;
    const [from, cut, to] = [start / 1000, start / 1000 + (view.wait_us[i] ?? 0) * scale, start / 1000 + view.duration_us[i] * scale];
    if (view.wait_us[i] === null) {
      add(unknown, from, to, view.lane[i], text);
      return;
    }
    if (cut > from) add(waiting, from, cut, view.lane[i], text);
    if (!transfers.has(kind)) transfers.set(kind, segments(`${kind ?? "kind not known"} transfers`, colour(kindOf(kind)), thick));
    add(transfers.get(kind), cut, to, view.lane[i], text);
    if (to - from < narrow) addTick(ticks, kind, thick, from, view.lane[i], text);
  });
  const isNew = !parent.querySelector(":scope > .plot");
  const plot = plotIn(parent);
  plot.style.height = "100%";
  const step = Math.ceil((view.lanes.length * (innerWidth < 640 ? 14 : 11)) / (height - 40));
  const shown = view.lanes.map((_, lane) => lane).filter((lane) => lane % step === 0);
  Plotly.react(plot, [...hatched(view), waiting, ...transfers.values(), unknown, ...ticks.values()].filter((trace) => trace.x.length), layout({
    margin: { l: 46, r: 12, t: 6, b: 34 }, dragmode: "zoom",
    plot_bgcolor: colour("empty-cell"), bargap: 0, barmode: "overlay",
    xaxis: { range: [0, view.seconds * 1000], gridcolor: colour("line"), zeroline: false, tickfont: TICK, title: { text: "milliseconds", font: TICK, standoff: 2 } },
    yaxis: { range: [view.lanes.length - 0.4, -0.6], fixedrange: true, automargin: true, zeroline: false, showgrid: false, tickfont: TICK, tickvals: shown,
      ticktext: shown.map((lane) => plain(view.lanes[lane])), title: { text: what === "rank" ? "" : "rank", font: TICK, standoff: 2 } },
  }), { ...CONFIG, doubleClick: false });
  Object.assign(plot, { lanes: view.lanes, beginNs: view.begin_ns });
  drawLegend(byId(`${id}-legend`), [...(waiting.x.length ? [[waiting.name, "waiting"]] : []), ...[...transfers].map(([kind, { name }]) => [name, kindOf(kind)]),
    ...(unknown.x.length ? [[unknown.name, "faint"]] : []), ...(view.unknown_lane.length ? [[`${NO_DATA} (hatched)`, "empty-cell"]] : [])]);
  drawSums(byId(`${id}-sums`), view);
  if (!isNew) return;
  if (onLane) plot.on("plotly_click", (event) => event.points[0].data.name !== NO_DATA && onLane(plot.lanes[event.points[0].y]));
  plot.on("plotly_doubleclick", () => onZoom(null));
  plot.on("plotly_relayout", (change) => {
    const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (isKnown(from) && isKnown(to)) onZoom({ until_ns: Math.round(plot.beginNs + to * 1e6), seconds: Math.max(1e-5, (to - from) / 1000) });
  });
};

const spelled = (seconds) => (seconds >= 1 ? `${seconds.toFixed(1)} s` : duration(seconds));

const NO_DATA = "no data";
const hatched = (view) => (view.unknown_lane.length === 0 ? [] : [{
  type: "bar", orientation: "h", name: NO_DATA, y: view.unknown_lane, base: view.unknown_from_us.map((from) => from / 1000),
  x: view.unknown_to_us.map((to, i) => (to - view.unknown_from_us[i]) / 1000), width: 0.86,
  marker: { color: "rgba(0,0,0,0)", line: { width: 0 }, pattern: { shape: "/", size: 6, solidity: 0.22, fgcolor: colour("faint"), bgcolor: "rgba(0,0,0,0)" } },
  hovertemplate: "no capture of this time has arrived: what ran here is not known<extra></extra>" }]);

const segments = (name, tone, width) => ({ type: "scatter", mode: "lines", name, x: [], y: [], text: [], hovertemplate: "%{text}<extra></extra>",
  line: { color: tone, width, shape: "linear" }, connectgaps: false });

const add = (trace, from, to, lane, text) => {
  trace.x.push(from, to, null);
  trace.y.push(lane, lane, null);
  trace.text.push(text, text, "");
};

// A bar that would be narrower than a pixel or two: a tick where it begins, at any zoom.
const addTick = (ticks, kind, height, from, lane, text) => {
  if (!ticks.has(kind)) {
    ticks.set(kind, { type: "scatter", mode: "markers", x: [], y: [], text: [], hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: "line-ns", size: height / 2, line: { width: 1.2, color: colour(kindOf(kind)) } } });
  }
  const tick = ticks.get(kind);
  tick.x.push(from);
  tick.y.push(lane);
  tick.text.push(text);
};

const label = (view, i) => {
  const size = isKnown(view.message_bytes[i]) ? ` of ${bytes(view.message_bytes[i])}` : "";
  const what = view.kernels[i] === 1 ? plain(view.op[i]) : `${view.kernels[i]} kernels${view.op[i] === "several" ? "" : ` of ${plain(view.op[i])}`}`;
  const wait = view.wait_us[i] === null ? "waiting not known" : `waited ${us(view.wait_us[i])}, transferred ${us(view.duration_us[i] - view.wait_us[i])}`;
  return `<b>${plain(view.communicators[view.communicator[i]])}</b> ${what}${size}<br>${wait}`;
};

// What ran in the stretch that is shown, by communicator: whole kernels, over the lanes shown.
const drawSums = (parent, view) => {
  const rows = view.sums.slice(0, 8).map((each) => element("tr", {},
    element("td", {}, element("span", { class: "swatch", kind: kindOf(each.parallelism) }), ` ${each.communicator}`),
    element("td", { class: "number" }, amount(each.kernels)), element("td", { class: "number" }, us(each.wait_us)),
    element("td", { class: "number" }, us(each.transfer_us)), element("td", { class: "number" }, each.unknown_us > 0 ? us(each.unknown_us) : ""),
    element("td", { class: "number" }, bytes(each.bytes))));
  replace(parent, element("details", { open: parent.querySelector("details[open]") !== null },
    element("summary", { class: "quiet", "data-key": `${parent.id} sums` }, total(view)),
    table(["Communicator", "Kernels|number", "Waiting|number", "Transfer|number", "Not told apart|number", "Bytes|number"], rows)));
};

const total = (view) => {
  const sum = (name) => view.sums.reduce((all, each) => all + each[name], 0);
  const unknown = sum("unknown_us");
  return `In this time, on these lanes: ${amount(sum("kernels"))} kernels, waiting ${us(sum("wait_us"))}, transfer ${us(sum("transfer_us"))}`
    + (unknown > 0 ? `, not told apart ${us(unknown)}` : "") + (view.sums.length > 8 ? `; the 8 of ${view.sums.length} communicators with most` : "");
};
