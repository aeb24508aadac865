// The live page: the event stream in, the view that the address names drawn anew from each overview.

import { drawBandwidth } from "./charts.js";
import { drawSizes, drawTraffic } from "./detail_charts.js";
import { ask, askAgain, askForMissing } from "./details.js";
import { byId, element, replace, setText } from "./dom.js";
import { collectivePicture } from "./evidence.js";
import { drawLayout } from "./layout.js";
import { drawLostTime } from "./lost_time.js";
import { drawNodeGraph } from "./node_graph.js";
import { drawPlan, drawPlanPattern } from "./plan.js";
import { drawAgents, drawAlignment, drawClocks, drawCommunicators, drawFindings, drawHealth, drawMix, drawSettings, drawTiles, drawVerdict } from "./panels.js";
import { above, parse, rangeOf, toCommunicator, toFleet, toHealth, toJob, toRank, withRange } from "./router.js";
import { setSpan } from "./span.js";
import { drawSteps, headline, stateLine, verdict } from "./steps.js";
import { drawTimeline } from "./timeline.js";
import { drawCommunicatorView, drawFleet, drawMissing, drawRankView } from "./views.js";

const state = { overview: null, route: null, job: null, mix: "bytes", heardAt: 0, asked: null, seconds: 2, zoom: null, isPaused: false, extent: "", shown: null };
const VIEWS = { fleet: "fleet", job: "main", communicator: "communicator", rank: "rank", health: "health-view" };

const go = (hash) => { location.hash = hash; };

// Whether charts over time begin with the job.
const isWhole = () => rangeOf(location.hash) === "job";

// The view of the address; without one the only job's, else the fleet's.
const routed = (overview) => {
  const route = parse(location.hash) ?? state.route;
  if (route !== null) return route;
  return overview.jobs.length === 1 ? { view: "job", job: overview.jobs[0].name } : { view: "fleet" };
};

const draw = () => {
  const { overview } = state;
  if (overview === null) return;
  const route = routed(overview);
  state.route = route;
  const isEmpty = overview.jobs.length === 0;
  const name = route.job ?? state.job ?? overview.jobs[0]?.name;
  const job = overview.jobs.find((each) => each.name === name) ?? (route.job === undefined ? overview.jobs[0] ?? null : null);
  if (job !== null) state.job = job.name;
  setSpan((isWhole() && job !== null ? job.begin_ns : Math.max(overview.window_begin_ns, job?.begin_ns ?? 0)) / 1e6, overview.now_ns / 1e6);
  const missing = route.job !== undefined && job === null;
  for (const [view, id] of Object.entries(VIEWS)) byId(id).hidden = view !== route.view || missing || (isEmpty && view !== "health");
  byId("empty").hidden = !(missing || (isEmpty && route.view !== "health"));
  if (!byId("empty").hidden) {
    setText("empty-commands", firstCommands(overview.health));
    replace(byId("empty-others"), ...(missing && !isEmpty ? suggestions(route.job, overview.jobs.map((each) => [each.name, toJob(each.name)])) : []));
  }
  byId("empty-first").textContent = missing && !isEmpty ? `There is no job ${route.job}.` : "Waiting for the first agent.";
  setText("version", `ncclscope ${overview.health.version}`);
  drawTop(overview, job, route);
  const open = overview.findings.filter((finding) => finding.until_ns === null && (job === null || route.view === "fleet" || finding.job === job.name));
  const title = { fleet: "Fleet", health: "Health", communicator: route.alias, rank: `rank ${route.rank}` }[route.view];
  document.title = `${open.length ? `(${open.length}) ` : ""}${[title, route.view === "fleet" || route.view === "health" ? null : job?.name, "ncclscope"].filter(Boolean).join(" · ")}`;
  askFor(route, job);
  const extent = job === null ? "" : `${job.processes} ${job.communicators_known}`;
  if (extent !== state.extent) askForMissing();
  state.extent = extent;
  if (route.view === "fleet" && !isEmpty) drawFleet(overview);
  if (route.view === "health") {
    drawClocks(overview);
    drawAgents(overview);
    drawHealth(overview);
  }
  if (job === null || missing) return;
  if (route.view === "job") drawJob(overview, job, open);
  if (route.view === "communicator") drawPart("communicator", overview, job, (finding) => finding.groups.includes(route.alias));
  if (route.view === "rank") drawPart("rank", overview, job, (finding) => finding.ranks.includes(route.rank));
};

