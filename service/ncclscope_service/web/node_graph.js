// NCCL's graph of each kind of node with the bytes on its links, and the rings and trees of a communicator.

import { byId, colour, element, nothingIn, replace, setText, svg } from "./dom.js";
import { bytes, isKnown, percent, ranges } from "./format.js";
import { table } from "./panels.js";
import { toCommunicator, toRank } from "./router.js";

const CELL = 84;
const ROW = 74;
const [WIDTH, HEIGHT] = [70, 30];
const TONES = { GPU: "tp", NVS: "dp", NIC: "pp", NET: "pp", CPU: "world" };
const MOST_LINKS = 64;
const HOW = "Not recorded: no log has NCCL's graph of a node. It is printed when a communicator is made, if NCCL_DEBUG_SUBSYS has GRAPH.";

const named = (names, known, what) => `${names.join(", ")}${known > names.length ? ` and ${known - names.length} more ${what}` : ""}`;
const text = (x, y, said, size, tone, weight = 400) =>
  svg("text", { x, y, "text-anchor": "middle", "font-size": size, "font-weight": weight, fill: colour(tone), "pointer-events": "none" }, said);

export const drawNodeGraph = (view, job) => {
  const parent = byId("node-graph");
  const { graphs, channels } = view;
  const more = view.kinds_known - graphs.length;
  setText("node-graph-note", [graphs.length > 0 ? "rates in GB/s per direction; coloured, the wider the more: bytes of what is in memory, on the ways that NCCL takes" : null,
    view.assumed_ratio > 0.01 ? `for ${percent(view.assumed_ratio)} no line names the algorithm: a ring is taken` : null,
    more > 0 ? `${more} more kinds of nodes are not drawn` : null].filter(isKnown).join("; "));
  setText("node-graph-without", graphs.length > 0 && view.hosts_without_known > 0 ? `Not recorded: the graph of ${named(view.hosts_without, view.hosts_without_known, "hosts")}.` : "");
  const count = graphs.length + (channels === null ? 0 : 1);
  if (count === 0) {
    nothingIn(parent, HOW);
    return;
  }
  // Figures stay, so that a look aside and open lists do too.
  if (parent.querySelectorAll(":scope > figure").length !== count || parent.children.length !== count) parent.replaceChildren(...Array.from({ length: count }, frame));
  graphs.forEach((graph, i) => fill(parent.children[i], captionOf(graph), pictureOf(graph, job), linksOf(graph)));
  if (channels !== null) {
    const { communicator, edges } = channels;
    fill(parent.children[graphs.length], ["Rings and trees of ", element("a", { href: toCommunicator(job, communicator), "data-key": "channels" }, communicator),
      ` (${edges.ranks.length} ranks), as NCCL printed them: above, whom each rank sends to in ${edges.channels} rings; below, the trees. Wider: in more channels.`,
      graphs.length === 0 ? ` ${HOW}` : ""], channelsOf(edges, job), null);
  }
};

const frame = () => element("figure", {}, element("figcaption", { class: "quiet" }), element("div", { class: "sideways", tabindex: 0, role: "region" }),
  element("details", { class: "sums" }, element("summary", {}, "Links"), element("div", { class: "table-scroll" })));

const fill = (figure, caption, picture, links) => {
  const [captioned, region, details] = figure.children;
  replace(captioned, ...caption);
  region.setAttribute("aria-label", captioned.textContent);
  replace(region, picture);
  details.hidden = links === null;
  replace(details.lastElementChild, ...(links === null ? [] : links));
};

const captionOf = (graph) => {
  const { hosts, ranks_without_gpu: without } = graph;
  const whose = `${named(hosts.slice(0, 8), hosts.length, "hosts")}${hosts.length > 1 ? ", which multi-node NVLink joins" : ""}`;
  return [element("b", {}, whose), graph.alike_known > 0 ? `; the same graph, not drawn: ${named(graph.alike, graph.alike_known, "hosts")}` : "",
    without.length > 0 ? `. Left out, with their bytes: no line says which of these GPUs is that of rank ${ranges([...without])}` : "",
    graph.bytes_without_way > 0 ? `. ${bytes(graph.bytes_without_way)} more have no way in this graph` : ""];
};

const giga = (rates) => [...new Set(rates.filter(isKnown).map((rate) => String(Math.round(rate / 1e8) / 10)))].join("/");
const nameOf = (node) => (node.ranks.length > 0 ? `rank ${node.ranks.join(", ")} (${node.name})` : node.name);

const pictureOf = (graph, job) => {
  const { nodes, links } = graph;
  const center = nodes.map((node) => [10 + (node.column + 0.5) * CELL, 52 + node.row * ROW]);
  const width = Math.max(...center.map(([x]) => x)) + CELL / 2 + 10;
  const most = Math.max(0, ...links.flatMap((link) => link.bytes));
  const least = nodes.some((node) => node.kind === "NET") ? 112 : 20; // below the ports
  const drawn = links.map((link) => linkOf(link, nodes, center, most, least));
  const height = Math.max(...center.map(([, y]) => y + HEIGHT / 2), ...drawn.map((each) => each.bottom)) + 12;
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `NCCL's graph of ${graph.hosts[0]}: ${nodes.length} nodes, ${links.length} links` },
    ...drawn.map((each) => each.path), ...drawn.map((each) => each.label), ...nodes.map((node, i) => box(node, center[i], job)));
};

