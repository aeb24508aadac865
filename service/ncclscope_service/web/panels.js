// Everything on the page that is not a chart: tiles, findings, tables and bars.

import { byId, element, kindOf, replace, setText, svg } from "./dom.js";
import { proof } from "./evidence.js";
import {
  NOT_RECORDED, age, amount, bandwidth, bytes, capitalised, duration, isKnown, moment, percent, ranges, sizeClass,
  timeOfDay, words,
} from "./format.js";
import { marksInFull, marksInShort, markButtons } from "./marks.js";
import { toCommunicator, toJob, toRank } from "./router.js";
import { slowing } from "./steps.js";

const missing = () => element("span", { class: "not-recorded" }, NOT_RECORDED);
export const shown = (value, format) => (isKnown(value) ? format(value) : missing());

export const tile = (name, value, { detail = "", tone = null, hint = null } = {}) =>
  element("div", { "data-tone": tone, title: hint },
    element("dd", {}, value, detail ? element("small", {}, ` ${detail}`) : null), element("dt", {}, name));

const AWAIT_BY_DESIGN = new Set(["PP", "WORLD", "EMBEDDING"]);

export const drawTiles = (job) => {
  const { step } = job;
  const change = slowing(step);
  const waiting = job.parallelisms.filter((each) => isKnown(each.wait_ratio) && !AWAIT_BY_DESIGN.has(each.parallelism)).sort((a, b) => b.wait_ratio - a.wait_ratio)[0];
  const slowest = leastEfficient(job);
  replace(byId("tiles"),
    tile("Step time", step === null ? missing() : duration(step.now_ns * 1e-9), { detail: isKnown(change) ? `before ${duration(step.before_ns * 1e-9)}` : "",
      tone: change > 0.1 ? "bad" : change > 0.01 ? "warn" : null, hint: "Median of the last 20 steps or so" }),
    tile("Exposed communication", shown(job.exposed_ratio, percent), { detail: isKnown(job.exposed_ratio) ? "of a step" : "",
      hint: "Time in which a NCCL kernel ran and no other kernel of that GPU did" }),
    tile("Wait share", waiting === undefined ? missing() : percent(waiting.wait_ratio), { detail: waiting === undefined ? "" : `of NCCL kernel time in ${waiting.parallelism ?? "one kind"}`,
      hint: "Share of NCCL kernel time in which a rank waited for the last one: median over the communicators of the kind that waits most. PP, EMBEDDING and WORLD wait by design and are left out" }),
    tile("Efficiency", slowest === null ? missing() : percent(slowest.efficiency), { detail: slowest === null ? "" : `of what is expected, ${slowest.alias}`,
      tone: slowest === null ? null : toneOf(slowest.efficiency), hint: "The communicator whose bus bandwidth is furthest below what it, or the groups like it, have shown at best" }));
};

// What a group does of what is expected of it, and how bad that is: colour says state, not kind.
export const efficiencyOf = (each) => (isKnown(each.busbw) && each.expected > 0 ? each.busbw / each.expected : null);
export const toneOf = (efficiency) => (efficiency === null ? null : efficiency < 0.65 ? "bad" : efficiency < 0.85 ? "warn" : null);

// The communicator of a job that is furthest below what is expected of it: { alias, efficiency }, or null.
export const leastEfficient = (job) => job.communicators.map((each) => ({ alias: each.alias, efficiency: efficiencyOf(each) }))
  .filter((each) => each.efficiency !== null).sort((a, b) => a.efficiency - b.efficiency)[0] ?? null;

export const GRAVE = { critical: 2, warning: 1, info: 0 };

// The findings of a job, or of one of its parts, the gravest open ones first; `calm` (steps.verdict) is shown where none is open, null leaves it empty.
export const drawFindings = (parent, overview, findings, calm) => {
  const opened = new Set([...parent.querySelectorAll("details[open]")].map((each) => each.dataset.finding));
  const isOver = (finding) => finding.until_ns !== null;
  findings = [...findings].sort((a, b) => isOver(a) - isOver(b) || (isOver(a) ? 0 : GRAVE[b.severity] - GRAVE[a.severity]));
  if (!findings.some((finding) => finding.until_ns === null)) {
    const watched = calm === null ? [] : [element("p", { class: "calm", "data-state": calm.state }, calm.text, element("span", {}, calm.detail))];
    replace(parent, ...watched, ...findings.slice(0, 3).map((finding) => findingRow(overview, finding, opened)));
    return;
  }
  replace(parent, ...findings.slice(0, 8).map((finding) => findingRow(overview, finding, opened)));
};

