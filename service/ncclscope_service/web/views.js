// The views beside the job's: fleet, one communicator, one rank.

import { drawRankHistory, drawSeries, drawSizes } from "./detail_charts.js";
import { byId, element, replace, setText } from "./dom.js";
import { amount, bandwidth, bytes, capitalised, duration, isKnown, percent, ranges, sizeClass } from "./format.js";
import { GRAVE, bar, drawFindings, efficiencyBar, efficiencyOf, leastEfficient, shown, table, tile, toneOf } from "./panels.js";
import { toCommunicator, toJob, toRank } from "./router.js";
import { fleetVerdict } from "./steps.js";

const openOf = (overview, job) => overview.findings.filter((finding) => finding.until_ns === null && finding.job === job.name);

export const drawFleet = (overview) => {
  const open = overview.findings.filter((finding) => finding.until_ns === null);
  const count = (severity) => open.filter((finding) => finding.severity === severity).length;
  const connected = overview.agents.filter((agent) => agent.connected).length;
  const rates = overview.jobs.map((job) => job.operations_per_second).filter(isKnown);
  replace(byId("fleet-tiles"),
    tile("Jobs", amount(overview.jobs.length)),
    tile("Critical", amount(count("critical")), { detail: "findings open", tone: count("critical") ? "bad" : null }),
    tile("Warnings", amount(count("warning")), { detail: "findings open", tone: count("warning") ? "warn" : null }),
    tile("Processes", amount(overview.jobs.reduce((sum, job) => sum + job.processes, 0))),
    tile("Communicators", amount(overview.jobs.reduce((sum, job) => sum + job.communicators_known, 0))),
    tile("Operations", rates.length ? amount(rates.reduce((sum, rate) => sum + rate, 0)) : shown(null), { detail: rates.length ? "/s" : "" }),
    tile("Agents", `${connected}`, { detail: `of ${overview.agents.length} connected`, tone: connected < overview.agents.length ? "warn" : null }));
  const weight = (job) => openOf(overview, job).reduce((sum, finding) => sum + 100 ** GRAVE[finding.severity], 0);
  const sorted = [...overview.jobs].sort((a, b) => weight(b) - weight(a) || a.name.localeCompare(b.name, "en", { numeric: true }));
  replace(byId("fleet-jobs"), table(
    ["Job", "Step time|number", "Findings", "Recorded", "Processes|number", "Least efficient group", "Exposed|number", "Aligned|number", "Captured|number"],
    sorted.map((job) => fleetRow(overview, job))));
  drawFindings(byId("fleet-findings"), overview, open, fleetVerdict(overview));
};

const fleetRow = (overview, job) => {
  const open = openOf(overview, job);
  const severities = Object.keys(GRAVE).map((severity) => [severity, open.filter((finding) => finding.severity === severity).length]);
  const badges = severities.filter(([, count]) => count > 0).map(([severity, count]) => element("span", { class: "badge", "data-severity": severity }, `${count} ${severity}`));
  const slow = leastEfficient(job);
  return element("tr", {},
    element("td", {}, element("a", { class: "name", href: toJob(job.name), "data-key": `job ${job.name}` }, job.name)),
    element("td", { class: "number" }, job.step === null ? shown(null) : duration(job.step.now_ns * 1e-9)),
    element("td", {}, ...(badges.length ? badges : [element("span", { class: "quiet" }, "none")])),
    element("td", {}, job.level),
    element("td", { class: "number" }, `${amount(job.processes)} on ${job.hosts}`),
    element("td", {}, slow === null ? shown(null) : element("span", {}, element("a", { href: toCommunicator(job.name, slow.alias) }, slow.alias), ` ${percent(slow.efficiency)} of what is expected`)),
    element("td", { class: "number" }, shown(job.exposed_ratio, percent)),
    element("td", { class: "number" }, shown(job.alignment.matched_ratio, percent)),
    element("td", { class: "number" }, shown(job.alignment.captured_ratio, percent)));
};

