// Numbers as people read them. Unknown is null everywhere, and reads "not recorded".

export const NOT_RECORDED = "not recorded";

const BINARY = [" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"];
const THOUSANDS = ["", " k", " M", " G", " T"];

export const isKnown = (value) => value !== null && value !== undefined;

const digits = (value) => (Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2);

const scaled = (value, base, units) => {
  let power = 0;
  while (Math.abs(value) >= base && power < units.length - 1) {
    value /= base;
    power += 1;
  }
  return (power === 0 ? String(Math.round(value * 100) / 100) : String(Number(value.toFixed(digits(value))))) + units[power];
};

export const amount = (value) =>
  Math.abs(value) < 10_000 ? Math.round(value).toLocaleString("en") : scaled(value, 1000, THOUSANDS);

// Sizes are binary, as NCCL and its users name them (16 MiB); bandwidths decimal, as nccl-tests prints them.
export const bytes = (value) => scaled(value, 1024, BINARY);

export const bandwidth = (value) => {
  const giga = value / 1e9;
  if (giga >= 0.1) return `${giga.toFixed(digits(giga))} GB/s`;
  return giga >= 1e-4 ? `${(giga * 1e3).toFixed(1)} MB/s` : `${(giga * 1e6).toFixed(1)} kB/s`;
};

export const percent = (ratio) => {
  const value = ratio * 100;
  return `${(value > 0 && value < 9.95) || (value >= 99.5 && value < 99.95) ? value.toFixed(1) : Math.round(value)} %`;
};

export const duration = (seconds) => {
  const size = Math.abs(seconds);
  if (size === 0) return "0";
  const [factor, unit] = size < 1e-6 ? [1e9, "ns"] : size < 1e-3 ? [1e6, "µs"] : size < 1 ? [1e3, "ms"] : [1, "s"];
  if (size >= 120) return age(size);
  return `${(seconds * factor).toFixed(digits(seconds * factor)).replace("-", "−")} ${unit}`;
};

export const age = (seconds) => {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} d`;
};

// Times are UTC and say so, as in the report and the terminal; all are nanoseconds since 1970.
export const moment = (ns) => `${new Date(ns / 1e6).toISOString().slice(0, 19).replace("T", " ")} UTC`;
export const timeOfDay = (ns) => `${new Date(ns / 1e6).toISOString().slice(11, 19)} UTC`;
export const clockTime = (ns) => `${new Date(ns / 1e6).toISOString().slice(11, 16)} UTC`;

const BOUNDS = { "4KiB": 2 ** 12, "64KiB": 2 ** 16, "1MiB": 2 ** 20, "16MiB": 2 ** 24, "256MiB": 2 ** 28 };

export const sizeClass = (name) =>
  name in BOUNDS ? `≤ ${bytes(BOUNDS[name])}` : name === "inf" ? `> ${bytes(BOUNDS["256MiB"])}` : "of unknown size";

export const words = (name) => name.replaceAll("_", " ");

export const capitalised = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// 0, 1, 2, 5 -> "0-2, 5"
export const ranges = (numbers) => {
  const parts = [];
  for (const number of numbers) {
    const last = parts.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(", ");
};