// How a silent job ended, as its logs stand, and where the ranks stood whose groups stand apart.
export const drawVerdict = (job) => {
  const { verdict } = job;
  byId("verdict").hidden = verdict === null;
  if (verdict === null) return;
  setText("verdict-title", verdict.is_provisional ? `Silent: ${verdict.ending}, as its logs stand` : `How it ended: ${verdict.ending}`);
  setText("verdict-note", verdict.first_failure === null ? "" : `first failure at ${verdict.first_failure.where}`);
  setText("verdict-summary", verdict.summary);
  const ranks = (found) => element("td", {}, ...found.flatMap((rank, i) => [i ? ", " : "", element("a", { href: toRank(job.name, rank) }, String(rank))]));
  const alias = (id) => job.communicators.find((each) => each.comm_id === id)?.alias;
  const group = (each) => (alias(each.comm_id) === undefined ? [each.parallelism, each.comm_id].filter(isKnown).join(" ")
    : element("a", { href: toCommunicator(job.name, alias(each.comm_id)) }, alias(each.comm_id)));
  const isShown = verdict.ending !== "ended together" && verdict.standing.length > 0;
  replace(byId("verdict-standing"), ...(isShown ? [table(["Rank", "Host", "Group", "Enqueued|number", "Behind|number", "Waits for", "Waits end at", "Last words"],
    verdict.standing.map((each) => element("tr", {},
      element("td", {}, element("a", { class: "name", href: toRank(job.name, each.rank), "data-key": `standing ${each.rank}` }, String(each.rank))),
      element("td", {}, each.host ?? shown(null)), element("td", {}, group(each)),
      element("td", { class: "number" }, amount(each.enqueued)), element("td", { class: "number" }, amount(each.behind)),
      ranks(each.waits_for), ranks(each.blamed), element("td", {}, each.last_words ?? ""))))] : []));
};

const PROCESSES = "nvidia-smi --query-compute-apps=pid --format=csv,noheader";
const DUMP = `'for p in $(${PROCESSES}); do py-spy dump --pid $p; done'`;
const DRIVER = "'dmesg -T | grep -iE \"xid|nvrm|mlx5|oom\" | tail'";
const LINKS = ["ibstat", "'nvidia-smi nvlink -e; nvidia-smi topo -m'", "'for n in /sys/class/net/*; do ethtool -S ${n##*/} 2>/dev/null | grep -iE \"(err|drop|discard).*: [1-9]\"; done'"];
// As docs/findings.md has them, in its order; on the hosts that a finding names.
const LOOK_AT = {
  late_rank: ["nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER", DRIVER, "'top -b -n 1 | head -20'"],
  slow_link: LINKS, bandwidth_drop: LINKS, slow_drift: ["nvidia-smi -q -d TEMPERATURE,CLOCK", ...LINKS],
  below_limit: ["nvidia-smi topo -m", "nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv", "'lsmod | grep -E \"peermem|gdrdrv\"'"],
  slow_steps: ["nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE", "'iostat -x 2 3; top -b -n 1 | head -20'"],
  slower_than_plan: ["nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE"], off_plan: [`'for p in $(${PROCESSES}); do tr "\\0" " " < /proc/$p/cmdline; echo; done'`],
  misconfiguration: [`'for p in $(${PROCESSES}); do tr "\\0" "\\n" < /proc/$p/environ | grep NCCL_; done'`, "'lsmod | grep peermem'"],
  hang: [DUMP, DRIVER, "ncclras -v"], mismatch: [DUMP],
  reported_failure: [DRIVER, "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT", "ibstat"],
  stopped_logging: ["'df -h; df -i'", PROCESSES], blind: ["'systemctl status ncclscope-agent; df -h'", "ncclscope check"],
  clock_fault: ["'chronyc tracking; chronyc sources'", "'journalctl -u chronyd -u systemd-timesyncd --since -1h | tail'"],
};

