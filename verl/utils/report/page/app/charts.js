// The curves: a chart a metric, runs over one another, validation as rings, alerts as marks.

const SMOOTH_FROM = 24; // steps; fewer points are clearer as they are
const RING = 8; // px
let charts = [];

function seriesOf(run, metric) {
  const column = data.runs[run].columns[metric];
  if (!column) return [];
  return data.runs[run].steps.map((step, i) => [step, column[i]]).filter((point) => point[1] !== null);
}

// Centred moving mean over about a tenth of the run; the window shrinks at the ends.
function smooth(points) {
  const half = Math.max(1, Math.floor(points.length / 20));
  return points.map(([step], i) => {
    const near = points.slice(Math.max(0, i - half), i + half + 1);
    return [step, near.reduce((sum, point) => sum + point[1], 0) / near.length];
  });
}

function tooltip(rows) {
  if (!rows.length) return null;
  const step = rows[0].value[0];
  return h("div", { class: "num" }, h("div", { class: "faint" }, `step ${step}`,
    IS_TOUCH && data.count ? [" · ", h("a", { href: episodesAt(step) }, "its episodes")] : null),
    rows.map((row) => h("div", null,
      h("span", { class: "dot", style: { background: row.color, border: `2px solid ${row.borderColor ?? row.color}` } }), `${row.seriesName}  `, h("b", null, short(row.value[1])))));
}

const episodesAt = (step) => `#/episodes?from=${step}&to=${step}`;

function axes(log, lowest) {
  const faint = css("--faint");
  const line = { lineStyle: { color: css("--line") } };
  const common = { axisLabel: { color: faint, fontSize: 11, hideOverlap: true }, splitLine: { show: false } };
  return {
    backgroundColor: "transparent",
    animation: false,
    grid: { left: 4, right: 14, top: 14, bottom: 4, outerBoundsMode: "same", outerBoundsContain: "all" },
    xAxis: {
      type: "value", min: "dataMin", max: "dataMax", minInterval: 1, axisLine: { ...line, onZero: false }, axisTick: { show: false }, ...common,
      name: "step", nameLocation: "middle", nameGap: 26, nameTextStyle: { color: faint, fontSize: 11 },
      axisLabel: { ...common.axisLabel, margin: 10 }, // room for a ring in the corner
    },
    yAxis: {
      type: log ? "log" : "value", scale: true, splitNumber: 4, ...common, axisLine: { show: false }, axisTick: { show: false }, splitLine: line, min: log ? lowest : undefined,
      axisLabel: { ...common.axisLabel, margin: 12, formatter: tick, showMinLabel: log ? false : undefined },
    },
    tooltip: {
      trigger: "axis", confine: true, enterable: IS_TOUCH, backgroundColor: css("--card"), borderColor: css("--line"), padding: [6, 10],
      textStyle: { color: css("--ink"), fontSize: 12 }, axisPointer: { lineStyle: { color: faint } },
      formatter: (rows) => tooltip(rows.filter((row) => row.seriesName)) || "",
    },
  };
}

function linesOf(panel, log) {
  const series = [];
  data.runs.forEach((run, number) => {
    const color = colourOf(number);
    const points = seriesOf(number, panel.metric).filter((point) => !log || point[1] > 0);
    const smoothed = points.length >= SMOOTH_FROM;
    const alerts = data.alerts.filter((alert) => alert.run === number && alert.metric === panel.metric);
    const base = { type: "line", color, symbol: "none", emphasis: { disabled: true } };
    if (smoothed) series.push({ ...base, name: "", data: points, lineStyle: { width: 1, opacity: 0.3 }, silent: true });
    series.push({
      ...base, name: run.name, data: smoothed ? smooth(points) : points, lineStyle: { width: 2 },
      symbol: points.length === 1 ? "circle" : "none", symbolSize: 6,
      markPoint: {
        symbol: "triangle", symbolSize: 9, symbolOffset: [0, -9], label: { show: false }, itemStyle: { color: css("--bad") },
        data: alerts.filter((alert) => alert.value !== null).map((alert) => ({ coord: [alert.step, alert.value] })),
      },
      markLine: {
        silent: true, symbol: "none", label: { show: false }, lineStyle: { color: css("--bad"), type: "dashed", opacity: 0.6 },
        data: [...new Set(alerts.map((alert) => alert.threshold))].filter((y) => y !== null).map((y) => ({ yAxis: y })),
      },
    });
    const rings = panel.validation ? seriesOf(number, panel.validation) : [];
    if (rings.length) {
      series.push({
        type: "line", name: `${run.name}, validation`, data: rings, color, symbol: "circle", symbolSize: RING, showAllSymbol: true,
        lineStyle: { width: 0 }, itemStyle: { color: css("--card"), borderColor: color, borderWidth: 2 }, z: 5,
      });
    }
  });
  return series;
}

