// Curves: small multiples of the statistics that matter first, and any other by name.

import { debounce, emptyState, h, icon, openDialog, replace, segmented, store, stored } from "./dom.js";
import { duration, num } from "./format.js";
import { Chart, ChartGroup } from "./chart.js";
import { keep } from "./route.js";
import { nearest, risingOrder } from "./series.js";
import { seriesColor } from "./colors.js";
import { runPath } from "./api.js";
import { evaluationsOf, eventsOf, findRun, loadEvaluations, loadEvents, loadStats, statsOf, xOf, xValues } from "./store.js";

// A chart shows the statistics that exist of its names; a pattern adds all that match.
const SECTIONS = [
  ["Reward", "what the policy earns", [
    ["Reward", ["reward"], /^rollout\/reward\//, "hero"], ["Answer length, tokens", ["answer_len", "eval/answer_len"]],
    ["Truncated answers, share", ["truncated_share"]]]],
  ["Fit", "how well the model predicts its data", [
    ["Negative log-likelihood, nats per token", ["nll"], null, "hero"], ["Accuracy", ["accuracy"]], ["Margin", ["margin", "chosen"]], ["Score", ["score/mean"]]]],
  ["Policy", "how fast it moves", [
    ["Entropy, nats per token", ["entropy"]], ["KL, nats per token", ["behav_kl/k3", "prox_kl", "ref_kl", "kl", "ref_kl/k3"]], ["Clipped share", ["clip_share", "dual_clip_share", "behav_capped_share"]],
    ["Gradient norm", ["grad_norm"]], ["Loss", ["loss", "critic/loss", "value_loss"]], ["Groups with signal", ["groups", "groups_with_signal"]], ["Effective sample size", ["ess"]], ["Learning rate", ["lr"]]]],
  ["Asynchrony", "how old the data is, and who waits", [
    ["Staleness, versions", ["staleness", "staleness/max"]], ["Idle share", ["idle/trainer", "idle/server"]],
    ["Episodes in flight", ["running", "buffered", "queued"]], ["Wait for a batch, seconds", ["wait_s"]]]],
  ["Throughput", "tokens and seconds", [
    ["Tokens per second", ["tokens_per_s", "train_tokens_per_s"]], ["Seconds per phase", ["time/step", "time/rollout", "time/update", "time/logp", "time/weights"]],
    ["Prefix hits, share", ["rollout/prefix_hit_rate"]], ["TFLOP/s", ["train_tflops"]]]],
];
const X_NAMES = { step: ["step", "integer"], time: ["time", "duration"], samples: ["samples", "integer"] };
const MAX_FOUND = 36;
// With 64 samples there are pass@1 to pass@64, maj@2 to maj@64, and five more.
const MAX_METRICS = 24;
const DASHES = [[], [5, 3], [2, 2], [8, 3, 2, 3], [1, 3]];

export function curvesView(root, context) {
  const params = context.route().params;
  const own = {
    x: X_NAMES[params.x] ? params.x : "step", smoothing: Number(params.smooth ?? stored("smooth", 0.6)) || 0, log: params.log === "1",
    search: params.find ?? "", pins: stored("pins", []), group: new ChartGroup(), cards: new Map(), layout: "",
  };
  const kpis = h("div", { class: "kpis" });
  const legend = h("div", { class: "legend" });
  const note = h("p", { class: "muted", role: "status", hidden: true });
  const body = h("div", { class: "view-pad curves" }, kpis, legend, note);
  const sections = h("div");
  body.append(sections);
  root.append(toolbar(own, context), body);
  own.group.onzoom = (range) => { root.querySelector(".zoomed").hidden = !range; };

  const render = () => { renderKpis(kpis, context); renderLegend(legend, context); renderSections(own, context, sections); };
  own.render = render;
  const load = async () => {
    const ids = context.runs();
    const changed = await Promise.all(ids.map(loadStats));
    if (!own.loaded || changed.some(Boolean)) {
      own.loaded = true;
      render();
      // First paint comes from the statistics alone; marks and evaluations follow.
      const rest = await Promise.allSettled(ids.flatMap((id) => [loadEvaluations(id), loadEvents(id)]));
      render();
      const failed = rest.find((one) => one.status === "rejected");
      note.hidden = !failed;
      note.textContent = failed ? `Evaluations or alarms are missing here: ${failed.reason.message}` : "";
    }
  };
  sections.append(h("div", { class: "grid" }, [1, 2, 3, 4, 5, 6].map(() => h("div", { class: "loading card" }))));
  load().catch((error) => replace(sections, emptyState("The statistics cannot be read", error.message)));
  return {
    tick: load, refresh: render,
    destroy() { for (const card of own.cards.values()) card.chart.destroy(); },
    keys: [
      ["l", "Log axis on or off", () => root.querySelector("[data-log]").click()],
      ["x", "x axis: step, time, samples", () => { setX(own, root, ["step", "time", "samples"][(["step", "time", "samples"].indexOf(own.x) + 1) % 3]); }],
      ["0", "Reset the zoom", () => own.group.setRange(null)],
      ["← →", "Move the crosshair of the focused chart"],
    ],
  };
}

function setX(own, root, x) {
  own.x = x;
  root.querySelector("[data-x]").set(x);
  keep({ x: x === "step" ? null : x });
  own.group.range = null;
  own.group.onzoom(null);
  own.render();
}

function toolbar(own, context) {
  const search = h("input", {
    type: "search", placeholder: "Find a statistic…", "aria-label": "Find a statistic by name", value: own.search, autocomplete: "off", spellcheck: "false",
    oninput: debounce((event) => { own.search = search.value.trim(); keep({ find: own.search }); own.render(); }, 80),
  });
  const value = h("output", { class: "num" }, own.smoothing.toFixed(2));
  const slider = h("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, value: own.smoothing, "aria-label": "Smoothing",
    oninput: () => {
      own.smoothing = Number(slider.value);
      value.textContent = own.smoothing.toFixed(2);
      store("smooth", own.smoothing);
      for (const { chart } of own.cards.values()) chart.setData({ smoothing: own.smoothing });
    },
    onchange: () => keep({ smooth: own.smoothing }),
  });
  const log = h("button", {
    class: "button", type: "button", "aria-pressed": String(own.log), dataset: { log: "" }, title: "Logarithmic y axis (l)",
    onclick: () => {
      own.log = !own.log;
      log.setAttribute("aria-pressed", String(own.log));
      keep({ log: own.log ? 1 : null });
      for (const { chart } of own.cards.values()) chart.setData({ log: own.log });
    },
  }, "Log");
  const x = segmented("x axis", [["step", "Step"], ["time", "Time"], ["samples", "Samples"]], own.x, (chosen) => setX(own, x.closest("main"), chosen));
  x.dataset.x = "";
  const reset = h("button", { class: "button zoomed", type: "button", hidden: true, onclick: () => own.group.setRange(null) }, "Reset zoom");
  const all = h("a", { class: "button", href: `api/${runPath(context.route().run, "stats.csv")}`, download: "stats.csv", title: "All statistics of the chosen run" }, icon("table"), "CSV");
  return h("div", { class: "sticky toolbar" }, search, x, h("label", {}, "Smooth", slider, value), log, reset, h("span", { class: "spacer" }), all);
}

