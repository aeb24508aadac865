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
  const scale = () => (dark.matches
    ? [[0, "#1d2733"], [0.25, "#1f4468"], [0.5, "#2f74b3"], [0.75, "#7db4e6"], [1, "#e8f2fc"]]
    : [[0, "#f2f5f8"], [0.25, "#b9d2e8"], [0.5, "#6ba3d0"], [0.75, "#2c6aa6"], [1, "#0b2f5c"]]);
  /* In the timeline Send and Recv share a kernel, which is named after both. */
  const kinds = [...ops, ...Object.keys(data.timeline ? data.timeline.ops : {}).filter((op) => !ops.includes(op))];
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
  const stacked = (id, groups, names, title, colors, scale) => {
    const traces = Object.entries(groups).map(([name, values], place) => ({
      type: "bar", name, x: names, y: values.map((value) => value / scale), marker: { color: colors(name, place) },
    })).filter((trace) => trace.y.some((value) => value > 0));
    draw(id, traces, layout(280, { barmode: "stack", bargap: names.length < 6 ? 0.75 : 0.25, xaxis: axis("rank", { type: "category", showgrid: false }), yaxis: axis(title) }));
  };
  const timeMap = (id, map, title, what) => {
    const seconds = map.share[0].map((_, place) => (place + 0.5) * map.seconds_per_bin);
    draw(id, [{
      type: "heatmap", x: seconds, y: map.ranks.map((name) => `rank ${name}`), z: map.share, zmin: 0, zmax: 1, hoverongaps: false,
      colorscale: scale(), colorbar: { title: { text: title, side: "top" }, tickformat: ".0%", thickness: 12, len: 1, outlinewidth: 0 },
      hovertemplate: `%{y}, %{x:.3f} s: %{z:.0%} ${what}<extra></extra>`,
    }], layout(Math.min(900, 110 + 20 * Math.max(3, map.ranks.length)), {
      xaxis: axis("time since the first kernel (s)", { showgrid: false }), yaxis: axis("", { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const iterations = (id, field, title, unit) => {
    const { first, per_bin, ops: found } = data.iterations;
    const traces = Object.entries(found).map(([op, sums]) => ({
      type: "bar", name: op, x: sums[field].map((_, place) => first + place * per_bin), y: sums[field].map((value) => value / unit), marker: { color: colorOf(ops, op) },
    })).filter((trace) => trace.y.some((value) => value > 0));
    const few = traces.length && traces[0].x.length < 20;
    draw(id, traces, layout(280, { barmode: "stack", bargap: 0.15, xaxis: axis("iteration", { showgrid: false, tickformat: "d", ...(few ? { dtick: 1 } : {}) }), yaxis: axis(title) }));
  };
  const traffic = () => {
    const { senders, receivers, hosts, what } = data.traffic;
    const amounts = data.traffic.bytes;
    const known = amounts.flat().filter((value) => value !== null).map(Math.log10);
    const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
    const ticks = high - low < 1 ? [low, high] : Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, place) => Math.ceil(low) + place);
    const edges = what === "rank" ? hosts.flatMap((host, place) => (place > 0 && host !== hosts[place - 1] ? [place - 0.5] : [])) : [];
    const line = { color: style("--faint"), width: 1 };
    const n = senders.length;
    const side = Math.max(320, Math.min(640, 120 + 26 * n));
    const named = (name) => (what === "rank" && /^\d/.test(name) ? `rank ${name}` : name);
    draw("traffic", [{
      type: "heatmap", x: receivers.map(named), y: senders.map(named), z: amounts.map((row) => row.map((value) => (value === null ? null : Math.log10(value)))),
      customdata: amounts.map((row) => row.map((value) => (value === null ? "" : bytes(value)))), hoverongaps: false, xgap: n < 64 ? 1 : 0, ygap: n < 64 ? 1 : 0,
      zmin: high - low < 0.5 ? low - 1 : low, zmax: high, colorscale: scale(), colorbar: { title: { text: "bytes", side: "top" }, tickvals: ticks, ticktext: ticks.map((power) => bytes(10 ** power)), thickness: 12, len: 1, outlinewidth: 0 },
      hovertemplate: "%{y} to %{x}: %{customdata}<extra></extra>",
    }], layout(side, {
      width: Math.min(document.querySelector("main").clientWidth - 56, side + 60 * (1 + receivers.length / n)), shapes: edges.flatMap((at) => [
        { type: "line", x0: at, x1: at, y0: -0.5, y1: n - 0.5, line }, { type: "line", y0: at, y1: at, x0: -0.5, x1: receivers.length - 0.5, line }]),
      xaxis: axis(`receiving ${what}`, { showgrid: false, type: "category", tickangle: n > 12 ? -90 : 0 }),
      yaxis: axis(`sending ${what}`, { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const timeline = () => {
    const { ranks, ops: found } = data.timeline;
    const lane = (place) => `rank ${ranks[place]}`;
    const bar = (name, color, y, base, x, more) => ({
      type: "bar", orientation: "h", name, y, base, x, width: 0.72, offset: -0.36, legendgroup: name, marker: { color, line: { width: 0 }, ...more },
      hovertemplate: `%{y}: ${name}, %{x:.4g} ms from %{base:.4g} ms<extra></extra>`,
    });
    const waits = [[], [], []];
    const traces = [];
    for (const [op, bars] of Object.entries(found)) {
      const told = [[], [], []];
      const whole = [[], [], []];
      bars.start.forEach((start, k) => {
        const into = bars.wait[k] === null ? whole : told;
        const wait = bars.wait[k] ?? 0;
        if (wait > 0) [lane(bars.lane[k]), start, wait].forEach((value, column) => waits[column].push(value));
        [lane(bars.lane[k]), start + wait, bars.length[k] - wait].forEach((value, column) => into[column].push(value));
      });
      const color = colorOf(kinds, op);
      if (told[0].length) traces.push(bar(op, color, ...told, {}));
      if (whole[0].length) traces.push(bar(`${op}, wait not known`, color, ...whole, { pattern: { shape: "/", size: 5, solidity: 0.35, fgcolor: color, bgcolor: "rgba(0,0,0,0)", fillmode: "overlay" }, opacity: 0.9 }));
    }
    if (waits[0].length) traces.unshift(bar("waiting", style("--wait"), ...waits, {}));
    draw("timeline", traces, layout(90 + 30 * Math.max(3, ranks.length), {
      barmode: "overlay", xaxis: axis("time (ms)", { rangemode: "tozero" }),
      yaxis: axis("", { autorange: "reversed", showgrid: false, type: "category", categoryorder: "array", categoryarray: ranks.map((_, place) => lane(place)) }),
    }));
  };
  const confidence = () => {
    const step = 1 / data.confidence.length;
    draw("confidence", [{ type: "bar", x: data.confidence.map((_, place) => (place + 0.5) * step), y: data.confidence, width: step * 0.92, marker: { color: palette[0] }, hovertemplate: "%{y} at about %{x:.3f}<extra></extra>" }],
      layout(280, { xaxis: axis("confidence of the match", { range: [0, 1], showgrid: false }), yaxis: axis("operations") }));
  };
  const clocks = () => {
    const { hosts, sigma, low, high } = data.clocks;
    const traces = [
      { type: "bar", orientation: "h", name: "plus and minus sigma", y: hosts, base: sigma.map((value) => -value), x: sigma.map((value) => 2 * value), width: 0.5, marker: { color: palette[5] }, hovertemplate: "%{y}: sigma %{customdata} µs<extra></extra>", customdata: sigma },
      { type: "scatter", mode: "lines+markers", name: "causality allows", line: { width: 1.5, color: style("--ink") }, marker: { symbol: "line-ns-open", size: 9, line: { width: 1.5, color: style("--ink") } },
        x: hosts.flatMap((_, k) => [low[k], high[k], null]), y: hosts.flatMap((host) => [host, host, null]), connectgaps: false, hovertemplate: "%{y}: %{x} µs<extra></extra>" }];
    draw("clocks", traces, layout(110 + 26 * Math.max(2, hosts.length), { xaxis: axis("host clock minus its estimate (µs)", { zeroline: true, zerolinecolor: style("--soft") }), yaxis: axis("", { type: "category", showgrid: false, autorange: "reversed" }) }));
  };
  const verdictColors = { matched: "#0072b2", unmatched: "#d55e00", "not covered": "#9aa4b0", "no kernel": "#56b4e9", pending: "#e69f00" };

  const drawAll = () => {
    mix("mix-operations", "operations", "operations", 1);
    mix("mix-bytes", "bytes", "message bytes (GB)", 1e9);
    if (data.sizes) sizes();
    if (data.bandwidth) bandwidth();
    if (data.iterations) {
      iterations("iteration-operations", "operations", "operations", 1);
      iterations("iteration-bytes", "bytes", "message bytes (GB)", 1e9);
    }
    if (data.traffic) traffic();
    if (data.timeline) timeline();
    if (data.on_off) timeMap("on-off", data.on_off, "on", "of the time in NCCL kernels");
    if (data.waits) timeMap("waits", data.waits, "wait", "waiting");
    if (data.confidence) confidence();
    if (data.clocks) clocks();
    if (data.volume) stacked("volume", data.volume.ops, data.volume.ranks, "message bytes (GB)", (op) => colorOf(ops, op), 1e9);
    if (data.alignment) stacked("alignment", data.alignment.verdicts, data.alignment.ranks, "operations", (name) => verdictColors[name], 1);
  };
  drawAll();
  dark.addEventListener("change", drawAll);
})();