// What starts an agent that this service takes, and the job's own variables, to be copied.
const firstCommands = ({ agents_port: port, agents_need: need }) => [
  `ncclscope agent --connect ${location.hostname}:${port ?? 9797} --logs '/var/log/nccl/*.log'${need.map((option) => ` ${option} FILE`).join("")}`,
  "eval \"$(ncclscope env --find --log-file /var/log/nccl/nccl.%h.%p.log)\"",
].join("\n");

// Names that are most like one that is not there, as links: [[name, address]] in, "Did you mean ...?" out.
const suggestions = (asked, names) => {
  const common = (name) => { let i = 0; while (i < name.length && name[i] === asked[i]) i += 1; return i; };
  const near = names.map(([name, address]) => [common(name) - Math.abs(name.length - asked.length) / 100, name, address])
    .sort((a, b) => b[0] - a[0]).slice(0, 3);
  return near.length === 0 ? [] : ["Did you mean ", ...near.flatMap(([, name, address], i) => [i ? ", " : "", element("a", { href: address }, name)]), "?"];
};

// Opens the finding that the address names (an alert's link does), once.
const showFinding = () => {
  const { finding } = state.route;
  if (finding === undefined || finding === state.shown) return;
  state.shown = finding;
  const found = [...byId("findings-list").querySelectorAll("details")].find((each) => each.dataset.address === finding);
  if (found === undefined) return;
  found.open = true;
  found.scrollIntoView({ block: "center" });
};

const drawJob = (overview, job, open) => {
  setText("headline", headline(job, open));
  setText("state-line", stateLine(overview, job));
  drawTiles(job);
  drawFindings(byId("findings-list"), overview, overview.findings.filter((finding) => finding.job === job.name), verdict(overview, job));
  showFinding();
  drawVerdict(job);
  drawCommunicators(job, new Set(open.flatMap((finding) => finding.groups)));
  drawMix(job, state.mix);
  drawAlignment(job);
  if (!isWhole()) drawBandwidth(overview, job, { slowed: slowedBy(open) });
};

// Communicators in whose bandwidth these findings show.
const slowedBy = (findings) => new Set(findings.filter((finding) => finding.slows_groups).flatMap((finding) => finding.groups));

// Bandwidth since the start of the job: its communicators with the courses of that time.
const drawWholeBandwidth = (name, found) => {
  const job = state.overview.jobs.find((each) => each.name === name);
  if (job === undefined) return;
  const course = new Map(found.communicators.map((each) => [each.alias, each]));
  const communicators = job.communicators.filter((each) => course.has(each.alias)).map((each) => ({ ...each, ...course.get(each.alias) }));
  const past = state.overview.findings.filter((finding) => finding.job === name);
  drawBandwidth(found, { ...job, communicators }, { slowed: slowedBy(past) });
};

// What the event stream tells of a communicator or a rank: its findings, and its neighbours.
const drawPart = (view, overview, job, isAbout) => {
  const { route } = state;
  const link = byId(`${view}-job`);
  link.href = toJob(job.name);
  link.textContent = job.name;
  setText(`${view}-name`, view === "rank" ? `rank ${route.rank}` : route.alias);
  drawFindings(byId(`${view}-findings`), overview, overview.findings.filter((finding) => finding.job === job.name && isAbout(finding)), null);
  const [before, after] = neighbours(job);
  for (const [id, hash] of [["before", before], ["after", after]]) {
    const step = byId(`${view}-${id}`);
    step.hidden = hash === null;
    if (hash !== null) step.href = hash;
  }
};

