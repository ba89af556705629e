// Rollouts: a list of any length, of which only the visible rows exist, with filters, and the chosen rollout beside it.

import { address, get, runPath } from "./api.js";
import { debounce, emptyState, h, icon, perFrame, replace } from "./dom.js";
import { count, num } from "./format.js";
import { keep } from "./route.js";
import { RolloutDetail } from "./detail.js";
import { stepOf, storedStep } from "./steps.js";
import { oneLine, question } from "./text.js";

const [ROW, PAGE] = [62, 100];
// Browsers limit the height of an element; a longer list is cut there, and the filter leads to the rest.
const MAX_ROWS = Math.floor(16_000_000 / ROW);
const NUMBERS = [["min_reward", "reward ≥"], ["max_reward", "reward ≤"], ["min_tokens", "tokens ≥"], ["max_tokens", "tokens ≤"], ["step_from", "step ≥"], ["step_to", "step ≤"]];
const STATES = ["trained", "buffered", "stale", "rejected", "failed", "evaluated"];
const SORTS = [["step", "step"], ["reward", "reward"], ["tokens", "tokens"], ["oldest_version", "oldest version"], ["episode", "episode"]];
const FILTERS = ["text", "state", "source", ...NUMBERS.map(([name]) => name)];

export const keyOf = (row) => `${row.source}/${row.episode}/${row.sample}`;

export function rolloutsView(root, context) {
  const { run: id, params } = context.route();
  const own = { id, root, params: { ...params }, pages: new Map(), total: null, chosen: params.sel ?? null, generation: 0, abort: new AbortController(), sources: new Set(["stream", "submitted", "direct"]) };
  own.spacer = h("div", { class: "rows" });
  own.list = h("div", { class: "list", role: "grid", tabindex: 0, "aria-label": "Rollouts", onscroll: perFrame(() => drawRows(own)) }, own.spacer);
  own.status = h("span", { class: "muted num", role: "status" }, "loading…");
  own.fresh = h("button", { class: "button fresh", type: "button", hidden: true, onclick: () => { own.list.scrollTop = 0; reload(own); } });
  own.detail = new RolloutDetail(own, context, { close: () => choose(own, null), move: (step) => move(own, step), open: (key) => choose(own, key) });
  own.split = h("div", { class: "split" }, h("section", { class: "list-pane", "aria-label": "List of rollouts" }, filterBar(own), own.list, own.fresh), own.detail.element);
  root.append(own.split);
  own.resizes = new ResizeObserver(() => drawRows(own));
  own.resizes.observe(own.list);
  own.list.addEventListener("keydown", (event) => onKey(own, event));
  if (own.chosen) choose(own, own.chosen, false);
  reload(own).then(() => { if (!own.chosen && innerWidth > 1000) preview(own); });
  return {
    route(route) {
      if ([...FILTERS, "sort", "desc"].some((name) => (route.params[name] ?? "") !== (own.params[name] ?? ""))) {
        own.params = { ...route.params };
        replace(own.split.querySelector(".filters"), ...filterBar(own).childNodes);
        reload(own);
      }
      const sel = route.params.sel ?? null;
      if (sel !== own.chosen) choose(own, sel, false);
      else own.detail.setChoices(route.params);
    },
    tick: () => refresh(own),
    refresh: () => own.detail.paint(),
    destroy() { own.abort.abort(); own.resizes.disconnect(); own.detail.destroy(); },
    keys: [
      ["j", "Next rollout", () => move(own, 1)], ["k", "Previous rollout", () => move(own, -1)], ["f", "Filters", () => own.split.querySelector("[data-more]").click()],
      ["c", "Conversation", () => own.detail.show("conversation")], ["v", "Tokens", () => own.detail.show("tokens")], ["g", "Group", () => own.detail.show("group")],
      ["p", "Answers to this prompt across steps", () => own.detail.show("steps")],
    ],
  };
}