// Commands for the hosts of a finding. They are copied into a shell: a name that could be anything but a host's gives none.
const commandsOf = (finding) => (finding.hosts.length > 0 ? finding.hosts : finding.evidence.hosts_of_groups ?? []).filter((host) => /^[a-z0-9][a-z0-9._-]*$/i.test(host)).slice(0, 2)
  .flatMap((host) => (LOOK_AT[finding.kind] ?? []).map((command) => `ssh ${host} ${command}`)).join("\n");

// KIND/RANKS, as alerts write it: the label `ranks` names eight and counts the rest.
const addressOf = ({ kind, ranks }) => `${kind}/${[...ranks.slice(0, 8), ...(ranks.length > 8 ? [`+${ranks.length - 8}`] : [])].join(",")}`;

const findingRow = (overview, finding, opened) => {
  const key = `${finding.job}/${finding.kind}/${finding.comm_id}/${finding.since_ns}/${finding.ranks}`;
  const isOpen = finding.until_ns === null;
  const since = age((overview.now_ns - finding.since_ns) / 1e9);
  const when = isOpen ? `for ${since}` : `over, ${age((overview.now_ns - finding.until_ns) / 1e9)} ago`;
  const group = finding.communicator === null ? finding.comm_id
    : element("a", { href: toCommunicator(finding.job, finding.communicator) }, finding.communicator);
  const ranks = finding.ranks.length > 0 && finding.ranks.length <= 16
    ? element("span", {}, ...finding.ranks.flatMap((rank, i) => [i ? ", " : "", element("a", { href: toRank(finding.job, rank) }, String(rank))])) : ranges(finding.ranks);
  const facts = [
    ["job", overview.jobs.length > 1 ? element("a", { href: toJob(finding.job) }, finding.job) : null], ["communicator", group], ["ranks", ranks], ["hosts", finding.hosts.join(", ")],
    ["since", moment(finding.since_ns)], ["confidence", percent(finding.confidence)],
    ...Object.entries(finding.evidence).flatMap(([name, value]) => evidence(name, named(finding, value))),
    ...marksInFull(finding),
    ["look at", isOpen && commandsOf(finding) !== "" ? element("pre", {}, commandsOf(finding)) : null],
    ["what to do", element("a", { href: `/runbooks#${finding.kind}` }, "runbook")],
  ].filter(([, value]) => isKnown(value) && value !== "");
  return element("details", { class: "finding", "data-severity": finding.severity, "data-open": String(isOpen), "data-muted": finding.muted !== null,
    "data-finding": key, "data-address": addressOf(finding), open: opened.has(key) },
    element("summary", { "data-key": key },
      element("span", { class: "kind" }, capitalised(words(finding.kind))),
      element("span", { class: "sentence" }, overview.jobs.length > 1 ? `${finding.job}: ${finding.summary}` : finding.summary),
      element("span", { class: "when" }, ...marksInShort(finding), ` ${when} · ${percent(finding.confidence)} sure`)),
    opened.has(key) ? proof(overview, finding) : null,
    element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
    markButtons(finding, key));
};

// The value with the names of communicators for their ids: "0x6f/5/7:100" reads "tp-4 number 100".
const named = (finding, value) => {
  if (Array.isArray(value)) return value.map((each) => named(finding, each));
  if (value !== null && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, named(finding, each)]));
  if (typeof value !== "string") return value;
  const [, id, number] = /^(.*?)(?::(\d+))?$/s.exec(value);
  return Object.hasOwn(finding.names, id) ? `${finding.names[id]}${number === undefined ? "" : ` number ${number}`}` : value;
};

// Numbers in their units, lists of numbers as ranges, and what proves the finding as a table.
const evidence = (name, value) => {
  if (Array.isArray(value) && value.length > 0 && value.every((each) => each !== null && typeof each === "object" && !Array.isArray(each))) {
    return [[words(name), evidenceTable(value)]];
  }
  return [[words(name.replace(/_(ns|bytes_per_second|ratio|bytes)$/, "")), inUnits(name, value)]];
};

