// The frame of the page: runs, views, shortcuts, theme, polling. A view is a function (root, context) that returns
// {route?, tick?, refresh?, keys?, destroy?}.

import { h, icon, openDialog, replace, emptyState } from "./dom.js";
import { ago, num } from "./format.js";
import { VIEWS, format, go, parse } from "./route.js";
import { allRuns, findRun, loadRuns } from "./store.js";
import { seriesColor } from "./colors.js";
import { curvesView } from "./curves.js";
import { timelineView } from "./timeline.js";
import { rolloutsView } from "./rollouts.js";
import { eventsView } from "./events.js";
import { configView } from "./config.js";
import { logsView } from "./logs.js";

const POLL_MS = 2000;
const MAKERS = { curves: curvesView, timeline: timelineView, rollouts: rolloutsView, events: eventsView, config: configView, logs: logsView };
const TITLES = { curves: "Curves", timeline: "Timeline", rollouts: "Rollouts", events: "Events", config: "Config", logs: "Logs" };
const $ = (id) => document.getElementById(id);

let view = null;
let shown = "";
let route = parse();

/** The runs that are drawn: the chosen one first. The colour of a run is its place here. */
function chosenRuns() {
  return [route.run, ...route.others].filter((id, i, all) => id && findRun(id) && all.indexOf(id) === i);
}

/** The views of the chosen run: one without rollouts, such as of supervised training, has no list of them. */
function views() {
  return findRun(route.run)?.has_rollouts === false ? VIEWS.filter((name) => name !== "rollouts") : VIEWS;
}

const context = {
  route: () => route,
  runs: chosenRuns,
  runName: (id) => findRun(id)?.name ?? id,
  runColor: (id) => seriesColor(Math.max(0, chosenRuns().indexOf(id))),
  isLive: (id) => Boolean(findRun(id)?.live),
  hasRollouts: (id) => findRun(id)?.has_rollouts !== false,
};

function renderRuns() {
  const wanted = $("run-search").value.toLowerCase();
  const groups = new Map();
  for (const run of allRuns()) {
    if (wanted && !`${run.name} ${run.path}`.toLowerCase().includes(wanted)) continue;
    const group = run.experiment || "runs";
    groups.set(group, [...(groups.get(group) ?? []), run]);
  }
  const nodes = [];
  for (const [group, members] of groups) nodes.push(h("div", { class: "run-group" }, group), ...members.map(runItem));
  if (!nodes.length) nodes.push(h("p", { class: "run-group" }, allRuns().length ? "No run has this name." : "No runs yet."));
  const focused = document.activeElement?.dataset?.key;
  replace($("runs"), nodes);
  if (focused) $("runs").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function runItem(run) {
  const chosen = run.id === route.run;
  const drawn = chosenRuns().includes(run.id);
  const others = () => (drawn ? route.others.filter((id) => id !== run.id) : [...route.others, run.id]);
  const box = h("input", {
    type: "checkbox", checked: drawn, disabled: chosen, "aria-label": `Overlay ${run.name}`, dataset: { key: `box ${run.id}` },
    onchange: () => go({ others: others() }),
  });
  const steps = run.total_steps ? `${run.steps}/${run.total_steps}` : `${run.steps} steps`;
  const item = h("div", { class: `run${chosen ? " chosen" : ""}` },
    h("label", { class: "run-box", title: chosen ? "The chosen run" : "Draw this run too" }, box),
    h("button", {
      class: "run-main", type: "button", title: run.path, "aria-current": chosen ? "true" : null, dataset: { key: `run ${run.id}` },
      onclick: () => { closeRuns(); go({ run: run.id, others: route.others.filter((id) => id !== run.id), params: viewParams() }); },
    },
    h("div", { class: "run-name" }, run.live ? h("i", { class: "live", title: "running" }) : null, h("span", {}, run.trial || run.name),
      run.alarms ? h("b", { class: "badge bad", title: `${run.alarms} alarms` }, run.alarms) : null),
    h("div", { class: "run-meta" }, h("span", {}, steps), run.reward === null ? null : h("span", { title: "reward" }, `r ${num(run.reward, 3)}`), h("span", {}, ago(run.updated)))));
  if (drawn) item.style.setProperty("--run-color", context.runColor(run.id));
  return item;
}

/** Choices of a view that make sense for another run too. */
function viewParams() {
  const { sel, start, end, file, ...kept } = route.params;
  return kept;
}

function renderTop() {
  const run = findRun(route.run);
  document.title = run ? `${run.name} · AReaLite` : "AReaLite";
  replace($("run-title"), run ? [
    h("h1", { title: run.path }, run.name),
    run.live ? h("span", { class: "badge good" }, h("i", { class: "live" }), "live") : null,
  ] : h("h1", {}, "AReaLite"));
  const alarms = run?.alarms;
  replace($("tabs"), views().map((name, i) => h("a", {
    href: format({ ...route, view: name, params: {} }), role: "tab", "aria-selected": String(route.view === name), title: `${TITLES[name]} (${i + 1})`,
  }, icon(name), h("span", {}, TITLES[name]), name === "events" && alarms ? h("b", { class: "badge bad" }, alarms) : null)));
}

/** Make the view that the link asks for, or tell the present one about its new choices. */
function show() {
  route = parse();
  if (!findRun(route.run) && allRuns().length) {
    const unknown = route.run;
    route.run = allRuns()[0].id;
    history.replaceState(null, "", format(route));
    if (unknown) $("banner").textContent = `There is no run ${unknown} here: this is ${findRun(route.run).name}.`;
    $("banner").hidden = !unknown;
  }
  if (!views().includes(route.view)) {
    route.view = "curves";
    history.replaceState(null, "", format(route));
  }
  renderRuns();
  renderTop();
  const wanted = `${route.view} ${route.run} ${route.others}`;
  // Without `route`, a view is made anew with the choices of the link.
  if (wanted === shown && view?.route) return view.route(route);
  view?.destroy?.();
  shown = wanted;
  const root = $("view");
  root.replaceChildren();
  root.scrollTop = 0;
  root.dataset.view = route.view;
  if (!route.run) {
    view = null;
    return root.append(emptyState("No runs", "The folders given to `arealite dashboard` hold no run yet. A run appears here as soon as its launcher has written config.yaml and logs/.", null));
  }
  view = MAKERS[route.view](root, context);
}

async function poll() {
  if (document.hidden) return;
  try {
    const before = JSON.stringify(allRuns());
    await loadRuns();
    $("banner").hidden = true;
    if (JSON.stringify(allRuns()) !== before) { if (!findRun(route.run) || !view) show(); else { renderRuns(); renderTop(); } }
    if (chosenRuns().some(context.isLive)) await view?.tick?.();
  } catch (error) {
    if (error.name === "AbortError") return;
    $("banner").textContent = error.message;
    $("banner").hidden = false;
  }
}

async function pollForever() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    await poll();
  }
}

