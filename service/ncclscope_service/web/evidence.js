// What proves a finding, as pictures: its groups against the healthy ones, and one late collective on all its ranks; and both to be sent to somebody.

import { colour, element, kindOf, replace, svg } from "./dom.js";
import { bytes, duration, isKnown, moment, percent, timeOfDay, words } from "./format.js";
import { toCommunicator, toJob } from "./router.js";

const WIDTH = 720;
const us = (value) => duration(value * 1e-6);

// A picture has its colours in itself, so that it can leave the page.
const text = (x, y, said, { tone = "quiet", anchor = "start", size = 11 } = {}) =>
  svg("text", { x, y, fill: colour(tone), "font-size": size, "text-anchor": anchor, "font-family": "system-ui, sans-serif" }, said);
const frame = (height, label, ...children) => svg("svg", { class: "picture", viewBox: `0 0 ${WIDTH} ${height}`, width: WIDTH, height, role: "img", "aria-label": label }, ...children);

// One collective: a bar for each rank, waiting and then transfer, and from the rank that came last an arrow to those that waited for it.
export const collectivePicture = (found) => {
  const [left, row] = [150, 17];
  const height = 26 + found.ranks.length * row + 22;
  const end = Math.max(...found.ranks.map((each) => each.end_us), 1e-3);
  const x = (time) => left + (time / end) * (WIDTH - left - 12);
  const last = found.ranks.find((each) => each.rank === found.last_rank);
  const at = (i) => 22 + i * row;
  const rows = found.ranks.flatMap((each, i) => {
    const isLast = each.rank === found.last_rank;
    const cut = each.start_us + (each.wait_us ?? 0);
    const name = `${isKnown(each.global_rank) ? each.global_rank : `#${each.rank}`}${each.host === null ? "" : ` · ${each.host}`}`;
    const bar = (from, to, tone) => svg("rect", { x: x(from).toFixed(2), y: at(i), width: Math.max(0.5, x(to) - x(from)).toFixed(2), height: row - 5, rx: 2, fill: colour(tone) });
    return [text(left - 8, at(i) + 10, name.length > 24 ? `${name.slice(0, 23)}…` : name, { tone: isLast ? "bad" : "ink", anchor: "end" }),
      cut > each.start_us ? bar(each.start_us, cut, "waiting") : null, bar(cut, each.end_us, each.wait_us === null ? "faint" : kindOf(found.parallelism))];
  });
  const place = found.ranks.indexOf(last);
  const line = x(last.start_us).toFixed(2);
  const arrow = (to, by) => (to === place ? null : svg("path", { d: `M${line} ${at(place) + 6}V${at(to) + 6}m-3 ${by}l3 ${-by}l3 ${by}`, fill: "none", stroke: colour("bad"), "stroke-width": 1.4 }));
  return frame(height, `${found.op} ${found.coll_seq} of ${found.communicator}: ${sentence(found)}`,
    text(0, 12, `${found.op}${isKnown(found.message_bytes) ? ` of ${bytes(found.message_bytes)}` : ""}, number ${found.coll_seq} of ${found.communicator}, ${timeOfDay(found.begin_ns)}: ${sentence(found)}`, { tone: "ink" }),
    ...rows, arrow(0, 5), arrow(found.ranks.length - 1, -5),
    text(left, height - 8, "0"), text(WIDTH - 12, height - 8, us(end), { anchor: "end" }),
    text(left + 40, height - 8, `pale: waiting · then transfer${found.ranks.length < found.ranks_seen ? ` · ${found.ranks.length} of ${found.ranks_seen} ranks` : ""}`));
};

const sentence = (found) => `rank ${found.last_global_rank ?? `#${found.last_rank}`} comes last, ${us(found.blame_us)} after all others`;

// The groups of a finding in red and the healthy ones in grey: bus bandwidth against what is expected of each, and where the finding begins.
const groupsPicture = (overview, job, finding) => {
  const lines = job.communicators.filter((each) => !each.is_latency_bound && each.expected > 0 && each.busbw_history.some(isKnown));
  if (!lines.some((each) => finding.groups.includes(each.alias))) return null;
  const [left, height] = [44, 150];
  const count = lines[0].busbw_history.length;
  const x = (i) => left + ((i + 0.5) / count) * (WIDTH - left - 8);
  const y = (ratio) => 18 + (1 - Math.min(1.2, ratio) / 1.2) * (height - 40);
  const drawn = lines.map((each) => [finding.groups.includes(each.alias), each]).sort(([a], [b]) => a - b);
  const paths = drawn.map(([isSlow, each]) => {
    let pen = "M";
    const d = each.busbw_history.map((value, i) => {
      if (!isKnown(value)) { pen = "M"; return ""; }
      const point = `${pen}${x(i).toFixed(1)} ${y(value / each.expected).toFixed(1)}`;
      pen = "L";
      return point;
    }).join("");
    return svg("path", { d, fill: "none", stroke: colour(isSlow ? "bad" : "calm"), "stroke-width": isSlow ? 2 : 1.1, opacity: isSlow ? 1 : 0.55, "stroke-linecap": "round" });
  });
  const since = (finding.since_ns - overview.window_begin_ns) / (overview.now_ns - overview.window_begin_ns);
  const flag = since > 0 && since < 1 ? left + since * (WIDTH - left - 8) : null;
  const slow = drawn.filter(([isSlow]) => isSlow).map(([, each]) => each.alias);
  return frame(height, `${slow.length} slow groups against ${drawn.length - slow.length} others`,
    ...[0, 0.5, 1].flatMap((ratio) => [svg("path", { d: `M${left} ${y(ratio)}H${WIDTH - 8}`, stroke: colour("line") }), text(left - 6, y(ratio) + 4, percent(ratio), { anchor: "end" })]),
    flag === null ? null : svg("path", { d: `M${flag} 18V${height - 22}`, stroke: colour("bad"), "stroke-dasharray": "3 3" }),
    flag === null ? null : text(flag + 4, 28, `⚑ ${timeOfDay(finding.since_ns)}`, { tone: "bad" }),
    ...paths,
    text(0, 12, `Bus bandwidth against what is expected: ${slow.slice(0, 8).join(", ")}${slow.length > 8 ? " …" : ""} in red, ${drawn.length - slow.length} others in grey`, { tone: "ink" }),
    text(left, height - 6, timeOfDay(overview.window_begin_ns)), text(WIDTH - 8, height - 6, timeOfDay(overview.now_ns), { anchor: "end" }));
};

