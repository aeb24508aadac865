// Where the job runs: hosts with their GPUs, the groups within them and between them; what an open finding names is red.

import { byId, colour, nothingIn, replace, setText, svg } from "./dom.js";
import { isKnown, percent, words } from "./format.js";
import { toneOf } from "./panels.js";
import { toCommunicator, toRank } from "./router.js";

const WORSE = { bad: 2, warn: 1, calm: 0 };
const PER_ROW = 4;

const text = (x, y, said, { tone = "quiet", size = 11, anchor = "start", weight = 400 } = {}) =>
  svg("text", { x, y, fill: colour(tone), "font-size": size, "text-anchor": anchor, "font-weight": weight, "pointer-events": "none" }, said);
const hint = (said) => svg("title", {}, said);
const about = (group) => `${group.alias}${isKnown(group.efficiency) ? `: ${percent(group.efficiency)} of what is expected` : ""}`;

// `open`: the job's open findings. Those that slow groups make links red, where they name hosts only at these; others GPUs.
export const drawLayout = (view, job, open) => {
  const parent = byId("layout");
  if (view.hosts.length === 0) {
    setText("layout-note", "");
    nothingIn(parent, "Not known: no line has named a rank and its host yet.");
    return;
  }
  const links = open.filter((finding) => finding.slows_groups);
  const guilty = new Set(open.filter((finding) => !finding.slows_groups && finding.ranks.length <= 8).flatMap((finding) => finding.ranks));
  const hostOf = new Map(view.hosts.flatMap((host, place) => host.ranks.map((rank) => [rank, place])));
  const toneAt = (group, places) => {
    const named = links.filter((finding) => finding.groups.includes(group.alias));
    if (named.some((finding) => finding.hosts.length === 0 || places.some((place) => finding.hosts.includes(view.hosts[place].name)))) return "bad";
    return named.length === 0 && toneOf(group.efficiency) !== null ? "warn" : "calm";
  };
  const between = linksOf(view, hostOf, toneAt);
  const size = sizes(view, parent.clientWidth || 900);
  const shown = size.isLabelled ? between : between.filter((link) => link.tone !== "calm"); // healthy ones of many hosts are a blot
  const boxes = view.hosts.map((host, place) => ({ x: 1 + (place % size.columns) * (size.width + size.gap), y: 1 + Math.floor(place / size.columns) * (size.height + size.below) }));
  const at = (rank, shift = 0) => {
    const place = hostOf.get(rank);
    const i = view.hosts[place].ranks.indexOf(rank);
    return [boxes[place].x + size.pad + (i % PER_ROW + 0.5) * size.cell + shift, boxes[place].y + size.head + (Math.floor(i / PER_ROW) + 0.5) * size.cell + shift];
  };
  const inside = size.isLabelled ? view.groups.filter((group) => new Set(group.ranks.map((rank) => hostOf.get(rank))).size === 1) : [];
  const kinds = [...new Set(inside.map((group) => group.parallelism))];
  const height = boxes.at(-1).y + size.height + size.below;
  setText("layout-note", `${view.hosts_known} hosts, ${hostOf.size} ranks, ${view.groups.length} groups${view.hosts.length < view.hosts_known ? `, the first ${view.hosts.length} hosts` : ""}${shown.length < between.length ? "; of links between hosts only those in trouble" : ""} · red: named by a finding`);
  replace(parent, svg("svg", { class: "layout", width: size.columns * (size.width + size.gap), height, role: "group", "aria-label": `Topology: ${view.hosts_known} hosts` },
    ...shown.sort((a, b) => WORSE[a.tone] - WORSE[b.tone]).map((link) => curve(link, boxes, size)),
    ...view.hosts.flatMap((host, place) => box(host, boxes[place], size, links.find((finding) => finding.hosts.includes(host.name) && finding.hosts.length <= 4))),
    ...inside.map((group) => svg("a", { href: toCommunicator(job, group.alias) },
      svg("polyline", { points: group.ranks.map((rank) => at(rank, 3 * (kinds.indexOf(group.parallelism) - (kinds.length - 1) / 2)).join(",")).join(" "), fill: "none", stroke: colour(toneAt(group, [hostOf.get(group.ranks[0])])),
        "stroke-width": 2.5, "stroke-linejoin": "round", opacity: 0.75, "data-group": group.alias }, hint(about(group))))),
    ...view.hosts.flatMap((host) => host.ranks.map((rank, i) => gpu(job, rank, host.gpus[i], at(rank), size, guilty.has(rank))))));
};

