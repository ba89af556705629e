// Timeline: who works, who waits for whom and why, over time; ages of samples, flow of episodes and servers below.

import { get, runPath } from "./api.js";
import { debounce, emptyState, h, replace } from "./dom.js";
import { count, duration } from "./format.js";
import { keep } from "./route.js";
import { AgeMap, ServerTable, flowDiagram, waitTable } from "./async_charts.js";
import { Chart, ChartGroup } from "./chart.js";
import { phaseColor, stateColor } from "./colors.js";
import { Foresight } from "./foresee.js";
import { Lanes, waitReason } from "./lanes.js";
import { shownStep } from "./steps.js";

const LIMIT = 20_000;
const FLOW_LINES = ["admitted", "buffered", "trained", "stale", "rejected", "failed"];

export function timelineView(root, context) {
  const id = context.route().run;
  const own = { id, root, base: null, part: null, groups: new ChartGroup(), flowGroup: new ChartGroup(), abort: null };
  const path = (rest) => runPath(id, rest);
  own.where = h("span", { class: "num muted" });
  own.phases = h("div", { class: "phases" });
  own.waits = h("div", { class: "card panel" });
  own.lanes = new Lanes({ onwindow: (window) => { own.moved = true; follow(own, window); refine(own, path); } });
  own.lanesCard = h("div", { class: "card lanes-card" }, own.lanes.element);
  own.foresight = new Foresight();
  own.ages = new AgeMap();
  own.servers = new ServerTable(own.groups);
  own.flowChart = new Chart({ height: 170, group: own.flowGroup, label: "Episodes by step" });
  own.panels = Object.fromEntries(["servers", "ages", "flow"].map((name) => [name, h("div", { class: "card panel" })]));
  root.append(toolbar(own), h("div", { class: "view-pad timeline" }, own.lanesCard,
    title("Who waits", "share of the visible window by phase; hatched is waiting, with the reason that cost most"), own.waits,
    context.hasRollouts(id) ? rolloutPanels(own) : null));

  const load = async () => {
    const size = own.base ? own.base.end - own.base.start : 0;
    const atEnd = own.base && Math.abs(own.lanes.window[1] - own.base.end) < 1e-6;
    await Promise.all([loadTrace(own, path, context, atEnd), context.hasRollouts(id) ? loadPanels(own, path) : null]);
    if (!size) restore(own, context.route().params);
  };
  load();
  return {
    tick: load,
    refresh() { own.lanes.paint(); own.ages.paint(); own.foresight.paint(); own.flowData && fillFlow(own, own.flowData); legend(own); follow(own, own.lanes.window); own.serverData && own.servers.setData(own.serverData); },
    destroy() { own.abort?.abort(); own.lanes.destroy(); own.ages.destroy(); own.foresight.destroy(); own.servers.destroy(); own.flowChart.destroy(); },
    keys: [
      ["w +", "Zoom in", () => own.lanes.zoom(0.6)], ["s -", "Zoom out", () => own.lanes.zoom(1 / 0.6)],
      ["a ArrowLeft", "Earlier", () => own.lanes.pan(-0.25)], ["d ArrowRight", "Later", () => own.lanes.pan(0.25)],
      ["0", "The whole run", () => own.lanes.setWindow(...own.lanes.full)], ["Ctrl+wheel", "Zoom at the pointer; without Ctrl once the timeline has focus"],
      ["Shift+drag", "Zoom into a part"], ["double-click", "Zoom to a span"],
    ],
  };
}

function rolloutPanels({ panels, foresight }) {
  return [title("What steps waited for", "the longest waits as chains of what episodes did; their parts add up to the wait"), foresight.waits,
    title("What would have helped", "the recorded durations, played again with one change"), foresight.helps, foresight.sweeps,
    title("Servers", "load, KV cache, prefix hits and weight version"), panels.servers,
    h("div", { class: "two" },
      h("div", {}, title("Age of samples", "versions between a sample's tokens and the update that used it"), panels.ages),
      h("div", {}, title("Flow of episodes", "where they are now, and how many changed state per step"), panels.flow))];
}

function loadPanels(own, path) {
  return Promise.all([own.foresight.load(path), section(own.panels.ages, path("ages"), (data) => fillAges(own, data)),
    section(own.panels.flow, `${path("flow")}?buckets=200`, (data) => fillFlow(own, data)), loadServers(own, path)]);
}

const title = (text, note) => h("div", { class: "section-title" }, h("h2", {}, text), h("p", {}, note));

function toolbar(own) {
  const button = (text, label, action) => h("button", { class: "button", type: "button", title: label, "aria-label": label, onclick: action }, text);
  return h("div", { class: "sticky toolbar" }, button("−", "Zoom out (s)", () => own.lanes.zoom(1 / 0.6)), button("+", "Zoom in (w)", () => own.lanes.zoom(0.6)),
    button("‹", "Earlier (a)", () => own.lanes.pan(-0.25)), button("›", "Later (d)", () => own.lanes.pan(0.25)), button("Whole run", "Show the whole run (0)", () => own.lanes.setWindow(...own.lanes.full)),
    own.where, h("span", { class: "spacer" }), own.phases);
}

/** Fill a panel from one path of the API; an error becomes its content. */
async function section(panel, path, fill) {
  try {
    fill(await get(path));
  } catch (error) {
    replace(panel, emptyState("Cannot be read", error.message));
  }
}