const AGAIN_MS = 5000;
const collectives = new Map(); // by path: { found, askedAt }

// The collective that proves a late rank; asked for when the finding is open and drawn where it stands when it comes.
const lateCollective = (finding) => {
  if (finding.kind !== "late_rank" || finding.communicator === null || finding.ranks.length !== 1) return null;
  const path = `/api/jobs/${encodeURIComponent(finding.job)}/communicators/${encodeURIComponent(finding.communicator)}/collective?late_rank=${finding.ranks[0]}`;
  const known = collectives.get(path);
  if (known === undefined || performance.now() - known.askedAt > AGAIN_MS) {
    if (collectives.size > 64) collectives.clear();
    collectives.set(path, { found: known?.found, askedAt: performance.now() });
    fetchCollective(path);
  }
  return element("div", { "data-collective": path }, ...(known?.found ? [collectivePicture(known.found)] : []));
};

const fetchCollective = async (path) => {
  const answer = await fetch(path).catch(() => null); // the service is away: the event stream says so
  if (!answer?.ok) return;
  const found = await answer.json();
  collectives.set(path, { found, askedAt: performance.now() });
  for (const parent of document.querySelectorAll(`[data-collective="${CSS.escape(path)}"]`)) replace(parent, ...(found === null ? [] : [collectivePicture(found)]));
};

// The pictures of an open finding, and the buttons that send it to somebody.
export const proof = (overview, finding) => {
  const job = overview.jobs.find((each) => each.name === finding.job);
  const pictures = [finding.slows_groups && job !== undefined ? groupsPicture(overview, job, finding) : null, lateCollective(finding)].filter(isKnown);
  const parent = element("div", { class: "proof" }, ...pictures);
  const key = `${finding.kind} ${finding.since_ns} ${finding.ranks}`;
  const button = (name, act) => {
    const made = element("button", { type: "button", "data-key": `${name} ${key}` }, name);
    made.addEventListener("click", () => act(made));
    return made;
  };
  parent.append(element("p", { class: "marks" },
    button("Copy for Slack", (made) => copy(made, inWords(finding))),
    pictures.length === 0 ? null : button("Save as PNG", () => savePicture(finding, parent.querySelectorAll("svg.picture")))));
  return parent;
};

// Slack's own marks: *bold*, > quote, and an address alone in a line.
const inWords = (finding) => [
  `*${words(finding.kind)}* (${finding.severity}, ${percent(finding.confidence)} sure) in ${finding.job}`,
  `> ${finding.summary}`,
  [finding.until_ns === null ? `since ${moment(finding.since_ns)}` : `${moment(finding.since_ns)} to ${moment(finding.until_ns)}`,
    finding.hosts.length ? `hosts ${finding.hosts.join(", ")}` : "", finding.groups.length ? `communicators ${finding.groups.slice(0, 12).join(", ")}` : ""].filter(Boolean).join(" · "),
  `${location.origin}/${finding.communicator === null ? toJob(finding.job) : toCommunicator(finding.job, finding.communicator)}`,
].join("\n");

// The clipboard is there on https and on this machine only; elsewhere the text is selected in a field, as before it existed.
const copy = async (button, said) => {
  if (navigator.clipboard) await navigator.clipboard.writeText(said);
  else {
    const field = element("textarea", { class: "copied" });
    field.value = said;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "Copied";
};

const SCALE = 2;

const savePicture = async (finding, pictures) => {
  const images = await Promise.all([...pictures].map(asImage));
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d");
  const font = "600 14px system-ui, sans-serif";
  context.font = font;
  const lines = wrapped(context, `${words(finding.kind)}, ${finding.job}: ${finding.summary}`);
  canvas.width = (WIDTH + 40) * SCALE;
  canvas.height = (40 + lines.length * 20 + images.reduce((sum, image) => sum + image.height + 14, 0)) * SCALE;
  context.scale(SCALE, SCALE);
  context.fillStyle = colour("card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = colour("ink");
  context.font = font;
  lines.forEach((line, i) => context.fillText(line, 20, 30 + i * 20));
  let top = 30 + lines.length * 20;
  for (const image of images) {
    context.drawImage(image, 20, top, image.width, image.height);
    top += image.height + 14;
  }
  canvas.toBlob((blob) => {
    const link = element("a", { href: URL.createObjectURL(blob), download: `${finding.id || finding.kind}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
};

const asImage = async (picture) => {
  const source = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(picture)], { type: "image/svg+xml" }));
  const image = new Image(WIDTH, Number(picture.getAttribute("height")));
  image.src = source;
  await image.decode();
  URL.revokeObjectURL(source);
  return image;
};

const wrapped = (context, said) => {
  const lines = [""];
  for (const word of said.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (context.measureText(longer).width > WIDTH) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
};