export const drawCommunicatorView = (job, detail) => {
  const { summary } = detail;
  byId("communicator-missing").hidden = true;
  setText("communicator-name", summary.alias);
  setText("communicator-id", [summary.group_name, `commId ${summary.comm_id}`, detail.parent_comm_id === null ? null : `split from ${detail.parent_comm_id}`,
    detail.identity === "comm_id" ? null : `known by ${detail.identity}, ${percent(detail.identity_confidence)} sure`].filter(isKnown).join(" · "));
  const efficiency = efficiencyOf(summary);
  replace(byId("communicator-tiles"),
    tile("Kind", capitalised((summary.parallelism ?? "not known").replace(/^[A-Z]{4,}$/, (word) => word.toLowerCase())), { hint: summary.parallelism === null ? "Told from what it carries" : `${percent(detail.parallelism_confidence)} sure` }),
    tile("Ranks", amount(summary.size), { detail: `on ${summary.hosts} ${summary.hosts === 1 ? "host" : "hosts"}`, hint: `global ranks ${ranges(summary.ranks)}` }),
    tile("Bus bandwidth", shown(summary.busbw, bandwidth), { hint: "Of its main operation and size, median over the last minute with data" }),
    tile("Efficiency", summary.is_latency_bound ? "latency-bound" : shown(efficiency, percent), { detail: efficiency === null ? "" : `of ${bandwidth(summary.expected)}`,
      tone: toneOf(efficiency), hint: "Of what is expected: the best that it or groups like it have shown, else the limit" }),
    tile("Of the limit", summary.is_latency_bound ? "latency-bound" : isKnown(summary.busbw) && summary.limit > 0 ? percent(summary.busbw / summary.limit) : shown(null),
      { detail: isKnown(summary.limit) && !summary.is_latency_bound ? bandwidth(summary.limit) : "", hint: detail.bottleneck ?? "What the topology allows" }),
    tile("Wait share", shown(summary.wait_ratio, percent), { hint: "Share of its kernel time in which a rank waited for the last one, over the last minute" }),
    tile("Moved", bytes(summary.bytes), { detail: `in ${amount(summary.operations)} calls`, hint: "Bytes, and operations, since the start, over all ranks" }));
  drawSeries(byId("series"), detail);
  drawSizes(byId("communicator-sizes"), "communicator-sizes-note", detail.sizes, null);
  setText("communicator-ranks-note", detail.ranks.length < summary.size ? `${detail.ranks.length} of ${amount(summary.size)}` : "");
  const fair = 1 / Math.max(1, summary.size);
  replace(byId("communicator-ranks"), table(["Global rank", "Rank|number", "Host", "Wait share", "Arrives last"], detail.ranks.map((each) => element("tr", {},
    element("td", {}, each.global_rank === null ? shown(null) : element("a", { class: "name", href: toRank(job.name, each.global_rank), "data-key": `rank ${each.rank}` }, String(each.global_rank))),
    element("td", { class: "number" }, String(each.rank)), element("td", {}, each.host ?? shown(null)),
    element("td", {}, isKnown(each.wait_ratio) ? bar(each.wait_ratio, "share of its kernel time") : shown(null)),
    element("td", { "data-tone": each.last_ratio > Math.max(0.5, 2 * fair) ? "bad" : null },
      isKnown(each.last_ratio) ? bar(each.last_ratio, `of the recent collectives; ${percent(fair)} where nobody is late`) : shown(null))))));
  replace(byId("operations"), table(["Operation", "Size", "Operations|number", "Moved|number", "Bus bandwidth|number", "Efficiency", "Best so far|number", "Wait share|number", "Transfer|number"],
    detail.series.map((each) => element("tr", {},
      element("td", {}, each.op), element("td", {}, sizeClass(each.size_class)), element("td", { class: "number" }, amount(each.operations)),
      element("td", { class: "number" }, bytes(each.bytes)), element("td", { class: "number" }, shown(each.busbw, bandwidth)),
      element("td", {}, efficiencyBar(each)), element("td", { class: "number" }, shown(each.baseline, bandwidth)),
      element("td", { class: "number" }, shown(each.wait_ratio, percent)), element("td", { class: "number" }, shown(each.transfer_seconds, duration))))));
};

export const drawRankView = (job, detail) => {
  byId("rank-missing").hidden = true;
  setText("rank-name", `rank ${detail.rank}`);
  setText("rank-place", [`on ${detail.host}`, detail.is_inferred ? "its number is told from where its process sits" : null].filter(isKnown).join(" · "));
  replace(byId("rank-tiles"),
    tile("Host", detail.host), tile("Process", String(detail.pid)),
    tile("GPU", shown(detail.cuda_device, String), { detail: isKnown(detail.local_rank) ? `local rank ${detail.local_rank}` : "" }),
    tile("NCCL", detail.version ?? shown(null)),
    tile("Wait share", shown(detail.wait_ratio, percent), { hint: "Share of its kernel time in which it waited for the last rank, in groups that are meant to arrive together" }),
    tile("Wait share of the median rank", shown(detail.median_wait_ratio, percent)),
    tile("Waits least", shown(detail.place, ordinal), { detail: isKnown(detail.place) ? `of ${amount(detail.ranks_known)}` : "",
      hint: "The first waits less than all other ranks: where it is late, they wait for it" }));
  drawRankHistory(byId("rank-waits"), detail);
  replace(byId("rank-groups"), table(["Communicator", "As rank|number", "Kernel time|number", "Wait share"], detail.communicators.map((each) => element("tr", {},
    element("td", {}, element("a", { class: "name", href: toCommunicator(job.name, each.alias), "data-key": each.alias }, each.alias)),
    element("td", { class: "number" }, isKnown(each.rank) ? `${each.rank} of ${each.size}` : shown(null)),
    element("td", { class: "number" }, each.kernel_seconds > 0 ? duration(each.kernel_seconds) : shown(null)),
    element("td", {}, isKnown(each.wait_ratio) ? bar(each.wait_ratio, "share of its kernel time") : shown(null))))));
};

const ordinal = (number) => {
  const ending = number % 100 >= 11 && number % 100 <= 13 ? "th" : ["th", "st", "nd", "rd"][number % 10] ?? "th";
  return `${number.toLocaleString("en")}${ending}`;
};

export const drawMissing = (view, text, near) => {
  const parent = byId(`${view}-missing`);
  parent.hidden = false;
  replace(parent, `${capitalised(text)}: unknown, or gone. `, ...near);
};
