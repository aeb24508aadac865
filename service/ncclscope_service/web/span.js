// The stretch of time that all charts over time show, and the cursor that stands at the same time in all of them.

import { colour, element } from "./dom.js";

const plots = new Set();
const shown = { begin: 0, end: 1 }; // ms since 1970

// Sets the stretch, in ms since 1970, before charts are drawn.
export const setSpan = (begin, end) => Object.assign(shown, { begin, end });

export const span = () => shown;

// How times are written, and how many labels fit beside each other on the width of a chart.
const format = () => {
  const length = shown.end - shown.begin;
  return length < 900_000 ? "%H:%M:%S" : length < 86_400_000 ? "%H:%M" : "%b %d %H:%M";
};
const labels = (plot) => Math.max(2, Math.min(7, Math.floor((plot.clientWidth - 60) / (format().startsWith("%b") ? 96 : 72))));

// The axis of a chart over time. Times are UTC.
export const timeAxis = (plot) => ({
  type: "date", range: [shown.begin, shown.end], fixedrange: true, zeroline: false, showgrid: false, ticks: "outside", ticklen: 3, nticks: labels(plot),
  tickformat: format(), tickangle: 0,
  tickcolor: colour("line"), linecolor: colour("line"), showline: true, automargin: false, tickfont: { size: 10.5, color: colour("quiet") },
});

// Lets the cursor of a chart over time move those of all others. Call it after each drawing.
export const follow = (plot) => {
  if (plots.has(plot)) return;
  plots.add(plot);
  plot.append(element("span", { class: "cursor", hidden: true }));
  plot.addEventListener("mousemove", (event) => {
    const axis = plot._fullLayout?.xaxis;
    if (!axis) return;
    const pixel = event.clientX - plot.getBoundingClientRect().left - axis._offset;
    point(pixel < 0 || pixel > axis._length ? null : axis.p2c(pixel));
  });
  plot.addEventListener("mouseleave", () => point(null));
};

const point = (time) => {
  for (const plot of plots) {
    if (!plot.isConnected) {
      plots.delete(plot);
      continue;
    }
    const [cursor, axis] = [plot.querySelector(":scope > .cursor"), plot._fullLayout?.xaxis];
    if (!cursor || !axis) continue;
    const pixel = time === null ? -1 : axis.c2p(time);
    cursor.hidden = pixel < 0 || pixel > axis._length;
    cursor.style.left = `${axis._offset + pixel}px`;
  }
};
