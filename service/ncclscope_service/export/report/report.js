"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  /* Okabe and Ito's colours: told apart by readers with colour-vision deficiency. A name has the same in every report. */
  const palette = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];
  const kindColors = { TP: "#0072b2", DP: "#d55e00", PP: "#009e73", EP: "#cc79a7", CP: "#56b4e9", EMBEDDING: "#e69f00", OPTIMIZER: "#8c6d31", WORLD: "#7f7f7f" };
  const opColors = { AllReduce: "#0072b2", AllGather: "#e69f00", ReduceScatter: "#d55e00", Broadcast: "#cc79a7", Send: "#009e73", Recv: "#56b4e9", SendRecv: "#009e73", AlltoAll: "#8c6d31", Reduce: "#7f7f7f", Gather: "#b5a642", Scatter: "#6a51a3" };
  const symbols = { AllReduce: "circle", AllGather: "square", ReduceScatter: "diamond", Broadcast: "cross", Send: "triangle-up", Recv: "triangle-down", AlltoAll: "star", Reduce: "pentagon" };
  const kindColor = (kind) => kindColors[kind] ?? "#a9b1bb";
  const opColor = (op) => opColors[op] ?? "#a9b1bb";
  const first = (names, order) => [...names].sort((a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99) || a.localeCompare(b));
  const parallelisms = first(new Set(data.mix.map((entry) => entry.parallelism)), Object.keys(kindColors));
  const ops = [...new Set(data.mix.map((entry) => entry.op))];
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
  const power = (exponent) => `${2 ** (exponent % 10)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][Math.floor(exponent / 10)]}`;
  /* Thin bars and many names: as many ticks as can be read. */
  const sparse = (names, most) => {
    const every = Math.ceil(names.length / most);
    return { tickmode: "array", tickvals: names.filter((_, place) => place % every === 0), tickangle: 0 };
  };
  const rowHeight = (rows) => (rows > 32 ? 8 : rows > 16 ? 14 : 22);
  const iterationAxis = (count, per) => axis("iteration", { showgrid: false, tickformat: "d", ...(count * per < 20 ? { dtick: 1 } : {}) });

  const mix = (id, field, title, scale) => {
    const known = data.mix.filter((entry) => entry[field] !== null);
    const shown = ops.filter((op) => known.some((entry) => entry.op === op)).reverse();
    const traces = parallelisms.map((kind) => ({
      type: "bar", orientation: "h", name: kind, y: shown, marker: { color: kindColor(kind) },
      x: shown.map((op) => known.filter((e) => e.op === op && e.parallelism === kind).reduce((sum, e) => sum + e[field] / scale, 0)),
    }));
    draw(id, traces, layout(90 + 30 * Math.max(2, shown.length), { barmode: "stack", xaxis: axis(title), yaxis: axis("", { showgrid: false }) }));
  };
  const sizes = () => {
    const names = first(Object.keys(data.sizes.ops), Object.keys(opColors));
    const bins = data.sizes.ops[names[0]].map((_, place) => power(place + data.sizes.low));
    const traces = names.map((op) => ({ type: "bar", name: op, x: bins, y: data.sizes.ops[op], marker: { color: opColor(op) }, hovertemplate: `%{y} ${op} from %{x}<extra></extra>` }));
    draw("sizes", traces, layout(300, { barmode: "stack", showlegend: true, bargap: bins.length < 6 ? 0.75 : 0.08, xaxis: axis("message size (lower bound of the bin)", { showgrid: false, type: "category", ...sparse(bins, 14) }), yaxis: axis("operations", { tickformat: ",d" }) }));
  };
  const sizeMap = () => {
    const order = Object.keys(kindColors).flatMap((kind) => Object.keys(opColors).map((op) => `${kind} ${op}`));
    const names = first(Object.keys(data.sizes.groups), order);
    const counts = names.map((name) => data.sizes.groups[name]);
    const bins = counts[0].map((_, place) => power(place + data.sizes.low));
    const short = (count) => (count === 0 ? "" : count < 10000 ? `${count}` : count < 1e6 ? `${Math.round(count / 1e3)}k` : `${Number((count / 1e6).toPrecision(2))}M`);
    draw("size-map", [{
      type: "heatmap", x: bins, y: names, z: counts.map((row) => row.map((count) => (count === 0 ? null : Math.log10(count)))), customdata: counts, xgap: 1, ygap: 1, hoverongaps: false,
      zmin: 0, zmax: Math.max(1, ...counts.flat().map((count) => Math.log10(Math.max(1, count)))), colorscale: scale(), showscale: false,
      text: counts.map((row) => row.map(short)), texttemplate: bins.length <= 30 ? "%{text}" : "", textfont: { size: 10 },
      hovertemplate: "%{y} from %{x}: %{customdata}<extra></extra>",
    }], layout(86 + 22 * Math.max(2, names.length), {
      xaxis: axis("message size (lower bound of the bin)", { showgrid: false, type: "category", ...sparse(bins, 14) }), yaxis: axis("", { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const bandwidth = () => {
    const { series, limits } = data.bandwidth;
    const all = series.flatMap((each) => each.x);
    const [low, high] = [all.reduce((a, b) => Math.min(a, b)) / 1.6, all.reduce((a, b) => Math.max(a, b)) * 1.6];
    const ordered = parallelisms.flatMap((kind) => series.filter((each) => each.parallelism === kind));
    const traces = ordered.map((each) => ({
      type: "scatter", mode: "markers", name: `${each.parallelism} ${each.op}`, x: each.x, y: each.y,
      marker: { size: 6, opacity: 0.8, color: kindColor(each.parallelism), symbol: symbols[each.op] ?? "x" },
      hovertemplate: "%{y:.4g} GB/s at %{x:.4s}B<extra>%{fullData.name}</extra>",
    }));
    /* Kinds that share a limit share its line. */
    const same = new Map();
    for (const [kind, limit] of Object.entries(limits)) same.set(limit, [...(same.get(limit) ?? []), kind]);
    const levels = [...same.keys()].sort((a, b) => a - b);
    const notes = levels.map((limit, place) => ({
      xref: "paper", x: place % 2 ? 0.5 : 0, xanchor: "left", yref: "y", y: Math.log10(limit), yanchor: "bottom", yshift: -2,
      text: `limit ${first(same.get(limit), parallelisms).join(", ")}: ${Number(limit.toPrecision(4))} GB/s`, showarrow: false, font: { size: 11, color: style("--soft") },
    }));
    const shapes = levels.map((limit) => ({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: limit, y1: limit, line: { dash: "dash", width: 1.3, color: same.get(limit).length === 1 ? kindColor(same.get(limit)[0]) : style("--soft") } }));
    const steps = high / low > 200 ? [1] : [1, 2, 3, 5];
    const ticks = [];
    for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent += 1) ticks.push(...steps.map((step) => step * 10 ** exponent));
    const shown = ticks.filter((size) => size >= low && size <= high);
    const rates = [...series.flatMap((each) => each.y), ...levels].filter((rate) => rate > 0);
    const [slow, fast] = [rates.reduce((a, b) => Math.min(a, b)), rates.reduce((a, b) => Math.max(a, b))];
    draw("bandwidth", traces, layout(420, {
      showlegend: true, shapes, annotations: notes,
      xaxis: axis("message size", { type: "log", tickvals: shown, ticktext: shown.map(bytes), range: [Math.log10(low), Math.log10(high)] }),
      yaxis: axis("bus bandwidth of the transfer (GB/s)", { type: "log", dtick: 1, tickformat: "~g", range: [Math.log10(slow / 1.6), Math.log10(fast * 2)], minor: { ticks: "outside", ticklen: 2 } }),
    }));
  };
  const stacked = (id, groups, names, title, colors, scale, more) => {
    const traces = first(Object.keys(groups), Object.keys(opColors)).map((name) => [name, groups[name]]).map(([name, values]) => ({
      type: "bar", name, x: names, y: values.map((value) => (value === null ? null : value / scale)), marker: { color: colors(name) }, hovertemplate: "%{y:.4~g}, rank %{x}<extra>%{fullData.name}</extra>",
    })).filter((trace) => trace.y.some((value) => value > 0));
    draw(id, traces, layout(280, { barmode: "stack", showlegend: true, bargap: names.length < 6 ? 0.75 : names.length > 32 ? 0.1 : 0.25, xaxis: axis("rank", { type: "category", showgrid: false, ...sparse(names, id === "alignment" ? 12 : 24) }), yaxis: axis(title), ...more }));
  };
  const partNames = { exposed: "exposed communication", hidden: "hidden communication", communication: "communication (hidden or not: not recorded)", other: "no NCCL kernel", unknown: "kernels not recorded" };
  const partColors = { exposed: "#d55e00", hidden: "#56b4e9", communication: "#0072b2" };
  const partColor = (part) => partColors[part] ?? style(part === "other" ? "--wait" : "--faint");
  const iterationLengths = () => {
    const { first: begin, per_bin: per, lengths } = data.steps;
    const traces = Object.entries(lengths).map(([part, values]) => ({
      type: "bar", name: partNames[part], x: values.map((_, place) => begin + place * per), y: values, marker: { color: partColor(part), ...(part === "unknown" ? { pattern: { shape: "/", size: 6, solidity: 0.25, fgcolor: style("--faint"), bgcolor: "rgba(0,0,0,0)", fillmode: "overlay" }, opacity: 0.8 } : {}) },
      hovertemplate: "%{y:.4~g} ms, iteration %{x}<extra>%{fullData.name}</extra>",
    }));
    if (!traces.length) return missing("iteration-lengths");
    const count = traces[0].x.length;
    return draw("iteration-lengths", traces, layout(270, { barmode: "stack", showlegend: true, bargap: count > 60 ? 0 : 0.15, xaxis: iterationAxis(count, per), yaxis: axis("length (ms)", { rangemode: "tozero" }) }));
  };
  const rankShares = () => {
    const groups = Object.fromEntries(Object.entries(data.steps.shares).map(([part, values]) => [partNames[part], values]));
    const colors = Object.fromEntries(Object.keys(data.steps.shares).map((part) => [partNames[part], partColor(part)]));
    if (!Object.keys(groups).some((name) => name !== partNames.unknown)) return missing("rank-shares");
    return stacked("rank-shares", groups, data.steps.ranks, "share of the time", (name) => colors[name], 1, { yaxis: axis("share of the time", { tickformat: ".0%", range: [0, 1] }) });
  };
  const rankOperations = () => {
    const { first: begin, per_bin: per, ranks, operations } = data.steps;
    const numbers = operations[0].map((_, place) => begin + place * per);
    const known = operations.flat().filter((value) => value !== null);
    const [least, most] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
    const text = ranks.length <= 16 && numbers.length <= 16;
    draw("rank-operations", [{
      type: "heatmap", x: numbers, y: ranks.map((name) => `rank ${name}`), z: operations, zmin: least === most ? 0 : least, zmax: most, hoverongaps: false, colorscale: scale(), xgap: numbers.length < 64 ? 1 : 0, ygap: ranks.length < 64 ? 1 : 0,
      colorbar: { title: { text: "operations", side: "top" }, thickness: 12, len: 1, outlinewidth: 0, tickformat: ",~d", nticks: 5 }, showscale: !text, texttemplate: text ? "%{z:.4~g}" : "", textfont: { size: 11 },
      hovertemplate: "%{y}, iteration %{x}: %{z} operations<extra></extra>",
    }], layout(96 + rowHeight(ranks.length) * Math.max(3, ranks.length), {
      xaxis: iterationAxis(numbers.length, per), yaxis: axis("", { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const activity = () => {
    const { ms_per_bin: width, length_ms: length, kinds } = data.activity;
    const names = first(Object.keys(kinds), Object.keys(kindColors));
    const room = 1 / names.length;
    const traces = [];
    const axes = {};
    names.forEach((kind, place) => {
      const suffix = place === 0 ? "" : `${place + 1}`;
      const x = kinds[kind].map((_, bin) => (bin + 0.5) * width);
      traces.push({ type: "scatter", mode: "lines", name: kind, x, y: kinds[kind], yaxis: `y${suffix}`, fill: "tozeroy", line: { width: 1, color: kindColor(kind), shape: "hvh" }, fillcolor: `${kindColor(kind)}88`, hovertemplate: `%{x:.4~g} ms: %{y:.1%} of the ranks<extra>${kind}</extra>` });
      const top = Math.max(...kinds[kind]);
      axes[`yaxis${suffix}`] = axis(kind, { domain: [1 - (place + 0.84) * room, 1 - place * room], rangemode: "tozero", range: [0, top > 0.2 ? 1 : top * 1.15], tickformat: top > 0.05 ? ".0%" : ".1~%", nticks: 3 });
    });
    const end = { type: "line", x0: length, x1: length, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", width: 1.2, color: style("--soft") } };
    draw("activity", traces, layout(60 + 84 * names.length, { showlegend: false, shapes: [end], xaxis: axis("time since the iteration's first call (ms)", { anchor: `y${names.length === 1 ? "" : names.length}`, rangemode: "tozero" }), ...axes }));
  };
  const kindWaits = () => {
    const { kinds, ranks, share } = data.kind_waits;
    const shown = first(kinds, Object.keys(kindColors));
    const values = ranks.map((_, row) => shown.map((kind) => share[row][kinds.indexOf(kind)]));
    const text = ranks.length <= 32;
    draw("kind-waits", [{
      type: "heatmap", x: shown, y: ranks.map((name) => `rank ${name}`), z: values, zmin: 0, zmax: 1, hoverongaps: false, colorscale: scale(), xgap: 1, ygap: ranks.length < 64 ? 1 : 0,
      colorbar: { title: { text: "wait", side: "top" }, tickformat: ".0%", thickness: 12, len: 1, outlinewidth: 0 }, texttemplate: text ? "%{z:.0%}" : "", textfont: { size: 11 },
      hovertemplate: "%{y}, %{x}: %{z:.1%} waiting<extra></extra>",
    }], layout(Math.min(900, 96 + rowHeight(ranks.length) * Math.max(3, ranks.length)), {
      xaxis: axis("kind of communicator", { showgrid: false, type: "category" }), yaxis: axis("", { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const timeMap = (id, map, title, what) => {
    const byTime = map.seconds_per_bin !== undefined;
    const columns = map.share[0].map((_, place) => (byTime ? (place + 0.5) * map.seconds_per_bin : map.first + place * map.per_bin));
    draw(id, [{
      type: "heatmap", x: columns, y: map.ranks.map((name) => `rank ${name}`), z: map.share, zmin: 0, zmax: 1, hoverongaps: false,
      colorscale: scale(), colorbar: { title: { text: title, side: "top" }, tickformat: ".0%", thickness: 12, len: 1, outlinewidth: 0 },
      hovertemplate: `%{y}, ${byTime ? "%{x:.3f} s" : "iteration %{x}"}: %{z:.0%} ${what}<extra></extra>`,
    }], layout(Math.min(900, 96 + rowHeight(map.ranks.length) * Math.max(3, map.ranks.length)), {
      xaxis: byTime ? axis("time since the first kernel (s)", { showgrid: false }) : iterationAxis(columns.length, map.per_bin), yaxis: axis("", { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const iterations = (id, field, title, unit) => {
    const { first: begin, per_bin, ops: found } = data.iterations;
    const traces = first(Object.keys(found), Object.keys(opColors)).map((op) => [op, found[op]]).map(([op, sums]) => ({
      type: "bar", name: op, x: sums[field].map((_, place) => begin + place * per_bin), y: sums[field].map((value) => value / unit), marker: { color: opColor(op) },
    })).filter((trace) => trace.y.some((value) => value > 0));
    const count = traces.length ? traces[0].x.length : 0;
    draw(id, traces, layout(280, { barmode: "stack", showlegend: true, bargap: count > 60 ? 0 : 0.15, xaxis: iterationAxis(count, per_bin), yaxis: axis(title) }));
  };
  /* Bytes by sender and receiver; `like`: all amounts whose colours are the same. */
  const square = (id, { senders, receivers, hosts, what, amounts, like }) => {
    const known = like.flat().filter((value) => value > 0).map(Math.log10);
    if (!known.length) return missing(id);
    const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
    const least = Math.max(low, high - 4);  /* what a scalar moves is no shade of what tensors do */
    const ticks = high - low < 0.1 ? [high] : high - low < 1 ? [low, high] : Array.from({ length: Math.floor(high) - Math.ceil(least) + 1 }, (_, place) => Math.ceil(least) + place);
    const edges = what === "rank" ? hosts.flatMap((host, place) => (place > 0 && host !== hosts[place - 1] ? [place - 0.5] : [])) : [];
    const line = { color: style("--faint"), width: 1 };
    const n = senders.length;
    const side = Math.max(320, Math.min(640, 120 + 26 * n));
    return draw(id, [{
      type: "heatmap", x: receivers, y: senders, z: amounts.map((row) => row.map((value) => (value ? Math.log10(value) : null))),
      customdata: amounts.map((row) => row.map((value) => (value ? bytes(value) : ""))), hoverongaps: false, xgap: n < 64 ? 1 : 0, ygap: n < 64 ? 1 : 0,
      zmin: high - least < 0.5 ? least - 1 : least, zmax: high, colorscale: scale(), colorbar: { title: { text: "bytes", side: "top" }, tickvals: ticks, ticktext: ticks.map((exponent, place) => `${place === 0 && least > low ? "≤ " : ""}${bytes(10 ** exponent)}`), thickness: 12, len: 1, outlinewidth: 0 },
      hovertemplate: "%{y} to %{x}: %{customdata}<extra></extra>",
    }], layout(side, {
      width: Math.min(document.getElementById(id).clientWidth, side + 60 * (1 + receivers.length / n)), shapes: edges.flatMap((at) => [
        { type: "line", x0: at, x1: at, y0: -0.5, y1: n - 0.5, line }, { type: "line", y0: at, y1: at, x0: -0.5, x1: receivers.length - 0.5, line }]),
      xaxis: axis(`receiving ${what}`, { showgrid: false, type: "category", tickangle: n > 12 ? -90 : 0 }),
      yaxis: axis(`sending ${what}`, { autorange: "reversed", showgrid: false, type: "category" }),
    }));
  };
  const traffic = () => square("traffic", { ...data.traffic, amounts: data.traffic.bytes, like: data.traffic.bytes });
  const planMaps = () => data.plan_maps.forEach(({ what, places, expected, observed }, at) => {
    const shown = { senders: places, receivers: places, hosts: [], what, like: [...expected, ...(observed ?? [])] };
    square(`plan-expected-${at}`, { ...shown, amounts: expected });
    if (observed) square(`plan-observed-${at}`, { ...shown, amounts: observed });
    else missing(`plan-observed-${at}`);
  });
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
      const color = opColor(op);
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
  const missing = (id) => {
    const place = document.getElementById(id);
    place.className = "missing";
    place.textContent = "not recorded";
  };
  const compare = () => {
    const { names, busbw, lengths } = data.compare;
    if (busbw) {
      const found = [...busbw.values[0], ...busbw.values[1]].filter((value) => value > 0);
      const range = [Math.log10(found.reduce((a, b) => Math.min(a, b)) / 1.5), Math.log10(found.reduce((a, b) => Math.max(a, b)) * 1.5)];
      const link = { type: "scatter", mode: "lines", showlegend: false, hoverinfo: "skip", line: { width: 3, color: style("--rule") }, x: busbw.keys.flatMap((_, k) => [busbw.values[0][k], busbw.values[1][k], null]), y: busbw.keys.flatMap((key) => [key, key, null]) };
      const traces = [1, 0].map((side) => ({
        type: "scatter", mode: "markers", name: names[side], x: busbw.values[side], y: busbw.keys, marker: { color: palette[side], size: 9, symbol: side ? "circle-open" : "circle", line: { width: side ? 2 : 0, color: palette[side] } },
        error_x: { type: "data", array: busbw.noise[side].map((noise) => (noise === null ? 0 : 3 * noise)), thickness: 1, width: 3, color: palette[side] },
        hovertemplate: "%{y}: %{x:.4g} GB/s<extra>%{fullData.name}</extra>",
      }));
      draw("compare-busbw", [link, ...traces], layout(100 + 26 * Math.max(3, busbw.keys.length), { showlegend: true, legend: { orientation: "h", traceorder: "reversed", y: 1.02, yanchor: "bottom", x: 0 }, xaxis: axis("median busbw of the transfer (GB/s)", { type: "log", range, dtick: 1, tickformat: "~g", minor: { ticks: "outside", ticklen: 2 } }), yaxis: axis("", { type: "category", autorange: "reversed" }) }));
    } else missing("compare-busbw");
    if (lengths) {
      const longest = Math.max(...lengths.map((side) => side.length));
      const traces = names.map((name, side) => ({ type: "scatter", mode: longest < 200 ? "lines+markers" : "lines", name, x: lengths[side].map((_, k) => k), y: lengths[side], line: { color: palette[side], width: 1.4 }, marker: { size: 6, symbol: side ? "circle-open" : "circle" } }));
      draw("compare-iterations", traces, layout(280, { showlegend: true, xaxis: axis("iteration since the first", { tickformat: "d", ...(longest < 20 ? { dtick: 1 } : {}) }), yaxis: axis("length (ms)", { rangemode: "tozero" }) }));
    } else missing("compare-iterations");
  };
  const verdictColors = { matched: "#0072b2", unmatched: "#d55e00", "not covered": "#9aa4b0", "no kernel": "#56b4e9", pending: "#e69f00" };

  const drawAll = () => {
    mix("mix-operations", "operations", "operations", 1);
    mix("mix-bytes", "bytes", "message bytes (GB)", 1e9);
    if (data.sizes) { sizes(); sizeMap(); }
    if (data.steps) { iterationLengths(); rankShares(); rankOperations(); }
    if (data.activity) activity();
    if (data.bandwidth) bandwidth();
    if (data.iterations) {
      iterations("iteration-operations", "operations", "operations", 1);
      iterations("iteration-bytes", "bytes", "message bytes (GB)", 1e9);
    }
    if (data.traffic) traffic();
    if (data.plan_maps) planMaps();
    if (data.timeline) timeline();
    if (data.on_off) timeMap("on-off", data.on_off, "on", "of the time in NCCL kernels");
    if (data.kind_waits) kindWaits();
    if (data.waits) timeMap("waits", data.waits, "wait", "waiting");
    if (data.confidence) confidence();
    if (data.clocks) clocks();
    if (data.compare) compare();
    if (data.volume) stacked("volume", data.volume.ops, data.volume.ranks, "message bytes (GB)", opColor, 1e9);
    if (data.alignment) stacked("alignment", data.alignment.verdicts, data.alignment.ranks, "operations", (name) => verdictColors[name], 1);
  };
  for (const part of document.querySelectorAll(".mix i")) {
    part.style.background = opColor(part.dataset.op);
    part.title = part.dataset.op;
  }
  drawAll();
  dark.addEventListener("change", drawAll);
})();