const sizes = (view, available) => {
  const isLabelled = view.hosts.length <= 16;
  const cell = isLabelled ? 33 : view.hosts.length <= 64 ? 14 : 9;
  const pad = isLabelled ? 8 : 5;
  const rows = Math.ceil(Math.max(...view.hosts.map((host) => host.ranks.length)) / PER_ROW);
  const [width, gap, head] = [PER_ROW * cell + 2 * pad, isLabelled ? 14 : 8, isLabelled ? 26 : 6];
  return { isLabelled, cell, pad, width, gap, head, height: head + rows * cell + (isLabelled ? 20 : 8), below: isLabelled ? 44 : 12,
    columns: Math.max(1, Math.min(view.hosts.length, Math.floor((available + gap) / (width + gap)))) };
};

// The pairs of hosts that neighbours in a group's order connect: { from, to, tone, groups }.
const linksOf = (view, hostOf, toneAt) => {
  const found = new Map();
  for (const group of view.groups) {
    const order = [...new Set(group.ranks.map((rank) => hostOf.get(rank)))];
    if (order.length < 2) continue;
    order.forEach((from, i) => {
      const to = order[(i + 1) % order.length];
      if (order.length === 2 && i === 1) return;
      const key = [Math.min(from, to), Math.max(from, to)].join();
      const link = found.get(key) ?? { from: Math.min(from, to), to: Math.max(from, to), tone: "calm", groups: [] };
      const tone = toneAt(group, [from, to]);
      if (WORSE[tone] > WORSE[link.tone]) link.tone = tone;
      link.groups.push(group);
      found.set(key, link);
    });
  }
  return [...found.values()];
};

const curve = ({ from, to, tone, groups }, boxes, size) => {
  const [a, b] = [boxes[from], boxes[to]].map((each) => ({ x: each.x + size.width / 2, y: each.y + size.height }));
  const dip = Math.max(a.y, b.y) + Math.min(size.below - 6, 8 + Math.abs(b.x - a.x) * 0.05);
  return svg("path", { d: `M${a.x} ${a.y}C${a.x} ${dip + 6} ${b.x} ${dip + 6} ${b.x} ${b.y}`, fill: "none", stroke: colour(tone), "data-tone": tone,
    "stroke-width": tone === "calm" ? 1 : 2.5, opacity: tone === "calm" ? 0.45 : 1 }, hint(groups.slice(0, 12).map(about).join("\n")));
};

const box = (host, { x, y }, size, finding) => {
  const tone = finding === undefined ? "line" : "bad";
  const frame = svg("rect", { x, y, width: size.width, height: size.height, rx: size.isLabelled ? 9 : 4, fill: colour("card"), stroke: colour(tone), "stroke-width": finding === undefined ? 1 : 1.6 },
    hint(finding === undefined ? host.name : `${host.name}: ${finding.summary}`));
  const link = svg("rect", { x: x + size.pad, y: y + size.height - (size.isLabelled ? 6 : 4), width: size.width - 2 * size.pad, height: size.isLabelled ? 4 : 2, rx: 1, fill: colour(finding === undefined ? "track" : "bad"), "data-host": host.name, "data-tone": tone });
  if (!size.isLabelled) return [frame, link];
  const loss = finding?.evidence.loss_ratio;
  return [frame, link, text(x + size.pad, y + 17, host.name.length > 22 ? `${host.name.slice(0, 21)}…` : host.name, { tone: finding === undefined ? "ink" : "bad", weight: 600, size: 12 }),
    finding === undefined ? null : text(x + size.pad, y + size.height - 9, `${words(finding.kind)}${loss > 0 ? ` −${percent(loss)}` : ""}`, { tone: "bad", size: 10.5 })];
};

const gpu = (job, rank, device, [x, y], size, isGuilty) => {
  const side = size.cell - (size.isLabelled ? 10 : 2);
  return svg("a", { href: toRank(job, rank) },
    svg("rect", { x: x - side / 2, y: y - side / 2, width: side, height: side, rx: size.isLabelled ? 6 : 2, fill: colour(isGuilty ? "bad" : "accent-soft"), stroke: colour(isGuilty ? "bad" : "line"), "data-rank": rank, "data-tone": isGuilty ? "bad" : "calm" },
      hint(`rank ${rank}${isKnown(device) ? `, GPU ${device}` : ""}`)),
    size.isLabelled ? text(x, y + 4, String(rank), { tone: isGuilty ? "card" : "ink", anchor: "middle", weight: 600 }) : null);
};
