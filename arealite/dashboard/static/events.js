// Events: alarms and what else happened to the run, newest first, each with a link to its place on the curves.

import { debounce, emptyState, h, replace, segmented } from "./dom.js";
import { dateTime, duration } from "./format.js";
import { keep, format } from "./route.js";
import { eventsOf, findRun, loadEvents } from "./store.js";
import { longText } from "./text.js";

const LEVELS = [["all", "All"], ["alarm", "Alarms"], ["warning", "Warnings"], ["info", "Info"]];
const MAX_SHOWN = 500;

export function eventsView(root, context) {
  const { run: id, params } = context.route();
  const own = { level: LEVELS.some(([name]) => name === params.level) ? params.level : "all", find: params.find ?? "", shown: "" };
  const list = h("ol", { class: "events" });
  const status = h("span", { class: "muted num", role: "status" });
  const search = h("input", { type: "search", placeholder: "Find in events…", "aria-label": "Find in events", value: own.find, oninput: debounce(() => { own.find = search.value; keep({ find: own.find }); render(); }, 80) });
  const levels = segmented("Level", LEVELS, own.level, (level) => { own.level = level; keep({ level: level === "all" ? null : level }); render(); });
  root.append(h("div", { class: "sticky toolbar" }, search, levels, status), h("div", { class: "view-pad" }, list));

  const render = () => {
    const all = eventsOf(id);
    const words = own.find.toLowerCase();
    const found = all.filter((row) => (own.level === "all" || row.level === own.level) && `${row.kind} ${row.text}`.toLowerCase().includes(words)).reverse();
    status.textContent = found.length > MAX_SHOWN ? `the newest ${MAX_SHOWN} of ${found.length}` : `${found.length} of ${all.length}`;
    const key = found.slice(0, MAX_SHOWN).map((row) => `${row.time}${row.kind}`).join();
    if (key === own.shown && key) return;
    own.shown = key;
    if (!found.length) {
      return replace(list, all.length ? emptyState("No event matches", "Choose another level or clear the search.")
        : emptyState("No events", "Alarms, lost servers and recoveries of this run appear here. Nothing happened so far."));
    }
    replace(list, found.slice(0, MAX_SHOWN).map((row) => eventItem(row, id, context)));
  };
  const load = () => loadEvents(id).then(render);
  load().catch((error) => replace(list, emptyState("The events cannot be read", error.message)));
  return { tick: load };
}

function eventItem(row, id, context) {
  // A run directory that was copied is younger than its events.
  const started = Math.min(findRun(id)?.started ?? Infinity, eventsOf(id)[0].time);
  const at = row.step === null || row.step === undefined ? null
    : h("a", { class: "badge", href: format({ ...context.route(), view: "curves", params: {} }), title: "To the curves, where alarms are marked" }, `step ${row.step}`);
  const where = h("a", { class: "badge", href: format({ ...context.route(), view: "rollouts", params: { step_from: row.step, step_to: row.step } }), title: "Rollouts of this step" }, "rollouts");
  return h("li", { class: `event card ${["alarm", "warning"].includes(row.level) ? row.level : "info"}` },
    h("div", { class: "event-head" }, h("span", { class: `badge ${row.level === "alarm" ? "bad" : row.level === "warning" ? "warn" : ""}` }, row.level), row.kind === row.level ? null : h("strong", {}, row.kind), at, at ? where : null, h("span", { class: "spacer" }),
      h("time", { class: "muted num", title: dateTime(row.time) }, `+${duration(row.time - started)} · ${dateTime(row.time)}`)),
    longText(row.text));
}
