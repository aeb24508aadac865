// Acknowledging and muting: the buttons of a finding, and the dialog in which a person says who, why and for how long.

import { byId, element } from "./dom.js";
import { moment, words } from "./format.js";

const NAME = "ncclscope-name";

const stored = () => {
  try {
    return localStorage.getItem(NAME) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
};

const store = (name) => {
  try {
    localStorage.setItem(NAME, name);
  } catch {
    // it is asked for again then
  }
};

const said = (mark) => [mark.by && `by ${mark.by}`, mark.note].filter(Boolean).join(": ");

// What was said of a finding: in short for its line, in full for its facts.
export const marksInShort = (finding) => [
  finding.acknowledged === null ? null : `acknowledged${finding.acknowledged.by ? ` by ${finding.acknowledged.by}` : ""}`,
  finding.muted === null ? null : `muted until ${moment(finding.muted.until_ns)}`,
].filter(Boolean).map((text) => element("span", { class: "badge" }, text));

export const marksInFull = (finding) => [
  ["id", finding.id],
  ["acknowledged", finding.acknowledged === null ? "" : `${said(finding.acknowledged)} (${moment(finding.acknowledged.at_ns)})`],
  ["muted", finding.muted === null ? "" : `until ${moment(finding.muted.until_ns)} ${said(finding.muted)}`.trim()],
];

// The buttons of a finding; none where it is over, or the service gives it no id.
export const markButtons = (finding, key) => {
  if (finding.until_ns !== null || finding.id === "") return null;
  const button = (action, text) => {
    const made = element("button", { type: "button", "data-key": `${action} ${key}` }, text);
    made.addEventListener("click", () => open(action, finding, `${action} ${key}`));
    return made;
  };
  return element("p", { class: "marks" },
    button("acknowledge", finding.acknowledged === null ? "Acknowledge" : "Acknowledge again"),
    button("mute", finding.muted === null ? "Mute" : "Mute longer"),
    finding.acknowledged === null && finding.muted === null ? null : button("clear", "Clear"));
};

const SCOPES = {
  finding: (finding) => ({ finding: finding.id }),
  hosts: (finding) => ({ kind: finding.kind, job: finding.job, hosts: finding.hosts }),
  job: (finding) => ({ kind: finding.kind, job: finding.job }),
};

let now = null;

const open = (action, finding, key) => {
  now = { action, finding, key };
  const isMute = action === "mute";
  const kind = words(finding.kind);
  byId("mark-title").textContent = { acknowledge: "Acknowledge", mute: "Mute", clear: "Clear" }[action];
  byId("mark-about").textContent = finding.summary;
  byId("mark-error").textContent = "";
  byId("mark-note").value = "";
  byId("mark-by").value = stored();
  byId("mark-note-row").hidden = action === "clear";
  for (const id of ["mark-seconds-row", "mark-scope-row"]) byId(id).hidden = !isMute;
  byId("mark-scope").replaceChildren(
    element("option", { value: "finding" }, "this finding"),
    ...(finding.hosts.length ? [element("option", { value: "hosts" }, `every ${kind} of this job on ${finding.hosts.join(", ")}`)] : []),
    element("option", { value: "job" }, `every ${kind} of this job`));
  byId("mark-submit").textContent = byId("mark-title").textContent;
  byId("mark").showModal();
};

const body = () => {
  const { action, finding } = now;
  const by = byId("mark-by").value.trim();
  if (action === "clear") return { action, by, ...(finding.acknowledged === null && finding.muted.finding === null ? { mute: finding.muted.id } : { finding: finding.id }) };
  const note = byId("mark-note").value.trim();
  if (action === "acknowledge") return { action, by, note, finding: finding.id };
  return { action, by, note, seconds: Number(byId("mark-seconds").value), ...SCOPES[byId("mark-scope").value](finding) };
};

const send = async () => {
  store(byId("mark-by").value.trim());
  try {
    const answer = await fetch("/api/findings/mark", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body()) });
    if (answer.ok) byId("mark").close();
    else byId("mark-error").textContent = (await answer.json()).error;
  } catch {
    byId("mark-error").textContent = "the service does not answer: try again";
  }
};

byId("mark-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("mark-cancel").addEventListener("click", () => byId("mark").close());
// The finding was drawn again meanwhile: its button is another one.
byId("mark").addEventListener("close", () => document.querySelector(`.view:not([hidden]) [data-key="${CSS.escape(now.key)}"]`)?.focus());
