// The page of runs. It shows what is in the element #data, or what a server says where that names a source.
// Text of others (names, messages, values of a config) becomes text of the page, never HTML.
(() => {
"use strict";
// Told apart by those who see no red or green as well (Okabe and Ito's).
const SCHEMES = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8f98", "#8a6d00"],
  dark: ["#4aa3e0", "#f0b43c", "#2fc99b", "#e394c0", "#9fd3f5", "#ff8a4a", "#9aa3ad", "#d6c14a"],
};
const dark = matchMedia("(prefers-color-scheme: dark)");
let COLOURS, PHASES;
function chooseColours() {
  COLOURS = SCHEMES[dark.matches ? "dark" : "light"];
  const [blue, orange, green, pink, sky, red, grey] = COLOURS;
  PHASES = {"start": grey, "roll call": pink, "compile": orange, "train": blue, "validate": green, "save": sky, "restart": red};
}
chooseColours();
const MARKS = {restart: "restart", stall: "stall", preempt: "asked to stop", end: "end", resume: "started again"};
const page = document.getElementById("page");
const given = JSON.parse(document.getElementById("data").textContent);
const state = {smooth: 0, log: false, filter: "", charts: [], data: null};

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter(each => each !== null && each !== undefined));
  return made;
}
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Numbers as they are told

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return String(+value.toPrecision(4));
}
function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) { if (count < 1000) break; count /= 1000; unit = larger; }
  return `${unit === "B" ? count : count.toPrecision(3)} ${unit}`;
}
function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
function clock(at, withDay) {
  const date = new Date(at * 1000), time = date.toLocaleTimeString([], {hour12: false});
  return withDay ? `${date.toLocaleDateString([], {day: "numeric", month: "short"})} ${time}` : time;
}

// The head: how it went, at a glance