async function loadTrace(own, path, context, atEnd) {
  try {
    const answer = await get(path("trace"), { limit: LIMIT });
    if (!answer.lanes.some((lane) => lane.spans.length)) {
      own.base = null;
      replace(own.lanesCard, emptyState("No trace yet", "Lanes come from trace.json in the run's folder, which the trainer writes after its first step. Curves and rollouts do not need it."));
      return replace(own.waits, emptyState("Nothing to compare", "There are no spans in this run's trace."));
    }
    if (!own.lanesCard.contains(own.lanes.element)) replace(own.lanesCard, own.lanes.element);
    const size = own.lanes.window[1] - own.lanes.window[0];
    for (const lane of answer.lanes) lane.spans.sort((a, b) => a[0] - b[0]);
    own.base = answer;
    own.lanes.setData({ lanes: answer.lanes, full: [answer.start, answer.end], overview: true });
    // Until the user moves it, the window shows everything but the start-up. At the end of a live run it moves along.
    const begin = Math.min(...answer.lanes.filter((lane) => lane.name !== "startup").map((lane) => lane.spans[0]?.[0] ?? Infinity));
    if (!own.moved) own.lanes.setWindow(Number.isFinite(begin) ? begin : answer.start, answer.end, false);
    else if (atEnd) own.lanes.setWindow(answer.end - size, answer.end, false);
    if (own.lanes.folded.size === 0 && answer.lanes.filter((lane) => lane.group === "rollout").length > 48) own.lanes.folded.add("rollout");
    follow(own, own.lanes.window);
    legend(own);
  } catch (error) {
    if (error.name !== "AbortError") replace(own.lanesCard, emptyState("The trace cannot be read", error.message));
  }
}

function restore(own, { start, end }) {
  const origin = own.base?.start;
  if (origin !== undefined && start && end && Number(end) > Number(start)) own.lanes.setWindow(origin + Number(start), origin + Number(end));
}

/** Show what belongs to the visible window, and keep it in the link. */
function follow(own, [start, end]) {
  const { full } = own.lanes;
  own.where.textContent = `${duration(end - start)} from ${duration(Math.max(0, start - full[0]))}`;
  own.groups.range = [start, end];
  for (const chart of own.groups.charts) chart.paint();
  own.slow ??= debounce(() => {
    const [a, b] = own.lanes.window;
    const whole = a <= own.lanes.full[0] && b >= own.lanes.full[1];
    if (own.moved) keep({ start: whole ? null : (a - own.lanes.full[0]).toFixed(3), end: whole ? null : (b - own.lanes.full[0]).toFixed(3) });
    if (own.base) replace(own.waits, waitTable(own.lanes.lanes, own.lanes.window));
  }, 120);
  own.slow();
}

/** Read the spans of the window again if the whole run had too many to send. */
function refine(own, path) {
  own.refineSoon ??= debounce(async () => {
    if (!own.base?.truncated) return;
    own.abort?.abort();
    own.abort = new AbortController();
    const [start, end] = own.lanes.window;
    const margin = (end - start) / 2;
    try {
      const answer = await get(path("trace"), { start: start - margin, end: end + margin, limit: LIMIT }, own.abort.signal);
      own.lanes.setData({ lanes: answer.lanes });
      follow(own, own.lanes.window);
    } catch (error) {
      if (error.name !== "AbortError") own.where.textContent = error.message;
    }
  }, 150);
  own.refineSoon();
}

function legend(own) {
  const names = new Map();
  for (const lane of own.lanes.overviewLanes) for (const span of lane.spans.slice(0, 400)) {
    const color = waitReason(span, lane.group) ? "wait" : phaseColor(span[2]);
    if (!names.has(color)) names.set(color, color === "wait" ? "waits" : span[2].replace(/\s*[#v]?\d+$/, ""));
  }
  replace(own.phases, [...names].slice(0, 9).map(([color, name]) => h("span", { class: "phase" }, h("i", { class: `swatch${color === "wait" ? " hatched" : ""}`, style: { background: color === "wait" ? "" : color } }), name)));
}

function fillAges(own, data) {
  if (!data.steps.length) return replace(own.panels.ages, emptyState("No trained samples yet", "The map is filled from the ledger (run.sqlite) after the first update."));
  if (!own.panels.ages.contains(own.ages.element)) replace(own.panels.ages, own.ages.element);
  own.ages.setData({ ...data, steps: data.steps.map(shownStep) });
}

function fillFlow(own, data) {
  own.flowData = data;
  const diagram = flowDiagram(data.now ?? {});
  if (!diagram) return replace(own.panels.flow, emptyState("No episodes yet", "The ledger (run.sqlite) lists an episode as soon as it is admitted."));
  const series = FLOW_LINES.filter((name) => data[name]?.some((v) => v)).map((name) => ({ name, color: stateColor(name), x: data.steps.map(shownStep), y: data[name] }));
  own.flowChart.setData({ series, xKind: "integer", xName: "step" });
  const names = h("div", { class: "phases" }, series.map(({ name, color }) => h("span", {}, h("i", { class: "swatch", style: { background: color } }), name)));
  replace(own.panels.flow, diagram, data.steps.length > 1 ? [names, own.flowChart.element] : h("p", { class: "muted" }, `${count(data.steps.length)} steps so far`));
}

function loadServers(own, path) {
  return section(own.panels.servers, path("servers"), ({ servers }) => {
    own.serverData = servers;
    const filled = servers.some((server) => server.columns.time?.length);
    if (!servers.length) return replace(own.panels.servers, emptyState("No servers recorded", "Load and KV use are recorded while a run samples its servers. A run that ended before, or that had none, has no rows."));
    if (!own.panels.servers.contains(own.servers.element)) replace(own.panels.servers, own.servers.element);
    own.servers.setData(servers);
    if (!filled) own.panels.servers.append(h("p", { class: "muted" }, "The servers are known, but their load was not recorded."));
  });
}