function draw(box, option) {
  const chart = echarts.init(box, null, { renderer: "canvas" });
  chart.setOption(option);
  charts.push(chart);
  chart.getZr().on("dblclick", (event) => {
    const step = Math.round(chart.convertFromPixel({ xAxisIndex: 0 }, event.offsetX));
    location.hash = episodesAt(step);
  });
  return chart;
}

// What the line and the rings of a chart are, where it has both.
function key(series) {
  const hasRings = series.some((one) => one.symbolSize === RING);
  return hasRings ? h("span", { class: "key" }, h("i"), "training", h("b"), "validation") : null;
}

function panelCard(panel) {
  const values = data.runs.flatMap((_, run) => seriesOf(run, panel.metric).map((point) => point[1]));
  const positive = values.filter((value) => value > 0);
  const log = panel.log && positive.length > 0 && Math.max(...positive) > 10 * Math.min(...positive);
  const series = linesOf(panel, log);
  const drawn = series.some((one) => one.data.length);
  const box = h("div", { class: drawn ? "plot" : "missing" }, drawn ? null : "not logged");
  const about = panel.about + (log ? (panel.about ? "; " : "") + "logarithmic" : "");
  const card = h("section", { class: "card chart", "data-metric": panel.metric },
    h("h3", null, panel.title, drawn ? key(series) : null), h("p", { class: "faint" }, about), box);
  if (drawn) queueMicrotask(() => draw(box, { ...axes(log, log ? Math.min(...positive) : undefined), series }));
  return card;
}

const PHASE_COLOURS = ["#2f6db5", "#7fb2dd", "#d9662b", "#f2b48a", "#a9b0ba"];

function timeCard(run, number) {
  const { steps, seconds } = run.phases;
  if (!steps.length) return null;
  const names = Object.keys(seconds);
  const box = h("div", { class: "plot" });
  const series = names.map((name, i) => ({
    type: "line", stack: "time", name, data: steps.map((step, at) => [step, seconds[name][at]]), color: PHASE_COLOURS[i],
    symbol: steps.length === 1 ? "circle" : "none", lineStyle: { width: 0 }, areaStyle: { opacity: 0.85 }, emphasis: { disabled: true },
  }));
  const option = axes(false);
  option.yAxis.scale = false;
  queueMicrotask(() => draw(box, { ...option, series }));
  const whose = data.runs.length > 1 ? [" · ", runDot(number), run.name] : [];
  return h("section", { class: "card chart wide" }, h("h3", null, "Where the time went", whose),
    h("p", { class: "faint" }, "seconds of each step"),
    h("div", { class: "runs faint" }, names.map((name, i) => h("span", null, h("span", { class: "dot", style: { background: PHASE_COLOURS[i] } }), name))), box);
}

// Any metric that was logged, chosen by its name.
function anyMetricCard() {
  const shown = new Set(data.panels.flatMap((panel) => [panel.metric, panel.validation]));
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.columns)))].filter((name) => !shown.has(name)).sort();
  if (!names.length) return null;
  const place = h("div");
  const show = (name) => place.replaceChildren(panelCard({ title: name, metric: name, about: "" }));
  const preferred = ["reward/phi", "critic/advantages/max"].find((name) => names.includes(name)) || names[0];
  const choice = select(names.map((name) => [name, name]), preferred, show, { "aria-label": "Metric" });
  show(preferred);
  place.firstChild.classList.remove("card");
  return h("div", null, h("h2", null, `All else that was logged (${names.length})`), choice, h("div", { style: { marginTop: "10px" } }, place));
}

function forgetCharts() {
  for (const chart of charts) chart.dispose();
  charts = [];
}
window.addEventListener("resize", () => charts.forEach((chart) => chart.resize()));

const MEASURES = [["F1", "val/f1/mean", "reward/f1"], ["Score", "val/score/mean", "critic/score/mean"],
  ["Searches", "val/search_depth/mean", "behavior/search_depth"]];

// Which of a measure's two metrics, validation's and training's, tells of all runs how it went: with two points or more
// of each run, else with one of each, else of some run. What is shown together is of one kind.
function kindOf([, ...metrics]) {
  const lengths = metrics.map((metric) => data.runs.map((_, run) => seriesOf(run, metric).length));
  const least = lengths.map((some) => Math.min(...some, 2));
  const kind = least[0] === Math.max(...least) && Math.max(...lengths[0]) ? 0 : 1;
  return { metric: metrics[kind], name: kind ? "training" : "validation" };
}

function change(number, metric) {
  const points = seriesOf(number, metric);
  if (points.length > 1) return `${short(round2(points[0][1]))} → ${short(round2(points.at(-1)[1]))}`;
  return points.length ? short(round2(points[0][1])) : "–";
}
const round2 = (value) => Math.round(value * 100) / 100;