function heading(data) {
  const many = data.runs.length > 1;
  const title = many ? `${data.runs.length} runs` : data.runs[0].name;
  const parts = [el("h1", {}, title)];
  data.runs.forEach((run, at) => {
    if (many) parts.push(el("h3", {}, swatch(COLOURS[at % COLOURS.length]), run.name));
    parts.push(el("p", {class: "verdict"}, el("span", {class: `badge ${run.verdict.kind}`}, run.status),
                  el("span", {}, run.verdict.text)));
    if (run.findings.length)
      parts.push(el("ul", {class: "findings"}, run.findings.map(each =>
        el("li", {class: each.kind}, el("span", {}, each.text)))));
    parts.push(el("dl", {class: "facts"}, run.facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  });
  return el("section", {id: "head"}, parts);
}
const swatch = colour => el("i", {class: "swatch", style: {background: colour}});

function failures(data) {
  const found = data.runs.flatMap(run => run.failures.map(each => [run, each]));
  if (!found.length) return null;
  return el("section", {id: "failures"}, el("h2", {}, "Failures"), found.map(([run, each]) =>
    el("div", {class: `failure ${each.restarted ? "restarted" : ""}`},
      el("div", {}, each.headline),
      el("small", {}, [data.runs.length > 1 ? run.name : "", each.at ? clock(each.at, true) : "",
                       each.restarted ? "the run was restarted from its newest checkpoint" : "the run ended"]
                       .filter(Boolean).join(" · ")),
      each.traceback ? el("details", {open: !each.restarted}, el("summary", {}, "traceback"), el("pre", {}, each.traceback)) : null)));
}

// Charts

function curvesOf(chart, data) {
  const many = data.runs.length > 1;
  const sets = [...new Set(chart.names)];
  return data.runs.flatMap((run, at) => sets.filter(name => Object.hasOwn(run.series, name)).map(name => ({
    label: many ? (sets.length > 1 ? `${run.name} ${name}` : run.name) : name,
    series: run.series[name],
    colour: COLOURS[(many ? at : sets.indexOf(name)) % COLOURS.length],
    dashed: many && sets.indexOf(name) > 0,
  })));
}
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;  // of what came before, less and less of it: the beginning is not drawn towards zero
  return values.map(value => { mean = weight * mean + (1 - weight) * value; total = weight * total + 1 - weight; return mean / total; });
}
function aligned(curves) {
  const lists = curves.map(({series}) => {
    const columns = [series.x, smoothed(series.y, state.smooth)];
    if (state.smooth) columns.push(series.y);
    if (series.low) columns.push(series.low, series.high);
    return columns;
  });
  return uPlot.join(lists);
}
function build(chart, data, into) {
  const curves = curvesOf(chart, data);
  if (!curves.length) return null;
  const series = [{}], bands = [], shown = [];
  for (const {series: points, colour, dashed} of curves) {
    const dots = points.x.length < 40;
    shown.push(series.length);
    series.push({stroke: colour, width: 1.75, spanGaps: true, dash: dashed ? [6, 4] : undefined,
                 points: {show: dots, size: 5, fill: colour}});
    if (state.smooth) series.push({stroke: colour + "44", width: 1, spanGaps: true, points: {show: false}});
    if (points.low) {
      bands.push({series: [series.length + 1, series.length], fill: colour + "22"});
      series.push({stroke: colour + "00", spanGaps: true, points: {show: false}}, {stroke: colour + "00", spanGaps: true, points: {show: false}});
    }
  }
  const values = curves.map(() => el("b"));
  const key = el("div", {class: "key"}, el("span", {}, "step\u00a0", el("b")), curves.map((each, at) => el("span", {},
    each.dashed ? el("i", {class: "dash", style: {borderColor: each.colour}}) : swatch(each.colour), each.label, "\u00a0", values[at],
    each.series.bad_count ? el("span", {class: "bad"}, ` ${each.series.bad_count} not finite`) : null)));
  const step = key.querySelector("b");
  const positive = curves.every(({series: points}) => (points.low || points.y).every(value => value > 0));
  const axis = {stroke: css("--soft"), grid: {stroke: css("--grid"), width: 1}, ticks: {show: false}, font: "11px system-ui"};
  const bad = curves.flatMap(each => (each.series.bad || []).map(at => [at, each.colour]));
  function told(plot) {
    const at = plot.cursor.idx;
    const last = index => { for (let i = plot.data[0].length - 1; i >= 0; i--) if (plot.data[index][i] != null) return i; return null; };
    step.textContent = short(at == null ? plot.data[0].at(-1) : plot.data[0][at]);
    shown.forEach((index, which) => {
      let place = at == null ? last(index) : at;
      while (at != null && place > 0 && plot.data[index][place] == null) place--;  // the newest before
      values[which].textContent = place == null ? "–" : short(plot.data[index][place]);
    });
  }
  const plot = new uPlot({
    width: Math.max(into.clientWidth, 100), height: into.clientHeight || 200,
    series, bands, legend: {show: false},
    scales: {x: {time: false}, y: {distr: state.log && positive ? 3 : 1}},
    axes: [{...axis, size: 28, values: (_, all) => all.map(short)}, {...axis, size: 52, values: (_, all) => all.map(value => value == null ? "" : short(value))}],
    cursor: {sync: {key: "steps"}, points: {size: 6}, drag: {x: true, y: false}, y: false},
    padding: [8, 18, 0, 0],
    hooks: {setCursor: [told], setData: [told], ready: [told], draw: [plot => {
      for (const [at, colour] of bad) {  // where it was no number
        const x = plot.valToPos(at, "x", true);
        plot.ctx.fillStyle = colour;
        plot.ctx.fillRect(x - 1, plot.bbox.top + plot.bbox.height - 8, 3, 8);
      }
    }]},
  }, aligned(curves), into);
  return {plot, key, into, shape: JSON.stringify(series.length), update: fresh => plot.setData(aligned(curvesOf(chart, fresh)))};
}
const seen = new IntersectionObserver(entries => entries.forEach(entry => {
  if (!entry.isIntersecting) return;
  seen.unobserve(entry.target);
  entry.target.draw();
}), {rootMargin: "400px"});
const resized = new ResizeObserver(entries => entries.forEach(entry => {
  const made = state.charts.find(each => each.into === entry.target);
  if (made && entry.contentRect.width > 50) made.plot.setSize({width: entry.contentRect.width, height: entry.contentRect.height});
}));
const waiting = [];
function draw() {  // once they have a place on the page; of many, when they come into view
  const many = waiting.length > 24;
  waiting.splice(0).forEach(into => many ? seen.observe(into) : into.draw());
}
function charts(data) {
  state.charts.forEach(each => each.plot.destroy());
  state.charts = [];
  if (!data.charts.length) return el("section", {id: "charts"}, el("h2", {}, "Metrics"), el("p", {class: "soft"}, "No metrics were written yet."));
  const grid = el("div", {class: "charts"}, data.charts.map(chart => {
    const into = el("div", {class: "plot"});
    const box = el("figure", {class: "chart", style: {margin: 0}, "data-title": [chart.title, ...chart.names].join(" "), "aria-label": chart.title},
                   el("h3", {}, chart.title), into);
    box.hidden = state.filter && !box.dataset.title.includes(state.filter);
    into.draw = () => {
      const made = build(chart, data, into);
      if (!made) { box.remove(); return; }
      box.append(made.key);
      state.charts.push(made);
      resized.observe(into);
    };
    waiting.push(into);
    return box;
  }));
  const again = () => { const fresh = charts(state.data); document.getElementById("charts").replaceWith(fresh); draw(); return fresh; };
  const slider = el("input", {type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "smoothing", oninput: event => {
    state.smooth = +event.target.value; again().querySelector("input[type=range]").focus(); }});
  const log = el("input", {type: "checkbox", onchange: event => { state.log = event.target.checked; again(); }});
  log.checked = state.log;
  const filter = data.charts.length > 8 ? el("label", {}, "show ", el("input", {type: "search", value: state.filter, placeholder: "a part of a name", oninput: event => {
    state.filter = event.target.value;
    for (const box of grid.children) box.hidden = !box.dataset.title.includes(state.filter);
  }})) : null;
  const thinned = data.runs.some(run => Object.values(run.series).some(each => each.low));
  return el("section", {id: "charts"}, el("h2", {}, "Metrics"),
    el("div", {class: "tools"}, el("label", {}, "smoothing ", slider), el("label", {}, log, " logarithmic"), filter,
      thinned ? el("span", {}, "a line is the mean of neighbouring values, its shade goes from the lowest to the highest") : null),
    grid, data.left_out ? el("p", {class: "soft"}, `${data.left_out} more metrics are not drawn; metrics.jsonl has them.`) : null);
}

// The timeline, and below it, by the same clock, who was behind

function timeline(data) {
  const runs = data.runs.filter(run => run.timeline.spans.length);
  if (!runs.length) return null;
  const tip = text => ({onmousemove: event => showTip(event, text), onmouseleave: hideTip});
  const used = new Set();
  const parts = runs.map(run => {
    const {spans, marks, seconds: spent, counts, shortest} = run.timeline;
    const begin = spans[0][1], end = Math.max(spans.at(-1)[2], ...marks.map(each => each.at)), whole = Math.max(end - begin, 1e-3);
    const at = value => `${100 * (value - begin) / whole}%`;
    Object.keys(spent).forEach(kind => used.add(kind));
    const bars = spans.map(([kind, from, to, step, note]) => {
      const name = data.phases[kind] || "";
      const told = [`${name}, ${seconds(to - from)}`, step != null ? `from step ${step}` : "", note, clock(from)].filter(Boolean).join(" · ");
      return el("i", {style: {left: at(from), width: `${100 * (to - from) / whole}%`, background: PHASES[name] || "#888"}, ...tip(told)});
    });
    const told = marks.filter(each => each.kind !== "end" || each.text !== "completed");
    const alarm = kind => kind === "restart" || kind === "stall" || kind === "end" ? "bad" : "note";
    const place = each => { const share = (each.at - begin) / whole; return share < .1 ? "first" : share > .9 ? "last" : ""; };
    let last = -1;
    const labels = told.filter(each => { const share = (each.at - begin) / whole; if (share - last < .12 && last >= 0) return false; last = share; return true; });
    const day = whole > 86400;
    const words = Object.entries(spent).map(([kind, value]) => el("span", {}, swatch(PHASES[kind] || "#888"),
      `${kind} ${seconds(value)}${counts[kind] > 1 ? ` in ${counts[kind]}` : ""}`));
    return el("div", {class: "lane"}, runs.length > 1 ? el("h3", {}, run.name) : null,
      el("div", {class: "time"},
        told.length ? el("div", {class: "marks"}, labels.map(each => el("span", {class: `${alarm(each.kind)} ${place(each)}`, style: {left: at(each.at)}, ...tip(each.text)},
          each.kind === "end" ? "failed" : MARKS[each.kind]))) : null,
        el("div", {class: "track", role: "img", "aria-label": `what ${run.name} did when`}, bars,
          el("div", {class: "lines"}, told.map(each => el("span", {class: alarm(each.kind), style: {left: at(each.at)}, ...tip(each.text)})))),
        el("div", {class: "scale"}, [0, .25, .5, .75, 1].map(share => el("span", {style: {left: `${100 * share}%`}},
          share ? `+${seconds(share * whole)}` : clock(begin, true))))),
      heat(run, begin, end),
      el("p", {class: "key"}, words),
      shortest ? el("small", {}, `What took less than ${seconds(shortest)} is drawn as a part of what is beside it; the sums have all of it.`) : null);
  });
  return el("section", {id: "timeline"}, el("h2", {}, "Timeline"), parts);
}
function ramp(share) {  // from the page's own ground to a strong red
  const from = dark.matches ? [36, 42, 48] : [238, 241, 244], to = dark.matches ? [255, 123, 84] : [190, 40, 20];
  const weight = Math.pow(Math.min(Math.max(share, 0), 1), .7);
  return from.map((value, at) => Math.round(value + weight * (to[at] - value)));
}
function heat(run, begin, end) {
  const lags = run.lags;
  if (!lags || !lags.ms.length) return null;
  const rows = Math.max(...lags.ms.map(column => column.length)), width = 1200, whole = Math.max(end - begin, 1e-3);
  const sorted = lags.ms.flat().sort((a, b) => a - b);
  const most = Math.max(sorted[Math.floor(.99 * (sorted.length - 1))], 1);  // one moment does not make all others pale
  const canvas = el("canvas", {width, height: rows, role: "img", "aria-label": "how far each rank was behind the fastest, over time",
    style: {height: `${Math.min(Math.max(rows * 16, 32), 320)}px`}});
  const context = canvas.getContext("2d");
  lags.ms.forEach((column, index) => {
    const from = Math.max((lags.begins[index] - begin) / whole * width, 0), to = (lags.ends[index] - begin) / whole * width;
    column.forEach((value, rank) => { context.fillStyle = `rgb(${ramp(value / most)})`; context.fillRect(Math.floor(from), rank, Math.max(Math.ceil(to) - Math.floor(from), 1), 1); });
  });
  const group = lags.ranks_in_a_row;
  const name = row => group > 1 ? `${row * group}–${Math.min((row + 1) * group, lags.ranks) - 1}` : `${row}`;
  canvas.addEventListener("mousemove", event => {
    const box = canvas.getBoundingClientRect(), time = begin + (event.clientX - box.left) / box.width * whole;
    const row = Math.min(Math.floor((event.clientY - box.top) / box.height * rows), rows - 1);
    const index = lags.ends.findIndex((to, at) => time <= to && time >= lags.begins[at]);
    if (index < 0) { hideTip(); return; }
    showTip(event, `rank ${name(row)}: ${short(lags.ms[index][row])} ms behind in a step, at step ${lags.steps[index]}, ${clock(time)}`);
  });
  canvas.addEventListener("mouseleave", hideTip);
  const every = Math.ceil(rows / 16);
  const labels = [...Array(rows).keys()].filter(row => row % every === 0).map(row =>
    el("span", {style: {top: `${100 * (row + .5) / rows}%`}}, `${group > 1 ? "" : "rank "}${name(row)}`));
  const colours = [0, .25, .5, .75, 1].map(share => `rgb(${ramp(share)})`).join(",");
  const slowest = group > 1 || lags.merged > 1 ? " (the slowest of those that share a cell)" : "";
  return el("div", {}, el("div", {class: "heat"}, el("div", {class: "rows"}, labels), canvas),
    el("p", {class: "key below"}, el("span", {}, "behind the fastest rank in a step: 0",
      el("i", {class: "ramp", style: {background: `linear-gradient(to right, ${colours})`}}), `${short(most)} ms${slowest}`)));
}
let tipBox = null;
function showTip(event, text) {
  if (!text) return;
  tipBox = tipBox || document.body.appendChild(el("div", {class: "tip"}));
  tipBox.textContent = text;
  tipBox.hidden = false;
  const left = Math.min(event.clientX + 12, innerWidth - tipBox.offsetWidth - 8);
  Object.assign(tipBox.style, {left: `${Math.max(left, 4)}px`, top: `${event.clientY + 16}px`});
}
function hideTip() { if (tipBox) tipBox.hidden = true; }

// Who takes part, what is saved, how it was set

function topology(data) {
  const runs = data.runs.filter(run => run.topology.hosts.length);
  if (!runs.length) return null;
  return el("section", {id: "topology"}, el("h2", {}, "Hosts, ranks and devices"), runs.map(run => {
    const {hosts, mesh, more} = run.topology;
    const axes = mesh.map(([axis, size], at) => [axis, size, at]).filter(([, size]) => size > 1);
    const views = axes.length > 1 ? axes : [axes[0] || null];
    return el("div", {}, runs.length > 1 ? el("h3", {}, run.name) : null, views.map(view => el("div", {},
      view ? el("p", {}, el("b", {}, view[0]), ` of ${view[1]}: `, el("span", {class: "soft"}, axes.length > 1 ? "ranks of one colour are a line along it" : "all ranks are along it")) : null,
      el("div", {class: "hosts"}, hosts.map(host => el("div", {class: "host"}, el("small", {}, host.name),
        el("div", {class: "devices"}, host.ranks.map(rank => {
          const line = view ? rank.place.filter((_, at) => at !== view[2]).join("-") : "";
          const colour = view && axes.length > 1 ? COLOURS[lineNumber(line, hosts, view) % COLOURS.length] : null;
          const place = mesh.map(([axis], at) => `${axis} ${rank.place[at]}`).join(", ");
          return el("span", {title: [`rank ${rank.rank}`, rank.physical, place].filter(Boolean).join(" · "),
                             style: colour ? {borderColor: colour, background: colour + "33"} : {}}, `rank ${rank.rank}`, el("small", {}, rank.device));
        })))), more ? el("p", {class: "soft"}, `and ${more} more ranks in topology.json`) : null))));
  }));
}
function lineNumber(line, hosts, view) {
  const all = [...new Set(hosts.flatMap(host => host.ranks.map(rank => rank.place.filter((_, at) => at !== view[2]).join("-"))))];
  return all.indexOf(line);
}
function checkpoints(data) {
  const runs = data.runs.filter(run => run.checkpoints.length);
  if (!runs.length) return null;
  return el("section", {id: "checkpoints"}, el("h2", {}, "Checkpoints"), runs.map(run => el("div", {},
    runs.length > 1 ? el("h3", {}, run.name) : null,
    el("div", {class: "scroll"}, el("table", {}, el("tr", {}, ["step", "saved", "size", "value", ""].map((name, at) => el("th", {class: at && at < 2 ? "" : at < 4 ? "n" : ""}, name))),
      run.checkpoints.map(each => el("tr", {}, el("td", {class: "n"}, each.step), el("td", {}, each.created.replace("T", " ").replace("Z", " UTC")),
        el("td", {class: "n"}, bytes(each.size)), el("td", {class: "n"}, each.value === null ? "" : short(each.value)),
        el("td", {}, each.best ? el("span", {class: "badge good"}, "best") : null, each.problem ? el("span", {class: "bad"}, each.problem) : null))))))));
}
function ranksNow(data) {
  const runs = data.runs.filter(run => run.live);
  if (!runs.length) return null;
  return el("section", {id: "now"}, el("h2", {}, "Ranks now"), runs.map(run => el("div", {class: "scroll"},
    runs.length > 1 ? el("h3", {}, run.name) : null,
    el("table", {}, el("tr", {}, ["rank", "host", "step", "doing", "since", "memory", "behind"].map(name => el("th", {}, name))),
      run.live.ranks.map(each => el("tr", {}, el("td", {class: "n"}, each.rank), el("td", {}, each.host), el("td", {class: "n"}, each.step),
        el("td", {}, `${each.waits ? "waits in " : ""}${each.doing}${each.where ? `, ${each.where}` : ""}`), el("td", {class: "n"}, seconds(each.still)),
        el("td", {class: "n"}, bytes(each.memory)), el("td", {class: "n"}, each.lag === null ? "" : `${short(1000 * each.lag)} ms`)))))));
}
function config(data) {
  const many = data.runs.length > 1;
  const values = data.runs.map(run => new Map(run.config));
  const paths = [...new Set(data.runs.flatMap(run => run.config.map(([path]) => path)))];
  if (!paths.length) return null;
  const table = shown => el("div", {class: "scroll"}, el("table", {}, many ? el("tr", {}, el("th", {}), data.runs.map((run, at) => el("th", {}, swatch(COLOURS[at % COLOURS.length]), run.name))) : null,
    shown.map(path => el("tr", {}, el("td", {}, el("code", {}, path)), values.map(each => el("td", {}, each.has(path) ? each.get(path) : el("span", {class: "soft"}, "–")))))));
  const differs = many ? paths.filter(path => new Set(values.map(each => each.get(path))).size > 1) : [];
  return el("section", {id: "config"}, many ? [el("h2", {}, "What differs in their configs"), differs.length ? table(differs) : el("p", {class: "soft"}, "Nothing.")] : el("h2", {}, "Config"),
    el("details", {}, el("summary", {}, many ? `all ${paths.length} values` : `${paths.length} values; config.yaml has them too`), table(paths)));
}

// All runs of a folder, where there is a server

function list(data) {
  const chosen = new Set(state.chosen || []);
  const compare = el("button", {onclick: () => { if (chosen.size) location.href = `${data.link}?${[...chosen].map(name => `run=${encodeURIComponent(name)}`).join("&")}`; }}, "compare");
  const row = run => {
    const box = el("input", {type: "checkbox", "aria-label": `compare ${run.name}`, onchange: event => { event.target.checked ? chosen.add(run.name) : chosen.delete(run.name); state.chosen = [...chosen]; }});
    box.checked = chosen.has(run.name);
    return el("tr", {}, el("td", {}, box), el("td", {}, el("a", {href: `${data.link}?run=${encodeURIComponent(run.name)}`}, run.name)),
      el("td", {}, el("span", {class: `badge ${run.kind}`}, run.status)), el("td", {class: "n"}, run.step), el("td", {}, run.metrics), el("td", {}, clock(run.at, true)));
  };
  return [el("h1", {}, data.title), data.list.length ? el("div", {class: "scroll"}, el("table", {class: "list"}, el("tr", {}, ["", "run", "status", "step", "metrics", "changed"].map(name => el("th", {}, name))), data.list.map(row)))
    : el("p", {class: "soft"}, "There are no runs in this folder yet."), data.list.length > 1 ? el("p", {}, compare) : null, data.more ? el("p", {class: "soft"}, `and ${data.more} older ones`) : null];
}

function render(data) {
  const before = state.data;
  state.data = data;
  if (data.error) { page.replaceChildren(el("h1", {}, data.error)); return; }
  if (data.list) { page.replaceChildren(...list(data).filter(Boolean)); return; }
  const same = before && !before.error && JSON.stringify(before.charts) === JSON.stringify(data.charts) && before.runs.length === data.runs.length;
  const old = same && document.getElementById("charts");
  const parts = [given.source ? el("p", {}, el("a", {href: "./"}, "all runs")) : null, heading(data), ranksNow(data), failures(data), old || charts(data), timeline(data), topology(data), checkpoints(data), config(data)];
  const open = [...document.querySelectorAll("#config details")].map(each => each.open);
  page.replaceChildren(...parts.filter(Boolean));
  document.querySelectorAll("#config details").forEach((each, at) => { each.open = open[at] || false; });
  if (old) state.charts.forEach(each => each.update(data));
  draw();
}
async function follow() {
  let known = "";
  for (;;) {
    const asked = Date.now();
    try {
      const answer = await fetch(given.source, {cache: "no-store"});
      const text = await answer.text();
      if (text !== known) { known = text; render(JSON.parse(text)); document.body.dataset.at = Date.now(); }
    } catch (error) { /* the server is gone, or busy: what is shown stays */ }
    // A server that takes long, for runs that are long, is asked less often.
    const pause = Math.max(2000, 4 * (Date.now() - asked));
    await new Promise(resolve => setTimeout(resolve, document.hidden ? Math.max(pause, 10000) : pause));
  }
}
dark.addEventListener("change", () => { chooseColours(); const data = state.data; state.data = null; if (data) render(data); });
if (given.source) follow(); else render(given);
})();