const linkOf = (link, nodes, center, most, least) => {
  const [[x1, y1], [x2, y2]] = link.ends.map((end) => center[end]);
  const share = most > 0 ? Math.max(...link.bytes) / most : 0;
  const isAbove = link.kind === "SYS";
  const edge = y1 + (isAbove ? -HEIGHT : HEIGHT) / 2;
  const dip = isAbove ? -34 : least + Math.min(0.16 * Math.abs(x2 - x1), 70);
  const isLevel = y1 === y2;
  const along = link.kind === "NVL" ? (y1 < y2 ? 0.28 : 0.72) : 0.5; // beside the GPU: ports stand between it and the NVSwitch
  const at = isLevel ? [(x1 + x2) / 2, edge + 0.78 * dip] : [x1 + along * (x2 - x1), y1 + along * (y2 - y1)];
  const sent = share > 0 ? `: ${bytes(link.bytes[0])} one way, ${bytes(link.bytes[1])} the other` : "";
  const path = svg("path", { d: isLevel ? `M${x1} ${edge}C${x1} ${edge + dip} ${x2} ${edge + dip} ${x2} ${edge}` : `M${x1} ${y1}L${x2} ${y2}`, fill: "none",
    stroke: colour(share > 0 ? "accent" : "faint"), "stroke-width": (1 + 6 * share).toFixed(2), "data-link": link.kind, "data-ends": link.ends.join() },
  svg("title", {}, `${link.kind} ${giga(link.rates)} GB/s between ${link.ends.map((end) => nameOf(nodes[end])).join(" and ")}${sent}`));
  const label = text(at[0], at[1] + 3, giga(link.rates), 9, "quiet");
  for (const [name, value] of [["stroke", colour("card")], ["stroke-width", 3], ["paint-order", "stroke"]]) label.setAttribute(name, value);
  return { path, label, bottom: at[1] + 6 };
};

const box = (node, [x, y], job) => {
  const rank = node.ranks[0];
  const isRank = rank !== undefined;
  const shown = [svg("title", {}, `${nameOf(node)}${node.host === null ? "" : ` on ${node.host}`}`),
    svg("rect", { x: x - WIDTH / 2, y: y - HEIGHT / 2, width: WIDTH, height: HEIGHT, rx: 6, fill: colour("card"), stroke: colour(TONES[node.kind] ?? "unknown"), "stroke-width": 1.6 }),
    text(x, y - 2, isRank ? `rank ${node.ranks.join(", ")}` : node.kind, 11, "ink", 600), text(x, y + 10, node.name, 9, "quiet")];
  return isRank ? svg("a", { href: toRank(job, rank), "data-key": `graph ${rank}`, "data-node": node.kind }, ...shown) : svg("g", { "data-node": node.kind }, ...shown);
};

// What the picture shows as widths and colours, as numbers.
const linksOf = ({ nodes, links }) => {
  const listed = [...links].sort((a, b) => Math.max(...b.bytes) - Math.max(...a.bytes)).slice(0, MOST_LINKS);
  const cells = (link) => [[link.kind, false], [nameOf(nodes[link.ends[0]]), false], [nameOf(nodes[link.ends[1]]), false], [giga(link.rates), true], [bytes(link.bytes[0]), true], [bytes(link.bytes[1]), true]];
  return [table(["Link", "From", "To", "GB/s|number", "Sent|number", "Back|number"],
    listed.map((link) => element("tr", {}, ...cells(link).map(([said, isNumber]) => element("td", { class: isNumber ? "number" : null }, said))))).firstElementChild,
  listed.length < links.length ? element("p", { class: "quiet" }, `and ${links.length - listed.length} more`) : null].filter(isKnown);
};

const channelsOf = (edges, job) => {
  const room = (which) => Math.round(34 + 9 * Math.max(0, ...which.map(({ ends: [from, to] }) => Math.abs(to - from))));
  const [width, middle] = [edges.ranks.length * 62 + 20, room(edges.rings)];
  const height = middle + room(edges.trees);
  const name = (place) => String(edges.ranks[place] ?? place);
  const arcs = (which, side, tone) => {
    const most = Math.max(1, ...which.map((each) => each.channels));
    return which.map(({ ends: [from, to], channels }) => {
      const [x1, x2, edge, dip] = [41 + 62 * from, 41 + 62 * to, middle + 14 * side, side * (16 + 11.5 * Math.abs(to - from))];
      return svg("path", { d: `M${x1} ${edge}C${x1} ${edge + dip} ${x2} ${edge + dip} ${x2} ${edge}`, fill: "none", stroke: colour(tone), "stroke-width": (0.8 + (2.4 * channels) / most).toFixed(2), opacity: 0.8, "data-channels": channels },
        svg("title", {}, `${name(from)} to ${name(to)}: ${channels} channels`));
    });
  };
  const seat = (rank, place) => {
    const shown = [svg("rect", { x: 19 + 62 * place, y: middle - 14, width: 44, height: 28, rx: 6, fill: colour("card"), stroke: colour("line") }), text(41 + 62 * place, middle + 4, name(place), 12, "ink", 600)];
    return isKnown(rank) ? svg("a", { href: toRank(job, rank), "data-key": `channel ${rank}` }, svg("title", {}, `rank ${rank}`), ...shown) : svg("g", {}, ...shown);
  };
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Rings and trees of ${edges.ranks.length} ranks` },
    ...arcs(edges.rings, -1, "tp"), ...arcs(edges.trees, 1, "dp"), ...edges.ranks.map(seat));
};