function filterBar(own) {
  const changed = debounce(() => { keep(Object.fromEntries([...FILTERS, "sort", "desc"].map((name) => [name, own.params[name]]))); own.list.scrollTop = 0; reload(own); showFilters(); }, 60);
  const field = (name, label, type) => h("input", {
    type, name, value: own.params[name] ?? "", placeholder: label, "aria-label": label, inputmode: type === "number" ? "decimal" : null, step: "any", autocomplete: "off", spellcheck: "false",
    oninput: (event) => { own.params[name] = event.target.value; changed(); },
  });
  const choice = (name, label, options) => h("select", { name, "aria-label": label, onchange: (event) => { own.params[name] = event.target.value; changed(); } },
    options.map(([value, text]) => h("option", { value, selected: (own.params[name] ?? "") === value ? "" : null }, text)));
  const csv = h("a", { class: "quiet", download: "rollouts.csv" }, icon("table"), "CSV");
  const more = h("div", { class: "more-filters", hidden: !NUMBERS.some(([name]) => own.params[name]) && !own.params.state && !own.params.source },
    NUMBERS.map(([name, label]) => field(name, label, "number")),
    choice("state", "State", [["", "any state"], ...STATES.map((s) => [s, s])]), choice("source", "Source", [["", "any source"], ...[...own.sources].map((s) => [s, s])]),
    h("button", { class: "quiet", type: "button", onclick: () => { for (const name of FILTERS) delete own.params[name]; keep(Object.fromEntries(FILTERS.map((n) => [n, null]))); replace(own.split.querySelector(".filters"), ...filterBar(own).childNodes); reload(own); } }, "Clear"),
    csv);
  const badge = h("b", { class: "badge" });
  const showFilters = () => {
    const active = FILTERS.slice(1).filter((name) => own.params[name]).length;
    badge.textContent = active;
    badge.hidden = !active;
    csv.href = address(runPath(own.id, "rollouts.csv"), query(own));
  };
  showFilters();
  const toggle = h("button", { class: "button", type: "button", dataset: { more: "" }, "aria-expanded": String(!more.hidden), onclick: () => { more.hidden = !more.hidden; toggle.setAttribute("aria-expanded", String(!more.hidden)); } }, "Filters", badge);
  const down = h("button", { class: "icon", type: "button", title: "Turn the order round", "aria-label": "Turn the order round", onclick: () => { own.params.desc = descending(own) ? "0" : "1"; down.classList.toggle("up", !descending(own)); changed(); } }, icon("chevron"));
  down.classList.toggle("up", !descending(own));
  return h("div", { class: "filters" },
    h("div", { class: "filter-line" }, field("text", "Search prompts and answers…", "search"), toggle),
    more,
    h("div", { class: "filter-line" }, own.status, h("span", { class: "spacer" }), h("span", { class: "muted" }, "by"), choice("sort", "Order", SORTS), down));
}

const descending = (own) => (own.params.desc ?? "1") !== "0";

function query(own) {
  const found = Object.fromEntries(FILTERS.map((name) => [name, name.startsWith("step_") ? storedStep(own.params[name]) : own.params[name]]));
  return { ...found, sort: own.params.sort || "step", desc: descending(own) ? 1 : 0 };
}

/**
 * Start the list again; rows of earlier answers are dropped only when the new ones are here. While a text that was just
 * typed is searched in all rollouts, the first that contain it are shown.
 */
async function reload(own, isAsked = true) {
  const generation = ++own.generation;
  own.abort.abort();
  own.abort = new AbortController();
  const began = performance.now();
  const first = Math.max(0, Math.floor(own.list.scrollTop / ROW / PAGE));
  const ask = (more) => get(runPath(own.id, "rollouts"), { ...query(own), limit: PAGE, ...more }, own.abort.signal);
  if (isAsked && own.params.text && !first) showFirst(own, generation, ask({ first: 1 }));
  try {
    const answer = await ask({ offset: first * PAGE });
    if (generation !== own.generation) return;
    own.generation += 1;
    own.fresh.hidden = true;
    own.status.title = `answered in ${Math.round(performance.now() - began)} ms`;
    showRows(own, answer, first);
  } catch (error) {
    if (error.name === "AbortError" || generation !== own.generation) return;
    own.generation += 1;
    own.total = 0;
    own.status.textContent = "";
    replace(own.spacer, emptyState("The rollouts cannot be read", error.message));
  }
}

async function showFirst(own, generation, asked) {
  // An error is told by the answer to the whole question.
  const answer = await asked.catch(() => null);
  if (generation === own.generation && answer?.rows.length) showRows(own, answer, 0);
}

/** Show the rows of an answer, which begin at page `first`. Without a total there may be more. */
function showRows(own, { total, rows }, first) {
  own.pages = new Map([[first, rows]]);
  own.total = total ?? rows.length;
  own.status.textContent = total === null ? `${count(rows.length)} so far, searching…` : `${count(total)} ${total === 1 ? "rollout" : "rollouts"}`;
  own.spacer.style.height = `${Math.min(MAX_ROWS, own.total) * ROW}px`;
  own.list.setAttribute("aria-rowcount", own.total);
  own.spacer.replaceChildren();
  if (!own.total) own.spacer.append(noRows(own));
  drawRows(own);
}

function noRows(own) {
  const filtered = FILTERS.some((name) => own.params[name]);
  return filtered ? emptyState("No rollout matches", "Loosen the filters, or clear them.")
    : emptyState("No rollouts recorded", "Prompts and answers are kept in run.sqlite once a batch was trained on. This run has none yet, or does not record them.");
}

/** A live run has more rows now: show them if the list is at its top, else offer them. */
async function refresh(own) {
  if (own.list.scrollTop === 0 && descending(own)) return reload(own, false);
  const { total } = await get(runPath(own.id, "rollouts"), { ...query(own), offset: 0, limit: 1 });
  if (own.total !== null && total > own.total) {
    own.fresh.textContent = `${count(total - own.total)} new`;
    own.fresh.hidden = false;
  }
}