const inUnits = (name, value) => {
  if (Array.isArray(value)) return value.every(Number.isInteger) && /rank/.test(name) ? ranges(value) : value.map((each) => inUnits(name, each)).join(", ");
  if (typeof value !== "number") return value === null || typeof value !== "object" ? String(value ?? NOT_RECORDED) : JSON.stringify(value);
  if (name.endsWith("_ns")) return Math.abs(value) > 1e17 ? timeOfDay(value) : duration(value * 1e-9);
  if (name.endsWith("_bytes_per_second")) return bandwidth(value);
  if (/(_ratio|_share)$/.test(name)) return percent(value);
  if (name.endsWith("_bytes")) return bytes(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(4);
};

const evidenceTable = (rows) => {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].slice(0, 8);
  const cells = (row) => names.map((name) => element("td", {}, name in row ? inUnits(name, row[name]) : ""));
  return table(names.map((name) => words(name.replace(/_(ns|bytes_per_second|ratio)$/, ""))), rows.slice(0, 20).map((row) => element("tr", {}, ...cells(row))));
};


export const drawCommunicators = (job, alarmed) => {
  const hidden = job.communicators_known - job.communicators.length;
  setText("communicators-note", hidden > 0 ? `${job.communicators.length} of ${job.communicators_known.toLocaleString("en")}: those with findings, and the busiest of each kind` : "");
  const order = new Map(job.parallelisms.map((each, position) => [each.parallelism, position]));
  const sorted = [...job.communicators].sort((a, b) =>
    alarmed.has(b.alias) - alarmed.has(a.alias) || order.get(a.parallelism) - order.get(b.parallelism) ||
    a.alias.localeCompare(b.alias, "en", { numeric: true }));
  replace(byId("communicators").tBodies[0], ...sorted.map((each) => communicatorRow(job, each, alarmed)));
};

const communicatorRow = (job, each, alarmed) => {
  const name = element("a", { class: "name", href: toCommunicator(job.name, each.alias), "data-key": each.alias,
    title: `${each.comm_id}\nglobal ranks ${ranges(each.ranks) || NOT_RECORDED}` }, each.alias);
  const said = each.group_name === null ? [] : [" ", element("span", { class: "quiet" }, each.group_name)];
  const main = each.main_op === null ? missing() : `${each.main_op} ${sizeClass(each.main_size_class)}`;
  return element("tr", { "data-finding": alarmed.has(each.alias) },
    element("td", {}, name, ...said),
    element("td", { class: "number", title: `on ${each.hosts} hosts` }, `${each.size}`),
    element("td", {}, main),
    element("td", {}, spark(each, alarmed.has(each.alias))),
    element("td", { class: "number" }, shown(each.busbw, bandwidth)),
    element("td", {}, efficiencyBar(each)),
    element("td", { class: "number" }, shown(each.wait_ratio, percent)),
    element("td", { class: "number" }, bytes(each.bytes)));
};

export const efficiencyBar = (each) => {
  if (each.is_latency_bound) {
    return element("span", { class: "quiet", title: "Messages this small are limited by latency, not by bandwidth" }, "latency-bound");
  }
  const efficiency = efficiencyOf(each);
  if (efficiency === null) return missing();
  return bar(efficiency, `${percent(efficiency)} of ${bandwidth(each.expected)}, which is expected: the best that it or groups like it have shown, else the limit`,
    each.limit > 0 ? `${percent(each.busbw / each.limit)} of limit` : "", toneOf(efficiency));
};

export const bar = (ratio, title, note = "", tone = null) => element("div", { class: "bar", title, "data-tone": tone },
  element("span", { class: "track" }, element("span", { class: "fill", width: `${Math.min(100, ratio * 100)}%` })),
  element("b", {}, percent(ratio)), note ? element("span", { class: "quiet" }, ` ${note}`) : "");