const neighbours = (job) => {
  const { route } = state;
  if (route.view === "rank") return [route.rank > 0 ? toRank(job.name, route.rank - 1) : null, toRank(job.name, route.rank + 1)];
  if (route.view !== "communicator") return [null, null];
  const names = job.communicators.map((each) => each.alias);
  const place = names.indexOf(route.alias);
  const at = (index) => (place >= 0 && names[index] !== undefined ? toCommunicator(job.name, names[index]) : null);
  return [place > 0 ? at(place - 1) : null, at(place + 1)];
};

const drawTop = (overview, job, route) => {
  const picker = byId("job");
  const names = overview.jobs.map((each) => each.name);
  if (picker.dataset.names !== names.join("\n")) {
    picker.dataset.names = names.join("\n");
    picker.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  }
  picker.parentElement.hidden = job === null || route.view === "fleet" || route.view === "health";
  byId("to-job").hidden = job === null;
  for (const [id, view] of [["to-fleet", "fleet"], ["to-job", "job"], ["to-health", "health"]]) {
    const isHere = view === route.view || (view === "job" && (route.view === "communicator" || route.view === "rank"));
    byId(id).setAttribute("aria-current", isHere ? "page" : "false");
  }
  if (job === null) return;
  byId("to-job").href = toJob(job.name);
  picker.value = job.name;
  for (const button of document.querySelectorAll("[data-range]")) button.setAttribute("aria-pressed", String((button.dataset.range === "job") === isWhole()));
  setText("level", job.level);
  setText("versions", job.versions.length ? `NCCL ${job.versions.join(", ")}` : "");
};

// Asks what the view needs beside the stream, when it opens.
const askFor = (route, job) => {
  const key = job === null ? route.view : JSON.stringify([route, job.name, isWhole()]);
  if (key === state.asked) return;
  state.asked = key;
  state.isPaused = false;
  state.zoom = null;
  const at = job === null ? "" : encodeURIComponent(job.name);
  if (route.view === "health") return ask([{ path: "/api/settings", every: 5000, draw: drawSettings }]);
  if (job === null || route.view === "fleet") return ask([]);
  const timeline = (id, what, onLane, query) => ({ path: timelinePath(at, query), every: 3000, isPaused: () => state.isPaused, query, id, cards: [id],
    draw: (found) => drawTimeline(id, found, { what, onLane, onZoom: zoom }) });
  const toLane = (lane) => go(toRank(job.name, lane));
  const range = `range=${rangeOf(location.hash)}`;
  if (route.view === "job") {
    ask([
      { path: `${at}/steps`, every: 5000, cards: ["steps"], draw: (found) => drawSteps(found, state.overview.findings.filter((finding) => finding.job === job.name)) },
      ...(isWhole() ? [{ path: `${at}/bandwidth?${range}`, every: 5000, cards: ["bandwidth"], draw: (found) => drawWholeBandwidth(job.name, found) }] : []),
      { path: `${at}/lost-time?${range}`, every: 5000, cards: ["lost-time"], draw: (found) => drawLostTime("lost-time", job.name, found, go) },
      { path: `${at}/plan`, every: 10_000, cards: ["plan"], draw: (found) => drawPlan(found, state.overview.jobs.find((each) => each.name === job.name)) },
      { path: `${at}/plan/pattern`, every: 10_000, cards: ["plan-expected"], draw: drawPlanPattern },
      { path: `${at}/layout`, every: 10_000, cards: ["layout"], draw: (found) => drawLayout(found, job.name, state.overview.findings.filter((finding) => finding.job === job.name && finding.until_ns === null)) },
      { path: `${at}/node-graph`, every: 10_000, cards: ["node-graph"], draw: (found) => drawNodeGraph(found, job.name) },
      { path: `${at}/traffic`, every: 10_000, cards: ["traffic"], draw: drawTraffic },
      { path: `${at}/sizes`, every: 5000, cards: ["sizes"], draw: (found) => drawSizes(byId("sizes"), "sizes-note", found, (alias) => go(toCommunicator(job.name, alias))) },
      keep(timeline("timeline", "job", toLane, "")),
    ]);
  } else if (route.view === "communicator") {
    const alias = encodeURIComponent(route.alias);
    ask([
      { path: `${at}/communicators/${alias}?${range}`, every: 2000, cards: ["communicator-tiles", "series", "communicator-sizes", "communicator-ranks", "operations"], fail: (text) => drawMissing("communicator", text, suggestions(route.alias, state.overview.jobs.find((each) => each.name === job.name).communicators
          .map((each) => [each.alias, toCommunicator(job.name, each.alias)]))),
        draw: (found) => drawCommunicatorView(job, found) },
      { path: `${at}/lost-time?communicator=${alias}&${range}`, every: 5000, cards: ["communicator-lost-time"], draw: (found) => drawLostTime("communicator-lost-time", job.name, found, go, isWhole() ? "; as far as memory reaches" : "") },
      { path: `${at}/communicators/${alias}/collective`, every: 5000, cards: ["collective"], draw: drawCollective },
      keep(timeline("communicator-timeline", "communicator", toLane, `&communicator=${alias}`)),
    ]);
  } else {
    ask([
      { path: `${at}/ranks/${route.rank}?${range}`, every: 2000, cards: ["rank-tiles", "rank-waits", "rank-groups"], fail: (text) => drawMissing("rank", text, suggestions("0", [["0", toRank(job.name, 0)], ...job.communicators.flatMap((each) => each.ranks.slice(-1)).sort((a, b) => b - a).slice(0, 1)
        .map((rank) => [String(rank), toRank(job.name, rank)])])), draw: (found) => drawRankView(job, found) },
      keep(timeline("rank-timeline", "rank", (alias) => go(toCommunicator(job.name, alias)), `&rank=${route.rank}`)),
    ]);
  }
  drawChoices();
  return undefined;
};