async function loadPage(own, page) {
  const generation = own.generation;
  own.pages.set(page, null);
  try {
    const { rows } = await get(runPath(own.id, "rollouts"), { ...query(own), offset: page * PAGE, limit: PAGE }, own.abort.signal);
    if (generation !== own.generation) return;
    own.pages.set(page, rows);
    for (const old of own.pages.keys()) if (own.pages.size > 40 && Math.abs(old - page) > 15) own.pages.delete(old);
    drawRows(own);
  } catch (error) {
    if (generation === own.generation) own.pages.delete(page);
    if (error.name !== "AbortError") own.status.textContent = error.message;
  }
}

const rowAt = (own, index) => own.pages.get(Math.floor(index / PAGE))?.[index % PAGE];

function drawRows(own) {
  if (!own.total) return;
  const { scrollTop, clientHeight } = own.list;
  const first = Math.max(0, Math.floor(scrollTop / ROW) - 4);
  const last = Math.min(own.total, MAX_ROWS, Math.ceil((scrollTop + clientHeight) / ROW) + 4);
  const kept = new Map([...own.spacer.children].map((node) => [node.dataset.id, node]));
  const nodes = [];
  for (let i = first; i < last; i++) {
    const row = rowAt(own, i);
    const page = Math.floor(i / PAGE);
    if (!row && !own.pages.has(page)) loadPage(own, page);
    const id = row ? `${i} ${keyOf(row)}` : `${i}`;
    const node = kept.get(id) ?? makeRow(own, row, i, id);
    node.setAttribute("aria-selected", String(Boolean(row) && keyOf(row) === own.chosen));
    nodes.push(node);
  }
  const wanted = new Set(nodes);
  for (const node of [...own.spacer.children]) if (!wanted.has(node)) node.remove();
  for (const node of nodes) if (!node.isConnected) own.spacer.append(node);
}

export function rewardTone(reward) {
  return reward === null || reward === undefined ? "" : reward > 0.5 ? "good" : reward <= 0 ? "bad" : "warn";
}

function makeRow(own, row, index, id) {
  const style = { transform: `translateY(${index * ROW}px)` };
  if (!row) return h("div", { class: "row waiting", role: "row", style, dataset: { id } });
  own.sources.add(row.source);
  const age = row.newest_version - row.oldest_version;
  return h("div", { class: "row", role: "row", "aria-rowindex": index + 1, style, dataset: { id, key: keyOf(row) }, onclick: () => choose(own, keyOf(row)) },
    h("div", { class: "row-side", role: "gridcell" }, h("span", { class: `badge ${rewardTone(row.reward)} num` }, num(row.reward, 3)), h("span", { class: "muted num" }, row.step === null ? row.state ?? "" : stepOf(row).join(" "))),
    h("div", { class: "row-text", role: "gridcell" }, h("div", { class: "row-prompt" }, oneLine(question(row.prompt ?? ""))), h("div", { class: "row-answer" }, oneLine(row.completion ?? "") || "(empty)")),
    h("div", { class: "row-end muted num", role: "gridcell" }, h("span", {}, `${count(row.tokens)} tok`),
      h("span", {}, row.turns > 1 ? `${row.turns} turns` : "", row.images ? " ▣" : "", age > 0 ? h("span", { class: "badge warn", title: `written by versions ${row.oldest_version} to ${row.newest_version}` }, `Δ${age}`) : "")));
}

/** Show the first row without choosing it, so that the pane is not empty. */
function preview(own) {
  const row = rowAt(own, 0);
  if (row && !own.chosen) { own.chosen = keyOf(row); own.detail.load(own.chosen); own.split.classList.add("previewed"); drawRows(own); } else if (!row) own.detail.clear();
}

function choose(own, key, tell = true) {
  own.chosen = key;
  own.split.classList.toggle("opened", Boolean(key));
  own.split.classList.remove("previewed");
  if (tell) keep({ sel: key });
  if (key) own.detail.load(key);
  else own.detail.clear();
  drawRows(own);
}

function indexOf(own) {
  for (const [page, rows] of own.pages) {
    const at = rows?.findIndex((row) => keyOf(row) === own.chosen) ?? -1;
    if (at >= 0) return page * PAGE + at;
  }
  return -1;
}

function move(own, step) {
  const index = Math.max(0, Math.min(own.total - 1, indexOf(own) + step));
  const row = rowAt(own, index);
  const top = index * ROW;
  if (top < own.list.scrollTop) own.list.scrollTop = top;
  if (top + ROW > own.list.scrollTop + own.list.clientHeight) own.list.scrollTop = top + ROW - own.list.clientHeight;
  if (row) choose(own, keyOf(row));
}

function onKey(own, event) {
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
  if (step) move(own, step);
  else if (event.key === "Home") { own.list.scrollTop = 0; return; } else if (event.key === "End") own.list.scrollTop = own.list.scrollHeight;
  else return;
  event.preventDefault();
}