function openRuns() { $("sidebar").classList.add("open"); $("backdrop").hidden = false; $("run-search").focus(); }
function closeRuns() { $("sidebar").classList.remove("open"); $("backdrop").hidden = true; }

function switchTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", next); } catch { /* storage is blocked */ }
  document.documentElement.dataset.theme = next;
  window.dispatchEvent(new Event("themechange"));
}

function renderTheme() {
  const dark = document.documentElement.dataset.theme === "dark";
  $("theme").setAttribute("aria-label", dark ? "Use the light theme" : "Use the dark theme");
  replace($("theme"), icon(dark ? "sun" : "moon"), dark ? "Light" : "Dark");
}

function help() {
  const rows = (keys) => keys.map(([key, text]) => [h("span", {}, key.split(" ").map((k) => h("kbd", {}, k))), h("span", {}, text)]);
  const own = view?.keys ?? [];
  openDialog("Keyboard shortcuts", h("div", { class: "keys" },
    h("h3", {}, "Everywhere"),
    rows([[`1 … ${views().length}`, views().map((name) => TITLES[name]).join(", ")], ["/", "Search in this view"], ["[ ]", "Previous or next run"],
      ["t", "Light or dark"], ["?", "This list"], ["Esc", "Close, or leave a field"]]),
    own.length ? h("h3", {}, TITLES[route.view]) : null, rows(own.map(([key, text]) => [key, text]))));
}

function onKey(event) {
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape" && typing) return typing.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || typing || $("dialog").open) return;
  const own = view?.keys?.find(([key, , action]) => action && key.split(" ").includes(event.key));
  const number = Number(event.key);
  if (own) own[2](event);
  else if (event.key === "?") help();
  else if (event.key === "t") switchTheme();
  else if (event.key === "/") $("view").querySelector("input[type=search]")?.focus();
  else if (event.key === "[" || event.key === "]") {
    const all = allRuns();
    const at = all.findIndex((run) => run.id === route.run) + (event.key === "]" ? 1 : -1);
    if (all[at]) go({ run: all[at].id, others: [], params: viewParams() });
  } else if (number >= 1 && number <= views().length) go({ view: views()[number - 1] });
  else return;
  event.preventDefault();
}

async function start() {
  replace($("open-runs"), icon("menu"));
  replace($("close-runs"), icon("close"));
  renderTheme();
  $("open-runs").addEventListener("click", openRuns);
  $("close-runs").addEventListener("click", closeRuns);
  $("backdrop").addEventListener("click", closeRuns);
  $("theme").addEventListener("click", switchTheme);
  $("help-button").addEventListener("click", help);
  $("run-search").addEventListener("input", renderRuns);
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", poll);
  window.addEventListener("themechange", () => { renderTheme(); renderRuns(); view?.refresh?.(); });
  window.addEventListener("hashchange", show);
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("view").focus(); });
  try {
    await loadRuns();
    show();
  } catch (error) {
    $("view").append(emptyState("The runs cannot be read", error.message));
  }
  pollForever();
}

start();
