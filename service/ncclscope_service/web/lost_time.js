// Who holds up whom: the map of time lost to each rank, and what each holdup leads to.
/* global Plotly */

import { CONFIG, layout } from "./charts.js";
import { colour, element, nothingIn, plain, plotIn, replace, setText } from "./dom.js";
import { duration, isKnown, ranges } from "./format.js";
import { toCommunicator, toRank } from "./router.js";
import { follow, timeAxis } from "./span.js";

const WORTH_NAMING = 0.0025; // of a step

// `id` is the card's: its map, `-note` and `-list`. `reach` is how far back it goes, if that is not the time of the charts.
export const drawLostTime = (id, job, view, go, reach = "") => {
  const parent = document.getElementById(id);
  if (view.rows.length === 0) {
    setText(`${id}-note`, "");
    nothingIn(parent, "Not recorded: who comes last shows in the kernels of all ranks of a group that arrives together.");
    replace(document.getElementById(`${id}-list`));
    return;
  }
  const what = view.by === "host" ? `the worst rank of each host${view.rows.length < view.rows_known ? `, ${view.rows.length} of ${view.rows_known} hosts` : ""}` : "time lost to a rank";
  setText(`${id}-note`, `${what}, per ${view.per}, over what is usual${reach}`);
  const least = WORTH_NAMING * view.step_ns;
  const top = Math.max(4 * least, ...view.rows.map((row) => Math.max(row.now_ns ?? 0, mostly(row.lost_us) * 1000))) / 1e6;
  const places = view.rows.map((_, place) => place);
  const isNew = !parent.querySelector(":scope > .plot");
  const plot = plotIn(parent);
  const guilty = places.filter((place) => view.rows[place].now_ns >= least).sort((a, b) => view.rows[b].now_ns - view.rows[a].now_ns).slice(0, 6);
  Plotly.react(plot, [{
    type: "heatmap", y: places, x0: (view.begin_ns + view.column_ns / 2) / 1e6, dx: view.column_ns / 1e6, z: view.rows.map((row) => row.lost_us.map((lost) => (isKnown(lost) ? lost / 1000 : null))),
    zmin: 0, zmax: top, hoverongaps: false, colorscale: [0, 1, 2, 3, 4].map((step) => [[0, 0.12, 0.4, 0.75, 1][step], colour(`lost-${step}`)]),
    xgap: 0.3, ygap: view.rows.length <= 64 ? 1 : 0,
    customdata: view.rows.map((row) => row.lost_us.map(() => nameOf(view, row))),
    hovertemplate: "<b>%{customdata}</b> %{x|%H:%M:%S} UTC<br>others lose %{z:.2f} ms to it<extra></extra>",
    colorbar: { orientation: "h", thickness: 7, len: plot.clientWidth < 400 ? 0.8 : 0.42, x: 1, xanchor: "right", y: 0, yanchor: "top", ypad: 22, outlinewidth: 0,
      ticksuffix: " ms", nticks: plot.clientWidth < 400 ? 2 : 4, tickangle: 0, tickfont: { size: 10.5, color: colour("quiet") } },
  }], layout({
    margin: { l: 8, r: guilty.length ? 86 : 12, t: 8, b: 56 }, plot_bgcolor: colour("empty-cell"), xaxis: timeAxis(plot),
    yaxis: { autorange: "reversed", fixedrange: true, zeroline: false, showgrid: false, automargin: true, tickvals: labelled(view), ticktext: labelled(view).map((place) => labelOf(view, place)), tickfont: { size: 10.5 } },
    annotations: guilty.map((place) => ({ xref: "paper", x: 1, xanchor: "left", y: place, showarrow: false,
      text: `◀ <b>${view.rows[place].worst_rank}</b> ${duration(view.rows[place].now_ns * 1e-9)}`, font: { size: 11.5, color: colour("bad") } })),
  }), CONFIG);
  follow(plot);
  plot.rows = view.rows;
  if (isNew) plot.on("plotly_click", (event) => go(toRank(job, plot.rows[event.points[0].y].worst_rank)));
  replace(document.getElementById(`${id}-list`), ...chains(view).map(({ first, rest }) => element("li", {}, ...sentence(job, first, view.per), ...rest.flatMap((each) => consequence(job, each)))));
};