// The collective of a communicator in which most was lost, and the timeline around it.
const drawCollective = (found) => {
  byId("collective-zoom").hidden = found === null;
  replace(byId("collective"), found === null ? element("p", { class: "nothing" }, "Not recorded: no collective with the kernels of its ranks is in memory.") : collectivePicture(found));
  if (found === null) return;
  const length = Math.max(...found.ranks.map((each) => each.end_us)) * 1e-6;
  byId("collective-zoom").onclick = () => zoom({ until_ns: Math.round(found.begin_ns + 2 * length * 1e9), seconds: 3 * length });
};

const timelinePath = (at, query) => {
  const { seconds, until_ns: until } = state.zoom ?? { seconds: state.seconds };
  return `${at}/timeline?seconds=${seconds}${until === undefined ? "" : `&until_ns=${until}`}${query}`;
};
const keep = (timeline) => {
  state.timeline = { at: timeline.path.split("/")[0], query: timeline.query };
  return timeline;
};

// How many seconds the timeline shows, and whether it stands still.
const drawChoices = () => {
  for (const parent of document.querySelectorAll(".choices")) {
    const choice = (text, isChosen, onClick, hint) => {
      const button = element("button", { type: "button", "aria-pressed": String(isChosen), title: hint }, text);
      button.addEventListener("click", onClick);
      return button;
    };
    parent.replaceChildren(element("span", { class: "switch" }, ...[0.5, 2, 10].map((seconds) => choice(`${seconds} s`, state.zoom === null && state.seconds === seconds, () => look({ seconds })))),
      state.zoom === null ? choice(state.isPaused ? "go on" : "stop", state.isPaused, togglePause, "p") : choice("zoom out", false, () => zoom(null), "double-click"));
  }
};

// Shows another stretch of the timeline: the last so many seconds, or what was dragged over.
const look = ({ seconds = state.seconds, zoomed = null }) => {
  const old = timelinePath(state.timeline.at, state.timeline.query);
  Object.assign(state, { seconds, zoom: zoomed, isPaused: false });
  askAgain(old, timelinePath(state.timeline.at, state.timeline.query));
  drawChoices();
};
const zoom = (zoomed) => look({ zoomed });

const togglePause = () => {
  state.isPaused = !state.isPaused;
  drawChoices();
};

