// Which view the address names: #/ is the fleet, #/job/NAME a job, .../communicator/tp-0 and .../rank/37 one of its parts,
// .../finding/KIND/RANKS a job with that finding opened, #/health ncclscope itself. Anything else (a skip link) names none. Behind the views of a job
// "?range=job" has the charts over time begin with the job.

export const parse = (hash) => {
  if (!hash.startsWith("#/")) return null;
  const parts = hash.slice(2).split("?")[0].split("/").map(decode);
  if (parts[0] === "") return { view: "fleet" };
  if (parts[0] === "health") return { view: "health" };
  if (parts[0] !== "job" || !parts[1]) return null;
  if (parts.length === 2) return { view: "job", job: parts[1] };
  if (parts[2] === "finding" && parts[3]) return { view: "job", job: parts[1], finding: `${parts[3]}/${parts[4] ?? ""}` };
  if (parts[2] === "communicator" && parts[3]) return { view: "communicator", job: parts[1], alias: parts[3] };
  if (parts[2] === "rank" && /^\d+$/.test(parts[3] ?? "")) return { view: "rank", job: parts[1], rank: Number(parts[3]) };
  return null;
};

const decode = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a lone % that somebody typed
  }
};

const part = (text) => encodeURIComponent(text);

// What the charts over time cover: "recent", the last minutes, or "job".
export const rangeOf = (hash) => (hash.endsWith("?range=job") ? "job" : "recent");
export const withRange = (hash, range) => `${hash.split("?")[0]}${range === "job" ? "?range=job" : ""}`;
// Views of a job keep the range from one to the next.
const ranged = (hash) => withRange(hash, rangeOf(location.hash));

export const toFleet = () => "#/";
export const toHealth = () => "#/health";
export const toJob = (job) => ranged(`#/job/${part(job)}`);
export const toCommunicator = (job, alias) => ranged(`#/job/${part(job)}/communicator/${part(alias)}`);
export const toRank = (job, rank) => ranged(`#/job/${part(job)}/rank/${rank}`);

// The address of the view above this one.
export const above = (route) =>
  route.view === "communicator" || route.view === "rank" ? toJob(route.job) : toFleet();
