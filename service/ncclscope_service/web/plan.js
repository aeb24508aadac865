// The plan: what the job should send by its description, what it sent in the last look, and the reason; who should send how
// much to whom, beside who does.

import { drawSquare } from "./detail_charts.js";
import { byId, element, nothingIn, replace, setText } from "./dom.js";
import { bytes, duration, isKnown, percent, ranges } from "./format.js";

const count = (value) => value.toLocaleString("en");

const MOST_CLASSES = 4;

// What share of their peak the job's GPUs compute.
const speedOf = (utilization) => {
  if (!isKnown(utilization)) return "MFU is not known: it needs the GPU (serve --gpu, or a capture), step times, and traffic that agrees with the description";
  const { gpu, ranks, mfu, hfu } = utilization;
  return `The model uses ${percent(mfu)} of the peak (MFU) of ${ranks} ${gpu}, ${count(Math.round(utilization.peak_flops / 1e12))} TFLOP/s each${hfu === mfu ? "" : `; with what is computed again (HFU) ${percent(hfu)}`}`;
};

const expectedOf = (expected, step) => {
  if (!isKnown(expected)) return null;
  const [low, typical, high] = [expected.low, expected.typical, expected.high].map((each) => duration(each));
  const seen = isKnown(step) ? `A step takes ${duration(step.now_ns / 1e9)}; expected` : "A step should take";
  return `${seen} ${typical} (${low} to ${high}), since ${expected.is_same ? "the same job" : `${expected.run}, laid out differently,`} was recorded`;
};

export const drawPlan = (plan, job) => {
  const card = byId("plan-card");
  card.hidden = plan === null;
  if (plan === null) return;
  const { iterations } = plan;
  setText("plan-note", iterations.length ? `${plan.rules}; ${plan.rank_iterations} iterations of ranks, ${iterations[0]} to ${iterations.at(-1)}` : plan.rules);
  const verdict = byId("plan-verdict");
  verdict.className = plan.unexplained_operations ? "guilty" : "quiet";
  setText("plan-verdict", plan.verdict);
  replace(byId("plan-speed"), ...[expectedOf(job?.expected_step, job?.step), speedOf(job?.utilization)].filter(isKnown).map((text) => element("li", {}, text)));
  setText("plan-model", plan.model);
  if (plan.classes.length === 0) return nothingIn(byId("plan"), "Not recorded: no whole iteration of a known rank is in memory.");
  const { classes } = plan;
  const more = classes.length > MOST_CLASSES ? [element("p", { class: "quiet" }, `and ${classes.length - MOST_CLASSES} more groups of ranks: ncclscope explain`)] : [];
  return replace(byId("plan"), ...classes.slice(0, MOST_CLASSES).map(tableOf), ...more);
};

const HEAD = [["Group", false], ["Operation", false], ["Elements", true], ["Expected", true], ["Observed", true], ["Logged", true], ["Wire", true], ["Reason", false]];

const tableOf = (each) => element("table", {},
  element("caption", {}, `ranks ${ranges([...each.ranks])}: ${each.rank_iterations} iterations`),
  element("thead", {}, element("tr", {}, ...HEAD.map(([name, isNumber]) => element("th", { scope: "col", class: isNumber ? "number" : null }, name)))),
  element("tbody", {}, ...each.lines.map(rowOf)));

const rowOf = (line) => {
  const cells = [`${line.groups.join("/") || "none"} (${line.comm_size})`, `${line.op} ${line.dtype}`, line.count === null ? "mixed" : count(line.count), count(line.expected), count(line.observed),
    bytes(line.logged_bytes), bytes(line.wire_bytes), line.why];
  return element("tr", {}, ...cells.map((text, at) => element("td", { class: [HEAD[at][1] ? "number" : "", line.reason === "unexplained" && (at === 1 || at === 7) ? "guilty" : ""].join(" ").trim() || null }, text)));
};

const MOST_LINES = 6;

export const drawPlanPattern = (pattern) => {
  byId("plan-traffic-card").hidden = pattern === null;
  if (pattern === null) return;
  const { traffic, experts, rhythm } = pattern;
  const values = [traffic.expected, traffic.observed ?? []].flat(2).filter((value) => value > 0);
  const squares = [["plan-expected", traffic.expected], ["plan-observed", traffic.observed]];
  for (const [id, amounts] of squares) {
    if (amounts === null || values.length === 0) nothingIn(byId(id), amounts === null ? "Not recorded: no whole iteration of all ranks is in memory." : "Nothing.");
    else drawSquare(byId(id), traffic.by, traffic.places, amounts, values);
  }
  const { iterations } = traffic;
  setText("plan-traffic-note", `bytes of an iteration, by ${traffic.by}${iterations.length ? `; observed: the mean of iterations ${iterations[0]} to ${iterations.at(-1)}` : ""}`);
  replace(byId("plan-checks"), ...[...cellLines(traffic), ...experts.map(expertLine), ...rhythm.map(rhythmLine)].map(([isWrong, text]) => element("li", { class: isWrong ? "guilty" : null }, text)));
};

const cellLines = (traffic) => {
  if (traffic.observed === null) return [];
  if (traffic.differing_known === 0) return [[false, "From each to each as expected, to 1 % of what the sender sends."]];
  const lines = traffic.differing.slice(0, MOST_LINES).map((cell) => [true, `${traffic.by} ${cell.sender} to ${cell.receiver}: ${bytes(cell.observed)} where ${bytes(cell.expected)} are expected`]);
  const more = traffic.differing_known - lines.length;
  return more > 0 ? [...lines, [true, `and ${more} more pairs: ncclscope explain`]] : lines;
};

const expertLine = (group) => {
  const busiest = Math.max(...group.imbalance.filter(isKnown));
  return [!group.is_whole, [`experts of ranks ${ranges([...group.ranks])}: ${Math.min(...group.exchanges)} of ${group.expected} all-to-alls of tokens, ${group.is_whole ? "equal or transposed in pairs" : "not all equal or transposed in pairs"}`,
    Number.isFinite(busiest) ? `the busiest rank gets ${busiest.toFixed(2)} times the mean` : null].filter(isKnown).join("; ")];
};

const rhythmLine = (rank) => [rank.beat.startsWith("not") || rank.beat.startsWith("blocks"), [`rhythm of stage ${rank.stage} (rank ${rank.rank}): ${[...new Set(rank.blocks)].join(", ")} of ${rank.expected} blocks`,
  isKnown(rank.spread) ? `lengths scatter by ${percent(rank.spread)}` : null, rank.beat].filter(isKnown).join("; ")];