const spark = (each, isAlarmed) => {
  const values = each.busbw_history.some(isKnown) ? each.busbw_history : each.bytes_history;
  const top = Math.max(...values.filter(isKnown), 0);
  if (top <= 0) return missing();
  const point = (value, i) => `${((i / (values.length - 1)) * 120).toFixed(1)},${(21 - (value / top) * 19).toFixed(1)}`;
  const stretches = [[]];
  values.forEach((value, i) => (isKnown(value) ? stretches.at(-1).push(point(value, i)) : stretches.push([])));
  const line = { fill: "none", stroke: `var(${isAlarmed ? "--bad" : "--calm"})`, "stroke-width": 1.5, "stroke-linecap": "round" };
  return svg("svg", { class: "spark", viewBox: "0 0 120 22", "aria-hidden": "true" },
    svg("path", { d: "M0 21.5H120", stroke: "var(--line)" }),
    ...stretches.filter((points) => points.length).map((points) => svg("polyline", { ...line,
      points: points.length === 1 ? `${points[0]} ${points[0]}` : points.join(" ") })));
};

export const drawMix = (job, measure) => {
  const rows = new Map();
  for (const entry of job.mix) {
    const row = rows.get(entry.op) ?? { total: 0, parts: new Map() };
    row.total += entry[measure];
    row.parts.set(entry.parallelism, (row.parts.get(entry.parallelism) ?? 0) + entry[measure]);
    rows.set(entry.op, row);
  }
  const sorted = [...rows].sort(([, a], [, b]) => b.total - a.total).slice(0, 8);
  const top = Math.max(...sorted.map(([, row]) => row.total), 1);
  const format = measure === "bytes" ? bytes : amount;
  const kinds = [...new Set(job.mix.map((entry) => entry.parallelism))];
  replace(byId("mix"), ...sorted.map(([op, row]) => element("div", { class: "mix-row" },
    element("span", {}, op),
    element("div", { class: "track-12" }, element("div", { class: "stack", width: `${(row.total / top) * 100}%` },
      ...[...row.parts].sort(([, a], [, b]) => b - a).map(([kind, value]) => element("i", { kind: kindOf(kind), width: `${(value / row.total) * 100}%`,
        title: `${kind ?? "kind not known"}: ${format(value)}` })))),
    element("span", { class: "value" }, format(row.total)))),
  element("div", { class: "legend" }, ...kinds.map((kind) => element("span", {}, element("span", { class: "swatch", kind: kindOf(kind) }), kind ?? "not known"))));
};

const MATCHES = [
  ["matched", "matched with a kernel", "good"], ["unmatched", "in a capture, no kernel found", "bad"], ["no_kernel", "launch no kernel", "world"],
  ["not_covered", "outside every capture", "faint"], ["pending", "not decided yet", "accent"],
];

export const drawAlignment = (job) => {
  const total = MATCHES.reduce((sum, [name]) => sum + job.alignment[name], 0);
  if (total === 0) {
    replace(byId("alignment"), element("p", { class: "nothing" }, "No operation in the last minutes."));
    return;
  }
  const present = MATCHES.filter(([name]) => job.alignment[name] > 0);
  replace(byId("alignment"),
    element("div", { class: "stack" }, ...present.map(([name, meaning, tone]) => element("i", { kind: tone, width: `${(job.alignment[name] / total) * 100}%`, title: meaning }))),
    element("dl", { class: "pairs spaced" }, ...present.flatMap(([name, meaning, tone]) => [
      element("dt", {}, element("span", { class: "swatch", kind: tone }), meaning), element("dd", {}, amount(job.alignment[name]))])));
};

