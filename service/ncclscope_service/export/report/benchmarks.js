"use strict";
(() => {
  const curves = JSON.parse(document.getElementById("data").textContent).benchmarks;
  const palette = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const power = (exponent) => `${2 ** (exponent % 10)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][Math.floor(exponent / 10)]}`;
  const draw = () => {
    const place = document.getElementById("benchmarks");
    if (!place) return;
    const axis = (title, more) => ({
      title: { text: title, standoff: 8, font: { size: 12 } }, automargin: true, type: "log", showline: true, ticks: "outside", ticklen: 4,
      linecolor: style("--soft"), tickcolor: style("--soft"), gridcolor: style("--rule"), zeroline: false, ...more,
    });
    /* A table has one colour, whichever of its two curves has points. */
    const tables = [...new Set(curves.map((curve) => `${curve.name} ${curve.file}`))];
    const traces = curves.map((curve) => ({
      type: "scatter", mode: "lines+markers", name: `${curve.name}, ${curve.place}`, x: curve.x, y: curve.y,
      line: { width: 1.6, dash: curve.place === "in place" ? "dot" : "solid", color: palette[tables.indexOf(`${curve.name} ${curve.file}`) % palette.length] },
      marker: { size: 5, symbol: curve.place === "in place" ? "circle-open" : "circle" },
      customdata: curve.x.map(() => curve.file), hovertemplate: "%{y:.4g} GB/s at %{x:,d} B<br>%{customdata}<extra>%{fullData.name}</extra>",
    }));
    const exponents = curves.flatMap((curve) => curve.x).map(Math.log2);
    const [low, high] = [exponents.reduce((a, b) => Math.min(a, b)), exponents.reduce((a, b) => Math.max(a, b))];
    const step = Math.max(1, Math.ceil((high - low) / 10));
    const ticks = [];
    for (let exponent = Math.ceil(low); exponent <= high; exponent += step) ticks.push(exponent);
    Plotly.react(place, traces, {
      height: 420 + 14 * Math.min(traces.length, 12), margin: { l: 60, r: 14, t: 8, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: style("--ink") }, showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
      xaxis: axis("message size", { tickvals: ticks.map((exponent) => 2 ** exponent), ticktext: ticks.map(power) }),
      yaxis: axis("bus bandwidth (GB/s)", { dtick: 1, tickformat: "~g", minor: { ticks: "outside", ticklen: 2 } }),
    }, { displayModeBar: false, responsive: true });
  };
  draw();
  dark.addEventListener("change", draw);
})();