// What nine of ten values do not exceed.
const mostly = (values) => {
  const known = values.filter(isKnown).sort((a, b) => a - b);
  return known[Math.floor(known.length * 0.9)] ?? 0;
};

const nameOf = (view, row) => plain(view.by === "host" ? `rank ${row.worst_rank} of ${row.host ?? "an unknown host"}` : `rank ${row.worst_rank}${row.host === null ? "" : ` on ${row.host}`}`);

// At most sixteen labels: each rank with its host, else the first of each host.
const labelled = (view) => {
  const places = view.rows.map((_, place) => place);
  if (places.length <= 16) return places;
  const starts = places.filter((place) => view.by === "rank" && (place === 0 || view.rows[place].host !== view.rows[place - 1].host));
  if (starts.length > 1 && starts.length <= 16) return starts;
  const step = Math.ceil(places.length / 16);
  return places.filter((place) => place % step === 0);
};

const labelOf = (view, place) => {
  const row = view.rows[place];
  if (view.by === "host") return plain(row.host ?? `rank ${row.ranks[0]}`);
  return view.rows.length <= 16 ? `${plain(row.host ?? "")} <b>${row.ranks[0]}</b>` : plain(row.host ?? String(row.ranks[0]));
};

// Each rank that is late by itself, with what that leads to: all that one rank causes in groups of one kind is one consequence.
export const chains = (view) => {
  const found = [];
  for (const each of view.holdups) {
    if (each.because_of === null) {
      found.push({ first: each, rest: [] });
      continue;
    }
    const { rest } = found.at(-1);
    const same = rest.find((other) => other.parallelism === each.parallelism);
    if (same) {
      same.late.push(each.rank);
      same.communicators.push(each.communicator);
      same.ranks.push(...each.ranks);
    } else {
      rest.push({ parallelism: each.parallelism, late: [each.rank], communicators: [each.communicator], ranks: [...each.ranks] });
    }
  }
  return found;
};

const rankLink = (job, rank) => element("a", { href: toRank(job, rank) }, `rank ${rank}`);
const groupLink = (job, alias) => element("a", { href: toCommunicator(job, alias) }, alias);
const plural = (ranks) => `${ranks.length === 1 ? "rank" : "ranks"} ${ranks.length > 12 ? `${ranges([...ranks].sort((a, b) => a - b).slice(0, 8))} … (${ranks.length})` : ranges([...ranks].sort((a, b) => a - b))}`;

const sentence = (job, { rank, host, communicator, ranks, lost_ns: lost }, per) => [
  element("b", { class: "guilty" }, rankLink(job, rank)), host === null ? "" : ` on ${host}`, ` holds up ${plural(ranks)} in `, groupLink(job, communicator), ": ",
  element("b", {}, `${duration(lost * 1e-9)} per ${per}`)];

const consequence = (job, { late, communicators, ranks }) => [
  element("span", { class: "quiet" }, ` → ${plural(late)} then ${late.length === 1 ? "comes" : "come"} late to `,
    ...communicators.slice(0, 4).flatMap((each, i) => [i ? ", " : "", groupLink(job, each)]), communicators.length > 4 ? ` and ${communicators.length - 4} more` : "", `: ${plural(ranks)} ${ranks.length === 1 ? "waits" : "wait"}`)];

// The same as text.
export const chainText = (view) => chains(view).map(({ first, rest }) =>
  [`rank ${first.rank}${first.host === null ? "" : ` (${first.host})`} holds up ${plural(first.ranks)} in ${first.communicator}: ${duration(first.lost_ns * 1e-9)} per ${view.per}`,
    ...rest.map((each) => `${plural(each.late)} then late to ${each.communicators.slice(0, 4).join(", ")}: ${plural(each.ranks)} ${each.ranks.length === 1 ? "waits" : "wait"}`)].join(" → "));