const setConnection = (name, text) => {
  byId("connection").dataset.state = name;
  setText("connection", text);
};

// A token that is no longer known looks like any other error to the event stream. When the page is loaded again, the browser
// asks for another one.
const askForToken = async () => {
  const answer = await fetch("/api/health").catch(() => null);
  if (answer?.status === 401) location.reload();
};

let events = null;

const connect = () => {
  events = new EventSource("/api/events");
  state.heardAt = performance.now();
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
      askForToken();
      setTimeout(connect, 2000);
    }
  });
};

const find = (text) => {
  const asked = text.trim();
  if (asked === "" || state.job === null) return;
  const rank = /^(?:rank\s*)?(\d+)$/i.exec(asked);
  go(rank ? toRank(state.job, Number(rank[1])) : toCommunicator(state.job, asked.toLowerCase()));
};

// Has the charts over time cover the last minutes ("recent") or the whole job.
const showRange = (range) => {
  if (state.job === null || ["fleet", "health"].includes(state.route?.view)) return;
  go(withRange(parse(location.hash) === null ? toJob(state.job) : location.hash, range));
};

const toggleTheme = () => document.dispatchEvent(new Event("toggletheme"));
const showKeys = () => byId("help").showModal();

// The next link of the table that has the focus.
const step = (by) => {
  const links = [...document.activeElement.closest("table").querySelectorAll("a.name")];
  const place = links.indexOf(document.activeElement);
  links[place < 0 ? 0 : Math.max(0, Math.min(links.length - 1, place + by))]?.focus();
};

const KEYS = {
  f: () => go(toFleet()),
  j: () => state.job !== null && go(toJob(state.job)),
  h: () => go(toHealth()),
  t: toggleTheme,
  p: togglePause,
  r: () => showRange(isWhole() ? "recent" : "job"),
  "?": showKeys,
  "/": () => byId("find").focus(),
  "[": () => document.querySelector(".view:not([hidden]) .step a[id$=before]:not([hidden])")?.click(),
  "]": () => document.querySelector(".view:not([hidden]) .step a[id$=after]:not([hidden])")?.click(),
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  Escape: () => state.route !== null && state.route.view !== "fleet" && go(above(state.route)),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") !== null) return;
  if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = KEYS[event.key];
  const isArrow = event.key.startsWith("Arrow");
  if (act === undefined) return;
  if (isArrow && !document.activeElement?.closest("table")) return; // the page scrolls
  event.preventDefault();
  act();
});

byId("find-form").addEventListener("submit", (event) => {
  event.preventDefault();
  find(byId("find").value);
  byId("find").blur();
});
byId("job").addEventListener("change", (event) => go(toJob(event.target.value)));
byId("theme").addEventListener("click", toggleTheme);
byId("keys").addEventListener("click", showKeys);
for (const button of document.querySelectorAll("[data-mix]")) {
  button.addEventListener("click", () => {
    state.mix = button.dataset.mix;
    for (const other of document.querySelectorAll("[data-mix]")) other.setAttribute("aria-pressed", String(other === button));
    draw();
  });
}
for (const button of document.querySelectorAll("[data-range]")) button.addEventListener("click", () => showRange(button.dataset.range));
addEventListener("hashchange", (event) => {
  if (parse(location.hash) === null) return;
  const before = withRange(new URL(event.oldURL).hash, "recent");
  if (state.route !== null && before === withRange(location.hash, "recent")) return draw(); // another range of the same view
  state.route = null;
  state.shown = null;
  scrollTo(0, 0);
  return draw();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
document.addEventListener("themechange", () => {
  state.asked = null; // charts carry their colours
  draw();
});
// A connection that died unseen (a laptop that slept, a proxy that forgot it) never fails: it is silent. Overviews come
// every second.
setInterval(() => {
  const silence = performance.now() - state.heardAt;
  if (byId("connection").dataset.state === "live" && silence > 5000) setConnection("lost", "no news from the service");
  if (silence > 30_000 && events.readyState !== EventSource.CLOSED) {
    events.close();
    connect();
  }
}, 1000);

connect();