export const drawClocks = (overview) => {
  const { clocks } = overview;
  if (clocks.length === 0) {
    setText("clocks-note", "");
    replace(byId("clocks"), element("p", { class: "nothing" }, "Not recorded: clocks are compared on kernels of one collective."));
    return;
  }
  setText("clocks-note", `against ${clocks[0].is_reference ? clocks[0].host : "the reference"}${clocks[1]?.is_reference ? " and others, one for each job" : ""}` + (isKnown(overview.clock_violation_ratio)
    ? ` · ${percent(overview.clock_violation_ratio)} of order checks fail` : ""));
  const top = Math.max(...clocks.map((clock) => Math.abs(clock.offset_seconds)), 1e-9);
  const rows = clocks.map((clock) => {
    const width = Math.max(1.5, (Math.abs(clock.offset_seconds) / top) * 50);
    return element("tr", {}, element("td", {}, clock.host),
      element("td", {}, element("span", { class: "offset" }, clock.is_reference ? null : element("i", { width: `${width}%`, left: `${clock.offset_seconds < 0 ? 50 - width : 50}%` }))),
      element("td", { class: "number" }, clock.is_reference ? "reference" : `${duration(clock.offset_seconds)}`),
      element("td", { class: "number" }, clock.is_reference ? "" : `±${duration(clock.sigma_seconds)}`),
      element("td", { class: "number" }, clock.is_reference ? "" : `${clock.drift_ppm.toFixed(1).replace("-", "−")} ppm`));
  });
  replace(byId("clocks"), table(["Host", "", "Offset|number", "|number", "Drift|number"], rows));
};

export const drawAgents = (overview) => {
  const { agents } = overview;
  setText("agents-note", agents.length ? "" : "none has connected");
  const rows = [...agents].sort((a, b) => a.connected - b.connected).slice(0, 64).map((agent) => element("tr", {},
    element("td", { title: `on ${agent.host}` }, element("span", { class: "dot", "data-state": agent.connected ? "on" : "off" }), agent.name),
    element("td", { class: "number" }, agent.connected ? shown(agent.lag_seconds, duration)
      : isKnown(agent.last_contact_ns) ? `gone for ${age((overview.now_ns - agent.last_contact_ns) / 1e9)}` : "gone"),
    element("td", { class: "number" }, shown(agent.lines_total, amount)),
    element("td", { class: "number" }, shown(agent.cpu_seconds, (value) => `${value.toFixed(1)} s`)),
    element("td", { class: "number" }, shown(agent.rss_bytes, bytes))));
  replace(byId("agents"), table(["Agent", "Behind by|number", "Lines read|number", "CPU used|number", "Memory|number"], rows));
};

export const table = (heads, rows) => element("div", { class: "table-scroll" }, element("table", {},
  element("thead", {}, element("tr", {}, ...heads.map((head) => {
    const [text, style] = head.split("|");
    return element("th", { scope: "col", class: style ?? null }, text);
  }))),
  element("tbody", {}, ...rows)));

export const drawHealth = (overview) => {
  const { health } = overview;
  const facts = [
    ...Object.entries(health.gaps).map(([reason, count]) => [`gap: ${words(reason)}`, amount(count)]),
    ...Object.entries(health.sessions_refused).map(([reason, count]) => [`agent refused: ${words(reason)}`, amount(count)]),
    ...Object.entries(health.skipped).map(([reason, count]) => [`skipped: ${words(reason)}`, amount(count)]),
    ["operations kept in memory", amount(health.window_operations)],
    ["newest line is behind by", shown(health.ingest_lag_seconds, duration)],
  ];
  replace(byId("health"), element("dl", { class: "pairs" }, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
};

// The thresholds of detectors that are not as by default, and who changed them.
export const drawSettings = (settings) => {
  const given = settings.thresholds.filter((each) => isKnown(each.started) || isKnown(each.changed) || Object.keys(each.jobs).length > 0);
  setText("settings-note", `${given.length || "none"} of ${settings.thresholds.length} not as by default`);
  const who = (name) => settings.changes.findLast((change) => change.name.endsWith(name));
  const changedBy = (change) => (change === undefined ? "" : `${moment(change.at_ns)}${change.by ? ` by ${change.by}` : ""}`);
  const rows = given.map((each) => element("tr", {},
    element("td", { title: each.about }, each.name),
    element("td", { class: "number" }, String(each.changed ?? each.started ?? each.default)),
    element("td", { class: "number" }, String(each.default)),
    element("td", {}, Object.entries(each.jobs).map(([pattern, value]) => `${pattern}: ${value}`).join(", ")),
    element("td", {}, changedBy(who(each.name)))));
  replace(byId("settings"), rows.length ? table(["Threshold", "Now|number", "Default|number", "For some jobs", "Changed"], rows)
    : element("p", { class: "nothing" }, "All thresholds of the detectors are as by default."));
};
