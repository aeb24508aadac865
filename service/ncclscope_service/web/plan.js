// The plan: what the job should send by its description, what it sent in the last look, and the reason.

import { byId, element, nothingIn, replace, setText } from "./dom.js";
import { bytes, ranges } from "./format.js";

const count = (value) => value.toLocaleString("en");

const MOST_CLASSES = 4;

export const drawPlan = (plan) => {
  const card = byId("plan-card");
  card.hidden = plan === null;
  if (plan === null) return;
  const { iterations } = plan;
  setText("plan-note", iterations.length ? `${plan.rules}; ${plan.rank_iterations} iterations of ranks, ${iterations[0]} to ${iterations.at(-1)}` : plan.rules);
  const verdict = byId("plan-verdict");
  verdict.className = plan.unexplained_operations ? "guilty" : "quiet";
  setText("plan-verdict", plan.verdict);
  if (plan.classes.length === 0) return nothingIn(byId("plan"), "Not recorded: no whole iteration of a known rank is in memory.");
  const { classes } = plan;
  const more = classes.length > MOST_CLASSES ? [element("p", { class: "quiet" }, `and ${classes.length - MOST_CLASSES} more groups of ranks: ncclscope explain`)] : [];
  return replace(byId("plan"), element("p", { class: "quiet" }, plan.model), ...classes.slice(0, MOST_CLASSES).map(tableOf), ...more);
};

const HEAD = [["Group", false], ["Operation", false], ["Elements", true], ["Expected", true], ["Observed", true], ["Logged", true], ["Wire", true], ["Reason", false]];

const tableOf = (each) => element("table", {},
  element("caption", {}, `ranks ${ranges([...each.ranks])}: ${each.rank_iterations} iterations`),
  element("thead", {}, element("tr", {}, ...HEAD.map(([name, isNumber]) => element("th", { scope: "col", class: isNumber ? "number" : null }, name)))),
  element("tbody", {}, ...each.lines.map(rowOf)));

const rowOf = (line) => {
  const cells = [`${line.groups.join("/") || "none"} (${line.comm_size})`, `${line.op} ${line.dtype}`, line.count === null ? "mixed" : count(line.count), count(line.expected), count(line.observed),
    bytes(line.logged_bytes), bytes(line.wire_bytes), line.why];
  return element("tr", {}, ...cells.map((text, at) => element("td", { class: [HEAD[at][1] ? "number" : "", line.reason === "unexplained" && at === 7 ? "guilty" : ""].join(" ").trim() || null }, text)));
};
