/* global Plotly */
// Small builders. All text from the service goes through textContent, so nothing in a log can become markup.

export const byId = (id) => document.getElementById(id);

// element("td", { class: "number" }, "text", child, ...)
export const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

const SVG = "http://www.w3.org/2000/svg";
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const fill = (made, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "kind") made.style.setProperty("--kind", `var(--${value})`);
    else if (name === "width" && made instanceof HTMLElement) made.style.width = value;
    else if (name === "left") made.style.left = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
};

export const setText = (id, text) => {
  const found = byId(id);
  if (found.textContent !== text) found.textContent = text;
};

// Replaces the children, but keeps keyboard focus on the element with the same data-key.
export const replace = (parent, ...children) => {
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...children);
  if (key !== undefined) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
};

const KINDS = new Set(["tp", "dp", "pp", "ep", "cp", "world", "optimizer", "embedding"]);

// The colour variable of a parallelism.
export const kindOf = (parallelism) => {
  const kind = (parallelism ?? "").toLowerCase();
  return KINDS.has(kind) ? kind : "unknown";
};

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Plotly reads <b> and the like in labels; names from logs must not be read so.
export const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// What the colours mean: [[name, colour's variable]].
export const drawLegend = (parent, entries) =>
  replace(parent, ...entries.map(([name, kind]) => element("span", {}, element("span", { class: "swatch", kind }), name)));

// The element that plotly draws into, made once; `replace`d by what stands there when there is nothing to draw.
export const plotIn = (parent) => {
  let plot = parent.querySelector(":scope > .plot");
  if (!plot) {
    plot = element("div", { class: "plot" });
    parent.replaceChildren(plot);
  }
  return plot;
};

export const nothingIn = (parent, ...text) => {
  const plot = parent.querySelector(":scope > .plot");
  if (plot) Plotly.purge(plot);
  replace(parent, element("p", { class: "nothing" }, ...text));
};
