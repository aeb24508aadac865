// The job in one line: how long a step takes, against before, and who makes it longer. And all its steps as a strip.
/* global Plotly */

import { CONFIG, layout } from "./charts.js";
import { byId, colour, nothingIn, plotIn, setText } from "./dom.js";
import { age, amount, capitalised, clockTime, duration, isKnown, percent, timeOfDay, words } from "./format.js";
import { follow, span, timeAxis } from "./span.js";

// As many steps as detectors want of a job before they say that it is healthy.
const ENOUGH_STEPS = 30;
const LEAST_CHANGE = 0.005;
const LATE_SECONDS = 20; // kernels come with an export, some seconds after they ran

// By how much a step (StepTimeView, or null) is longer than before what is wrong began; null where that is not known.
export const slowing = (step) => (isKnown(step?.before_ns) ? step.now_ns / step.before_ns - 1 : null);

const who = (finding) => {
  const hosts = finding.hosts.length > 0 && finding.hosts.length <= 2 ? finding.hosts.join(" and ") : `${finding.hosts.length} hosts`;
  return finding.ranks.length === 1 ? `rank ${finding.ranks[0]} on ${hosts}` : hosts;
};

const cause = (finding) => (finding.evidence.cost_ns > 0
  ? `${who(finding)} costs ${duration(finding.evidence.cost_ns * 1e-9)} per step`
  : `${words(finding.kind)} at ${who(finding)}`);

// "Step 401 ms, 2.4 % slower since 18:39 UTC: rank 1 on node01 costs 9.4 ms per step"; `open`: the job's open findings.
export const headline = (job, open) => {
  const { step } = job;
  if (step === null) return "Step time: not known yet";
  const change = slowing(step);
  const against = change >= LEAST_CHANGE ? `, ${percent(change)} slower since ${clockTime(step.slower_since_ns)}` : "";
  const costly = open.filter((finding) => finding.lengthens_steps && finding.hosts.length > 0 && finding.severity !== "info")
    .sort((a, b) => (b.evidence.cost_ns ?? 0) - (a.evidence.cost_ns ?? 0));
  const causes = costly.slice(0, 3).map(cause).join("; ");
  return `Step ${duration(step.now_ns * 1e-9)}${against}${causes && `: ${causes}`}`;
};

// What "no finding" is worth: { state, text, detail }. Nothing is called healthy that is not being watched.
export const verdict = (overview, job) => {
  const own = overview.agents.filter((agent) => agent.job === job.name);
  const agents = own.length > 0 ? own : overview.agents;
  const watched = `watching ${job.communicators_known} communicators of ${job.processes} processes`;
  if (!agents.some((agent) => agent.connected)) {
    const last = Math.max(...agents.map((agent) => agent.last_contact_ns ?? 0));
    return { state: "blind", text: "Blind: no agent is connected", detail: last > 0 ? `last contact ${age((overview.now_ns - last) / 1e9)} ago` : "" };
  }
  if (!job.operations_per_second) return { state: "blind", text: "No data: nothing was logged in the last half minute", detail: watched };
  if (job.step === null) return { state: "collecting", text: "No problems detected so far", detail: `steps are not known yet; ${watched}` };
  if (job.step.steps < ENOUGH_STEPS) {
    return { state: "collecting", text: `Collecting: first verdict after about ${ENOUGH_STEPS} steps`, detail: `${job.step.steps} so far` };
  }
  return { state: "good", text: `✓ No problems detected in ${age((overview.now_ns - job.step.since_ns) / 1e9)} of data`, detail: watched };
};

// The same of all jobs.
export const fleetVerdict = (overview) => {
  const isWatched = overview.agents.some((agent) => agent.connected);
  return { state: isWatched ? "good" : "blind", text: isWatched ? "✓ No problems detected" : "Blind: no agent is connected", detail: `${overview.jobs.length} jobs` };
};

// Until when measures of kernels reach, if that is long ago; null without any, or where they are of now.
const measuredUntil = (overview, job) => {
  const last = Math.max(-1, ...job.communicators.map((each) => each.busbw_history.findLastIndex(isKnown)));
  const until = overview.window_begin_ns + (last + 1) * overview.bucket_seconds * 1e9;
  const late = (overview.now_ns - until) / 1e9;
  return last < 0 || late < LATE_SECONDS ? null : `kernels until ${timeOfDay(until)}, ${age(late)} ago`;
};