function renderLegend(node, context) {
  const ids = context.runs();
  node.hidden = ids.length < 2;
  replace(node, ids.map((id) => h("span", { class: "chip" }, h("i", { class: "swatch", style: { background: context.runColor(id) } }), context.runName(id))));
}

const last = (values) => values?.findLast((v) => v !== null) ?? null;

/** Return the mean of some of the known values: lines of evaluations have none of a step. */
function meanOf(values, from, to) {
  const known = (values ?? []).filter((v) => v !== null).slice(from, to);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function renderKpis(node, context) {
  const id = context.runs()[0];
  const run = findRun(id);
  const { columns, rows } = statsOf(id);
  if (!rows) return replace(node);
  // Not the last line, nor the number of lines: evaluations have lines of their own, with an earlier step.
  const step = columns.step.reduce((most, each) => Math.max(most, each ?? 0), 0);
  const trend = (name, goodUp, form = num) => {
    const now = meanOf(columns[name], -10);
    const before = step >= 40 ? meanOf(columns[name], -40, -20) : null;
    if (now === null) return [form(last(columns[name])), ""];
    const change = before ? (now - before) / Math.abs(before) : 0;
    const text = Math.abs(change) < 0.005 ? "" : `${change > 0 ? "▲" : "▼"} ${Math.min(999, Math.abs(change) * 100).toFixed(Math.abs(change) < 0.1 ? 1 : 0)}%`;
    return [form(now, 3), text, goodUp === null || !text ? "" : (change > 0) === goodUp ? "good" : "bad"];
  };
  const total = run?.total_steps;
  const perStep = meanOf(columns["time/step"], -20);
  const left = total && perStep && run.live ? `${duration((total - step) * perStep)} left` : perStep ? `${duration(perStep)} each` : "";
  const tiles = [
    ["Step", [total ? `${step} / ${total}` : String(step), left], total ? step / total : null],
    ["Reward", trend("reward", true)], ["NLL", trend("nll", false)], ["Accuracy", trend("accuracy", true)], ["Answer length", trend("answer_len", null)], ["Entropy", trend("entropy", null)],
    ["Staleness", trend("staleness", null)], ["Tokens/s", trend("tokens_per_s", true)],
    ["Idle", trend("idle/trainer", false, (v) => (v === null ? "–" : `${Math.round(v * 100)}%`))],
  ].filter(([, [value]]) => value !== "–");
  replace(node, tiles.map(([label, [value, note, tone], share]) => h("div", { class: "kpi" },
    h("span", { class: "kpi-label" }, label), h("span", { class: `kpi-note num ${tone ?? ""}` }, note), h("span", { class: "kpi-value num" }, value),
    share === undefined || share === null ? null : h("i", { class: "kpi-bar", style: { width: `${Math.min(100, share * 100)}%` } }))));
}

/** List the charts to show: [[section, subtitle, [[title, names, key]]]]. */
function plan(own, context) {
  const names = [...new Set(context.runs().flatMap((id) => Object.entries(statsOf(id).columns).filter(([, v]) => v.some((x) => x !== null)).map(([name]) => name)))]
    .filter((name) => name !== "step" && name !== "time").sort();
  const one = (name) => [name, [name], `name ${name}`];
  if (own.search) {
    const words = own.search.toLowerCase().split(/\s+/);
    const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    const note = found.length > MAX_FOUND ? `${found.length} match; the first ${MAX_FOUND} are drawn` : `${found.length} of ${names.length} statistics match`;
    return { names, sections: [["Found", note, found.slice(0, MAX_FOUND).map(one)]] };
  }
  const known = new Set(names);
  const sections = SECTIONS.map(([title, note, charts]) => [title, note, charts.map(([name, wanted, pattern, tone]) => {
    const found = [...wanted.filter((n) => known.has(n)), ...(pattern ? names.filter((n) => pattern.test(n)) : [])];
    return [name, found, `chart ${name}`, tone];
  }).filter(([, found]) => found.length)]);
  const metrics = new Map();
  for (const id of context.runs()) {
    for (const { set, metric } of evaluationsOf(id)) metrics.set(metric, (metrics.get(metric) ?? new Set()).add(set));
  }
  const evaluations = [...metrics].slice(0, MAX_METRICS).map(([metric, sets]) => [sets.size > 1 ? metric : `${metric} on ${[...sets][0]}`, { metric, sets: [...sets] }, `eval ${metric}`]);
  const hasIntervals = context.runs().some((id) => evaluationsOf(id).some((row) => row.low !== null));
  sections.splice(1, 0, ["Evaluation", hasIntervals ? "with 95% intervals" : "on validation data", evaluations]);
  const pins = own.pins.filter((name) => known.has(name)).map(one);
  if (pins.length) sections.unshift(["Pinned", "kept in this browser", pins]);
  return { names, sections: sections.filter(([, , charts]) => charts.length) };
}

function renderSections(own, context, node) {
  const ids = context.runs();
  if (ids.every((id) => !statsOf(id).rows)) {
    for (const { chart } of own.cards.values()) chart.destroy();
    own.cards.clear();
    own.layout = "";
    const live = ids.some(context.isLive);
    return replace(node, emptyState("No statistics yet", live ? "The run has started and writes its first row of stats.jsonl after its first step. This page updates by itself." : "The run's folder has no stats.jsonl with a row: it ended before its first step. The logs say why."));
  }
  const { names, sections } = plan(own, context);
  const layout = JSON.stringify(sections.map(([title, note, charts]) => [title, note, charts.map(([, found, key]) => [key, found])]));
  // The cards stay where they are as long as the plan is the same, so that live updates do not flicker.
  if (layout !== own.layout) {
    own.layout = layout;
    const wanted = new Set(sections.flatMap(([, , charts]) => charts.map(([, , key]) => key)));
    for (const [key, card] of own.cards) if (!wanted.has(key)) { card.chart.destroy(); own.cards.delete(key); }
    replace(node, sections.flatMap(([title, note, charts]) => [
      h("div", { class: "section-title" }, h("h2", {}, title), h("p", {}, note)),
      h("div", { class: "grid" }, charts.map(([name, , key, tone]) => {
        if (!own.cards.has(key)) own.cards.set(key, makeCard(own, name, tone));
        return own.cards.get(key).element;
      })),
    ]), own.search ? null : allNames(own, names));
    if (own.search && !sections[0][2].length) node.append(emptyState(`No statistic is called “${own.search}”`, `This run has ${names.length} statistics. Clear the search to see all names.`));
  }
  for (const [, , charts] of sections) for (const [, found, key] of charts) fillCard(own, context, own.cards.get(key), found);
}

function allNames(own, names) {
  const pick = (name) => {
    own.pins = own.pins.includes(name) ? own.pins.filter((n) => n !== name) : [...own.pins, name];
    store("pins", own.pins);
    own.render();
  };
  return h("details", { class: "names" }, h("summary", {}, `All ${names.length} statistics`), h("p", { class: "muted" }, "A click pins one to the top."),
    h("div", { class: "name-list" }, names.map((name) => h("button", { type: "button", class: "name mono", "aria-pressed": String(own.pins.includes(name)), onclick: () => pick(name) }, name))));
}

function makeCard(own, title, tone = "") {
  const readout = h("div", { class: "readout" });
  const card = { title, readout };
  card.chart = new Chart({ group: own.group, label: title, onreadout: (x) => renderReadout(card, x) });
  const button = (name, label, action) => h("button", { class: "icon", type: "button", title: label, "aria-label": `${label}: ${title}`, onclick: action }, icon(name));
  card.element = h("figure", { class: `card chart-card ${tone}` },
    h("figcaption", { class: "card-head" }, h("h3", { title }, title), h("span", { class: "spacer" }), h("span", { class: "card-tools" },
      button("image", "Save as PNG", () => card.chart.exportPng(title)), button("table", "Save as CSV", () => card.chart.exportCsv(title)),
      button("expand", "Enlarge", () => enlarge(card)))),
    readout, card.chart.element);
  return card;
}

function enlarge(card) {
  const chart = new Chart({ height: Math.min(620, innerHeight - 190), label: card.title, onreadout: null });
  const body = openDialog(card.title, h("div", { class: "legend" }, card.chart.data.series.map((one) => h("span", { class: "chip" }, h("i", { class: "swatch", style: { background: one.color } }), one.name))), chart.element);
  body.classList.add("wide");
  chart.setData({ ...card.chart.data });
  document.getElementById("dialog").addEventListener("close", () => chart.destroy(), { once: true });
}

/** Show each series' value at the crosshair, or its last one. */
function renderReadout(card, x) {
  const { series } = card.chart.data;
  if (card.spans?.length !== Math.min(6, series.length)) {
    card.spans = series.slice(0, 6).map(() => h("span", {}, h("i", { class: "swatch" }), h("span"), h("b", { class: "num" })));
    replace(card.readout, card.spans, series.length > 6 ? h("span", {}, `+${series.length - 6}`) : null);
  }
  card.spans.forEach((span, i) => {
    const one = series[i];
    const at = x === null ? one.y.findLastIndex((v) => v !== null) : nearest(one.x, one.y, x);
    span.children[0].style.background = one.color;
    span.children[1].textContent = series.length > 1 ? one.short ?? one.name : "";
    span.children[2].textContent = at < 0 ? "–" : num(one.shown[at]);
  });
}

const shortName = (name) => name.replace(/^rollout\/reward\//, "").replace(/^time\//, "");

function fillCard(own, context, card, found) {
  const ids = context.runs();
  const many = ids.length > 1;
  const [xName, xKind] = X_NAMES[own.x];
  const series = [];
  for (const id of ids) {
    if (!Array.isArray(found)) { series.push(...evaluationSeries(own, context, id, found)); continue; }
    const { columns } = statsOf(id);
    const xs = xValues(id, own.x);
    const order = risingOrder(xs);
    const inOrder = (values) => (order ? order.map((at) => values[at]) : values);
    const x = inOrder(xs);
    found.forEach((name, i) => {
      if (!columns[name]?.some((v) => v !== null)) return;
      const short = many ? context.runName(id).split("/").at(-1) : shortName(name);
      series.push({
        name: many ? (found.length > 1 ? `${short} · ${name}` : short) : name, short: many && found.length > 1 ? `${short} · ${name}` : short, x, y: inOrder(columns[name]),
        color: many ? context.runColor(id) : seriesColor(i), dash: many ? DASHES[i % DASHES.length] : i && name.endsWith("/max") ? [4, 3] : [],
      });
    });
  }
  const marks = ids.flatMap((id) => eventsOf(id).filter((e) => e.level === "alarm").slice(-200).map((e) => ({ x: xOf(id, own.x, e), text: e.text, level: e.level })));
  card.chart.setData({ series: series.filter((s) => s.x.length), marks, xKind, xName, smoothing: own.smoothing, log: own.log });
  renderReadout(card, own.group.hover);
}

function evaluationSeries(own, context, id, { metric, sets }) {
  const many = context.runs().length > 1;
  return sets.map((set, i) => {
    const rows = evaluationsOf(id).filter((row) => row.set === set && row.metric === metric).sort((a, b) => a.step - b.step);
    const column = (name) => rows.map((row) => row[name] ?? null);
    const run = context.runName(id).split("/").at(-1);
    return {
      name: many ? (sets.length > 1 ? `${run} · ${set}` : run) : set, x: rows.map((row) => xOf(id, own.x, row)), y: column("value"), low: column("low"), high: column("high"),
      color: many ? context.runColor(id) : seriesColor(i), dash: many ? DASHES[i % DASHES.length] : [], points: true,
    };
  });
}
