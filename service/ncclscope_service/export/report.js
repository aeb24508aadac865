"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  /* Okabe and Ito's colours: told apart by readers with colour-vision deficiency. */
  const palette = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];
  const parallelisms = [...new Set(data.mix.map((entry) => entry.parallelism))].sort();
  const ops = [...new Set(data.mix.map((entry) => entry.op))];
  const colorOf = (list, name) => palette[Math.max(0, list.indexOf(name)) % palette.length];
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const config = { displayModeBar: false, responsive: true };

  const axis = (title, more) => ({
    title: { text: title, standoff: 8, font: { size: 12 } }, automargin: true, showline: true, ticks: "outside", ticklen: 4,
    linecolor: style("--soft"), tickcolor: style("--soft"), gridcolor: style("--rule"), zeroline: false, ...more,
  });
  const layout = (height, more) => ({
    height, margin: { l: 60, r: 14, t: 8, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: style("--ink") },
    legend: { orientation: "h", traceorder: "normal", itemsizing: "constant", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } }, hoverlabel: { font: { size: 12 } }, ...more,
  });
  const draw = (id, traces, shape) => {
    const place = document.getElementById(id);
    if (place) Plotly.react(place, traces, shape, config);
  };
  const bytes = (value) => {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let step = 0;
    while (value >= 1000 && step < units.length - 1) { value /= 1000; step += 1; }
    return `${Number(value.toPrecision(3))} ${units[step]}`;
  };

  const mix = (id, field, title, scale) => {
    const known = data.mix.filter((entry) => entry[field] !== null);
    const shown = ops.filter((op) => known.some((entry) => entry.op === op)).reverse();
    const traces = parallelisms.map((kind) => ({
      type: "bar", orientation: "h", name: kind, y: shown, marker: { color: colorOf(parallelisms, kind) },
      x: shown.map((op) => known.filter((e) => e.op === op && e.parallelism === kind).reduce((sum, e) => sum + e[field] / scale, 0)),
    }));
    draw(id, traces, layout(90 + 30 * Math.max(2, shown.length), { barmode: "stack", xaxis: axis(title), yaxis: axis("", { showgrid: false }) }));
  };
  const sizes = () => {
    const names = Object.keys(data.sizes.ops);
    const bins = data.sizes.ops[names[0]].map((_, place) => bytes(2 ** (place + data.sizes.low)));
    const traces = names.map((op) => ({ type: "bar", name: op, x: bins, y: data.sizes.ops[op], marker: { color: colorOf(ops, op) } }));
    draw("sizes", traces, layout(300, { barmode: "stack", bargap: bins.length < 6 ? 0.75 : 0.08, xaxis: axis("message size (lower bound of the bin)", { showgrid: false, type: "category" }), yaxis: axis("operations") }));
  };
  const bandwidth = () => {
    const labels = Object.keys(data.bandwidth.series);
    const all = labels.flatMap((label) => data.bandwidth.series[label].x);
    const [low, high] = [all.reduce((a, b) => Math.min(a, b)) / 1.5, all.reduce((a, b) => Math.max(a, b)) * 1.5];
    const traces = labels.map((label, place) => ({
      type: "scatter", mode: "markers", name: label, x: data.bandwidth.series[label].x, y: data.bandwidth.series[label].y,
      marker: { size: 5, opacity: 0.55, color: palette[place % palette.length] },
      hovertemplate: "%{y:.4g} GB/s at %{x:.4s}B<extra>%{fullData.name}</extra>",
    }));
    for (const [kind, limit] of Object.entries(data.bandwidth.limits)) {
      traces.push({ type: "scatter", mode: "lines", name: `limit ${kind}`, x: [low, high], y: [limit, limit], line: { dash: "dash", width: 1.4, color: colorOf(parallelisms, kind) } });
    }
    const steps = high / low > 200 ? [1] : [1, 2, 3, 5];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) ticks.push(...steps.map((step) => step * 10 ** power));
    const shown = ticks.filter((size) => size >= low && size <= high);
    draw("bandwidth", traces, layout(400, {
      xaxis: axis("message size", { type: "log", tickvals: shown, ticktext: shown.map(bytes), range: [Math.log10(low), Math.log10(high)] }),
      yaxis: axis("bus bandwidth of the transfer (GB/s)", { type: "log", dtick: 1, minor: { ticks: "outside", ticklen: 2 } }),
    }));
  };
  const waits = () => {
    const seconds = data.waits.share[0].map((_, place) => (place + 0.5) * data.waits.seconds_per_bin);
    draw("waits", [{
      type: "heatmap", x: seconds, y: data.waits.ranks.map((name) => `rank ${name}`), z: data.waits.share, zmin: 0, zmax: 1, hoverongaps: false,
      colorscale: dark.matches ? "Cividis" : [[0, "#f2f5f8"], [0.25, "#b9d2e8"], [0.5, "#6ba3d0"], [0.75, "#2c6aa6"], [1, "#0b2f5c"]],
      colorbar: { title: { text: "wait", side: "top" }, tickformat: ".0%", thickness: 12, len: 1, outlinewidth: 0 },
      hovertemplate: "%{y}, %{x:.3f} s: %{z:.0%} waiting<extra></extra>",
    }], layout(Math.min(900, 110 + 20 * Math.max(3, data.waits.ranks.length)), {
      xaxis: axis("time since the first kernel (s)", { showgrid: false }), yaxis: axis("", { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const stacked = (id, groups, names, title, colors, scale) => {
    const traces = Object.entries(groups).map(([name, values], place) => ({
      type: "bar", name, x: names, y: values.map((value) => value / scale), marker: { color: colors(name, place) },
    })).filter((trace) => trace.y.some((value) => value > 0));
    draw(id, traces, layout(280, { barmode: "stack", bargap: names.length < 6 ? 0.75 : 0.25, xaxis: axis("rank", { type: "category", showgrid: false }), yaxis: axis(title) }));
  };
  const verdictColors = { matched: "#0072b2", unmatched: "#d55e00", "not covered": "#9aa4b0", "no kernel": "#56b4e9", pending: "#e69f00" };

  const drawAll = () => {
    mix("mix-operations", "operations", "operations", 1);
    mix("mix-bytes", "bytes", "message bytes (GB)", 1e9);
    if (data.sizes) sizes();
    if (data.bandwidth) bandwidth();
    if (data.waits) waits();
    if (data.volume) stacked("volume", data.volume.ops, data.volume.ranks, "message bytes (GB)", (op) => colorOf(ops, op), 1e9);
    if (data.alignment) stacked("alignment", data.alignment.verdicts, data.alignment.ranks, "operations", (name) => verdictColors[name], 1);
  };
  drawAll();
  dark.addEventListener("change", drawAll);
})();