// ncclscope's own state, in one quiet line.
export const stateLine = (overview, job) => {
  const { matched_ratio: matched, captured_ratio: captured } = job.alignment;
  const connected = overview.agents.filter((agent) => agent.connected).length;
  const clocks = job.hosts === 1 || !isKnown(job.clock_sigma_seconds) ? null : `clocks agree to ±${duration(job.clock_sigma_seconds)}`;
  return [
    `${amount(job.processes)} processes on ${job.hosts} ${job.hosts === 1 ? "host" : "hosts"}`,
    `${amount(job.communicators_known)} communicators`,
    isKnown(job.operations_per_second) ? `${amount(job.operations_per_second)} operations/s` : null,
    isKnown(matched) ? `${percent(matched)} aligned` : "kernels not recorded",
    isKnown(captured) ? `captured ${percent(captured)} of the time` : null,
    measuredUntil(overview, job),
    clocks, `${connected} of ${overview.agents.length} agents connected`,
  ].filter(isKnown).join(" · ");
};

// All steps since the job began; `findings` of the job are flags where they began.
export const drawSteps = (view, findings) => {
  const parent = byId("steps");
  if (view.started_ns.length < 2) {
    setText("steps-note", "");
    nothingIn(parent, "No step has ended yet, or the steps of this job are not known.");
    return;
  }
  const last = view.started_ns.at(-1);
  setText("steps-note", `${amount(view.iteration.at(-1) + 1)} steps in ${age((last - view.started_ns[0]) / 1e9)}, times in UTC`
    + (view.steps_per_bucket > 1 ? `; mean and longest of each ${view.steps_per_bucket}` : ""));
  const x = view.started_ns.map((at) => new Date(at / 1e6).toISOString()); // plotly draws what it reads, and so UTC
  const sorted = [...view.mean_ns].sort((a, b) => a - b);
  const [least, most] = [sorted[Math.floor(sorted.length * 0.05)], sorted[Math.ceil(sorted.length * 0.95) - 1]]; // a first step of a minute hides all others
  const isShort = last - view.started_ns[0] < 600e9;
  const [factor, unit] = most < 1e9 ? [1e-6, "ms"] : [1e-9, "s"];
  const margin = Math.max(0.2 * (most - least), 0.02 * most); // a slowing by a few percent must show
  const line = (values, name, style) => ({ type: "scatter", mode: "lines", name, x, y: values.map((value) => value * factor), line: style,
    customdata: view.iteration, hovertemplate: `step %{customdata}: <b>%{y:.4g} ${unit}</b> ${name}<extra></extra>` });
  const traces = [line(view.mean_ns, view.steps_per_bucket > 1 ? "mean" : "", { width: 1.5, color: colour("accent") })];
  if (view.steps_per_bucket > 1) traces.unshift(line(view.longest_ns, "longest", { width: 1, color: colour("faint") }));
  // What began before the first step that is known, and is still open, is flagged there.
  const from = view.started_ns[0];
  const flags = findings.filter((finding) => finding.since_ns > from || finding.until_ns === null).slice(0, 12)
    .map((finding) => ({ kind: finding.kind, severity: finding.severity, at: new Date(Math.max(finding.since_ns, from) / 1e6).toISOString(), isRight: finding.since_ns > (from + last) / 2 }));
  // Charts that begin with the job share the axis of this one.
  const isShared = span().begin <= from / 1e6 + 1000;
  const below = span().begin > from / 1e6 + 1000 ? [{ type: "rect", x0: span().begin, x1: span().end, yref: "paper", y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: colour("accent-soft"), opacity: 0.6 }] : [];
  if (below.length) byId("steps-note").append("; shaded: the charts below");
  const plot = plotIn(parent);
  Plotly.react(plot, traces, layout({
    margin: { l: 46, r: 20, t: 20, b: 24 },
    xaxis: isShared ? timeAxis(plot) : { type: "date", range: [x[0], x.at(-1)], showgrid: false, tickformat: isShort ? "%H:%M:%S" : "%H:%M", tickfont: { size: 10.5 }, fixedrange: true, linecolor: colour("line"), showline: true },
    yaxis: { range: [Math.max(0, least - margin) * factor, (most + margin) * factor], zeroline: false, gridcolor: colour("line"), nticks: 4, ticksuffix: ` ${unit}`, tickfont: { size: 10.5 }, fixedrange: true },
    shapes: [...below, ...flags.map((finding) => ({ type: "line", x0: finding.at, x1: finding.at, yref: "paper", y0: 0, y1: 1,
      line: { dash: "2px,3px", width: 1.2, color: colour(finding.severity === "critical" ? "bad" : "warn") } }))],
    annotations: flags.map((finding, place) => ({ x: finding.at, yref: "paper", y: 1, yshift: 9 - 12 * (place % 2), showarrow: false, xanchor: finding.isRight ? "right" : "left",
      text: `⚑ ${capitalised(words(finding.kind))}`, font: { size: 10.5, color: colour(finding.severity === "critical" ? "bad" : "warn") } })),
  }), CONFIG);
  follow(plot);
};
