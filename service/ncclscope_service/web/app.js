// The live page: one event stream in, everything drawn anew from each overview.

import { drawBandwidth, drawWaits } from "./charts.js";
import { byId, element, setText } from "./dom.js";
import { drawAgents, drawAlignment, drawClocks, drawCommunicators, drawFindings, drawHealth, drawMix, drawTiles } from "./panels.js";

const state = { overview: null, job: null, selected: null, mix: "bytes", heardAt: 0 };

// Findings that show in a communicator's own bandwidth.
const SLOW = new Set(["slow_link", "bandwidth_drop", "slow_drift", "below_limit"]);

const draw = () => {
  const { overview } = state;
  if (overview === null) return;
  const job = overview.jobs.find((each) => each.name === state.job) ?? overview.jobs[0] ?? null;
  byId("main").hidden = job === null;
  byId("empty").hidden = job !== null;
  setText("version", `ncclscope ${overview.health.version}`);
  drawJobs(overview, job);
  if (job === null) return;
  const open = overview.findings.filter((finding) => finding.until_ns === null && finding.job === job.name);
  const marks = {
    alarmed: new Set(open.map((finding) => finding.communicator).filter((alias) => alias !== null)),
    slowed: new Set(open.filter((finding) => SLOW.has(finding.kind)).map((finding) => finding.communicator)),
    selected: job.communicators.some((each) => each.alias === state.selected) ? state.selected : null,
    onSelect: select,
  };
  document.title = open.length ? `(${open.length}) ${job.name} · ncclscope` : `${job.name} · ncclscope`;
  drawTiles(overview, job);
  drawFindings(overview, job);
  drawCommunicators(job, marks);
  drawMix(job, state.mix);
  drawAlignment(job);
  drawClocks(overview);
  drawAgents(overview);
  drawHealth(overview);
  drawBandwidth(overview, job, marks);
  drawWaits(overview, job, new Set(open.filter((finding) => finding.kind === "late_rank").flatMap((finding) => finding.ranks)));
};

const drawJobs = (overview, job) => {
  const picker = byId("job");
  const names = overview.jobs.map((each) => each.name);
  if (picker.dataset.names !== names.join("\n")) {
    picker.dataset.names = names.join("\n");
    picker.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  }
  picker.parentElement.hidden = job === null;
  if (job === null) return;
  picker.value = job.name;
  setText("level", job.level);
  setText("versions", job.versions.length ? `NCCL ${job.versions.join(", ")}` : "");
};

const select = (alias) => {
  state.selected = state.selected === alias ? null : alias;
  draw();
};

const setConnection = (name, text) => {
  byId("connection").dataset.state = name;
  setText("connection", text);
};

const connect = () => {
  const events = new EventSource("/api/events");
  events.addEventListener("overview", (event) => {
    state.overview = JSON.parse(event.data);
    state.heardAt = performance.now();
    setConnection("live", "live");
    if (!document.hidden) draw();
  });
  events.addEventListener("error", () => {
    setConnection("lost", "reconnecting");
    // A browser gives up for good where the answer was an error (a proxy, a full service): then start anew.
    if (events.readyState === EventSource.CLOSED) {
      events.close();
      setTimeout(connect, 2000);
    }
  });
};

byId("job").addEventListener("change", (event) => {
  state.job = event.target.value;
  state.selected = null;
  draw();
});
for (const button of document.querySelectorAll("[data-mix]")) {
  button.addEventListener("click", () => {
    state.mix = button.dataset.mix;
    for (const other of document.querySelectorAll("[data-mix]")) other.setAttribute("aria-pressed", String(other === button));
    draw();
  });
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.selected !== null) select(state.selected); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
setInterval(() => {
  if (byId("connection").dataset.state === "live" && performance.now() - state.heardAt > 5000) {
    setConnection("lost", "no news from the service");
  }
}, 1000);

connect();