function curvesPage() {
  const first = data.runs[0];
  const one = data.runs.length === 1;
  const tile = (label, value) => h("div", { class: "card tile" }, h("span", { class: "faint" }, label), h("b", null, value));
  const alertPanels = [...new Set(data.alerts.map((alert) => alert.metric))]
    .filter((metric) => !data.panels.some((panel) => panel.metric === metric))
    .map((metric) => ({ title: metric, metric, about: "" }));
  return h("div", null,
    h("h1", null, one ? first.name : `${data.runs.length} runs`),
    h("div", { class: "runs" },
      one ? null : data.runs.map((run, number) => h("span", null, runDot(number), run.name)),
      data.alerts.length ? h("span", null, h("span", { class: "bad" }, "▲"), " alert") : null,
      data.count ? h("span", { class: "faint" }, IS_TOUCH ? "tap a step in a chart for its episodes" : "double-click a step to see its episodes") : null),
    noticeBox(),
    one ? h("div", { class: "tiles" },
      MEASURES.map((measure) => tile(`${measure[0]}, ${kindOf(measure).name}`, change(0, kindOf(measure).metric))),
      tile("Steps", first.steps.length ? String(first.steps.at(-1)) : "–"),
      tile("Episodes", data.count.toLocaleString("en")),
      tile("Alerts", String(data.alerts.length))) : runTable(),
    h("div", { class: "charts" }, [...data.panels, ...alertPanels].map(panelCard), data.runs.map(timeCard)),
    alertList(), anyMetricCard(), configSection());
}

function runTable() {
  const columns = MEASURES.map((measure) => ({ title: measure[0], ...kindOf(measure) }));
  const alerts = (number) => data.alerts.filter((alert) => alert.run === number).length;
  return h("div", { class: "card scroll", style: { margin: "20px 0" } }, h("table", { class: "diff num" },
    h("tr", null, ["Run", "Steps", ...columns.map((column) => `${column.title}, ${column.name}`), "Alerts"].map((name) => h("th", null, name))),
    data.runs.map((run, number) => h("tr", null, h("td", null, runDot(number), run.name),
      h("td", null, String(run.steps.at(-1) ?? "–")),
      columns.map(({ metric }) => h("td", null, change(number, metric))), h("td", null, String(alerts(number)))))));
}

function noticeBox() {
  return [
    data.notes.length ? h("div", { class: "notice" }, `So that this file stays small: ${data.notes.join("; ")}. --max-mb keeps more.`) : null,
    data.problems.length ? h("details", { class: "notice problems" },
      h("summary", null, `${plural(data.problems.length, "problem")} with the run's files`),
      h("ul", null, data.problems.map((problem) => h("li", null, problem)))) : null,
  ];
}

function alertList() {
  if (!data.alerts.length) return null;
  const line = (alert) => h("div", { class: "alert" },
    h("span", null, data.runs.length > 1 ? runDot(alert.run) : null, alert.message || `step ${alert.step}: ${alert.metric} is ${short(alert.value)}`),
    alert.episodes.slice(0, 3).map((number) => h("a", { href: `#/episode/${number}` }, `episode ${number + 1}`)),
    alert.episodes.length ? h("a", { href: `#/episodes?run=${alert.run}&from=${alert.step}&to=${alert.step}&alert=${encodeURIComponent(alert.metric)}` },
      `all ${alert.episodes.length}`) : null);
  const most = 20;
  const box = h("div", { class: "card" }, data.alerts.slice(-most).reverse().map(line));
  const rest = data.alerts.slice(0, -most).reverse();
  return h("div", null, h("h2", null, `Alerts (${data.alerts.length})`), box,
    rest.length ? h("button", { class: "button", type: "button", style: { marginTop: "10px" }, onclick: (event) => { box.append(...rest.map(line)); event.target.remove(); } },
      `${plural(rest.length, "earlier one")}`) : null);
}

function configSection() {
  const differing = data.configDiff;
  const texts = data.runs.filter((run) => run.config);
  if (!texts.length) return null;
  return h("div", null, h("h2", null, "Configuration"),
    differing.length ? h("div", { class: "card scroll" }, h("table", { class: "diff" },
      h("tr", null, h("th", null, "differs in"), data.runs.map((run, number) => h("th", null, runDot(number), run.name))),
      differing.map(([key, values]) => h("tr", null, h("td", { class: "mono" }, key), values.map((value) => h("td", { class: "mono" }, value)))))) : null,
    texts.map((run) => h("details", { style: { marginTop: "10px" } }, h("summary", null, `Configuration of ${run.name}`), h("pre", null, run.config))));
}
