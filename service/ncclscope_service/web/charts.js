// Bandwidth over time by parallelism; what all charts have in common.
/* global Plotly */

import { byId, colour, element, plain, replace, setText } from "./dom.js";
import { bandwidth, isKnown, sizeClass } from "./format.js";
import { follow, timeAxis } from "./span.js";

export const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false };
const FONT = "Inter, 'Segoe UI', system-ui, Roboto, Arial, sans-serif";

// The middle of each bucket of an overview or detail, in ms since 1970: plotly draws dates in UTC.
export const bucketTimes = (over, count) =>
  Array.from({ length: count }, (_, i) => over.window_begin_ns / 1e6 + (i + 0.5) * over.bucket_seconds * 1000);

export const layout = (extra) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
  font: { family: FONT, size: 11, color: colour("quiet") }, hovermode: "closest",
  hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { family: FONT, size: 12, color: colour("ink") } },
  ...extra,
});

// `over`: what the courses cover (an overview, or an answer with `window_begin_ns` and `bucket_seconds`).
export const drawBandwidth = (over, job, { slowed }) => {
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
    replace(parent, element("p", { class: "nothing" }, "Nothing was recorded in this time."));
    return;
  }
  const keys = kinds.map((kind) => kind ?? "unknown").join();
  if (parent.dataset.keys !== keys || !parent.querySelector(".multiple")) {
    replace(parent, ...kinds.map(frame));
    parent.dataset.keys = keys;
  }
  kinds.forEach((kind, position) => {
    const lines = own(job, kind).filter((each) => isWorthALine(each, field));
    drawMultiple(parent.children[position], over, kind, lines, field, slowed);
  });
};

const level = (value, factor, dash) => (value === null ? null : { type: "line", xref: "paper", x0: 0, x1: 1, y0: value * factor, y1: value * factor,
  line: { dash, width: 1.2, color: colour("faint") } });

const own = (job, kind) => job.communicators.filter((each) => each.parallelism === kind);
// A bandwidth of messages this small is a latency in disguise.
const isWorthALine = (each, field) =>
  each[field].some(isKnown) && !(field === "busbw_history" && each.is_latency_bound);

const frame = () =>
  element("div", { class: "multiple" },
    element("h3", {}, element("span", { class: "title" }), element("span", { class: "quiet about" }), element("span", { class: "quiet unit" })),
    element("div", { class: "plot" }));

const drawMultiple = (parent, over, kind, lines, field, slowed) => {
  const first = lines[0];
  parent.querySelector(".title").textContent = kind ?? "Kind not known";
  const sameMain = lines.every((each) => each.main_op === first.main_op && each.main_size_class === first.main_size_class);
  parent.querySelector(".about").textContent = `${lines.length === 1 ? "1 communicator" : `${lines.length} communicators`}`
    + (sameMain && first.main_op ? ` · ${first.main_op} ${sizeClass(first.main_size_class)}` : "");
  const x = bucketTimes(over, first[field].length);
  const calm = colour("calm");
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
  const plot = parent.querySelector(".plot");
  Plotly.react(plot, traces, layout({
    margin: { l: 38, r: 20, t: 6, b: 20 }, xaxis: timeAxis(plot),
    yaxis: { range: [0, top * factor * 1.2], fixedrange: true, zeroline: false, nticks: 4, gridcolor: colour("line"), tickfont: { size: 10.5 } },
    shapes: [level(limit, factor, "4px,4px"), level(best, factor, "1px,3px")].filter(isKnown),
    annotations: limit === null ? [] : [{ xref: "paper", x: 1, y: limit * factor, text: `limit ${bandwidth(limit * 1e9)}`, showarrow: false,
      xanchor: "right", yanchor: "bottom", yshift: -1, font: { size: 10.5, color: colour("quiet") } }],
  }), CONFIG);
  follow(plot);
};
