// Config: the run's settings with search, and what differs from another run.

import { get, runPath } from "./api.js";
import { debounce, emptyState, h, replace, segmented } from "./dom.js";
import { keep } from "./route.js";
import { allRuns } from "./store.js";
import { visible } from "./text.js";

export function configView(root, context) {
  const { run: id, others, params } = context.route();
  const rest = allRuns().filter((run) => run.id !== id);
  const own = { find: params.find ?? "", other: rest.some((run) => run.id === params.against) ? params.against : others[0] ?? rest[0]?.id ?? null, mode: params.against || others.length ? "diff" : "all", yaml: null };
  const body = h("div", { class: "view-pad" });
  const search = h("input", { type: "search", placeholder: "Find a key or a value…", "aria-label": "Find in the configuration", value: own.find, oninput: debounce(() => { own.find = search.value; keep({ find: own.find }); render(); }, 80) });
  const select = h("select", { "aria-label": "Compare with", onchange: () => { own.other = select.value; own.mode = "diff"; mode.set("diff"); keep({ against: own.other }); render(); } },
    rest.map((run) => h("option", { value: run.id, selected: run.id === own.other ? "" : null }, run.name)));
  const mode = segmented("What to show", [["all", "All settings"], ["diff", "Difference"]], own.mode, (chosen) => { own.mode = chosen; keep({ against: chosen === "diff" ? own.other : null }); render(); });
  root.append(h("div", { class: "sticky toolbar" }, search, mode, rest.length ? h("label", {}, "against", select) : null), body);

  const render = async () => {
    try {
      if (own.mode === "diff") return await renderDiff(body, id, own, context);
      own.yaml ??= (await get(runPath(id, "config"))).yaml;
      renderYaml(body, own);
    } catch (error) {
      replace(body, emptyState("The configuration cannot be read", error.message));
    }
  };
  render();
  return {};
}

const matches = (text, words) => words.every((word) => text.toLowerCase().includes(word));

function renderYaml(body, own) {
  const words = own.find.toLowerCase().split(/\s+/).filter(Boolean);
  const path = [];
  const lines = (own.yaml ?? "").split("\n").map((line) => {
    const indent = line.search(/\S/);
    const key = /^\s*(?:- )?([^\s:#][^:]*):/.exec(line)?.[1];
    while (path.length && path.at(-1)[0] >= indent && indent >= 0) path.pop();
    if (key) path.push([indent, key]);
    return { line, full: path.map(([, name]) => name).join(".") };
  });
  const found = words.length ? lines.filter(({ line, full }) => matches(`${full} ${line}`, words)) : lines;
  if (!found.length) return replace(body, emptyState("No setting matches", `Nothing in config.yaml contains “${own.find}”.`));
  replace(body, h("pre", { class: "card yaml" }, found.slice(0, 5000).map(({ line, full }) => yamlLine(words.length ? line.trimStart() : line, words.length ? full : null))));
}

function yamlLine(line, full) {
  const [, indent, key, value] = /^(\s*(?:- )*)([^\s:#][^:]*:)?(.*)$/s.exec(line) ?? [null, "", "", line];
  const parent = full?.includes(".") ? h("span", { class: "muted" }, `${full.slice(0, full.lastIndexOf("."))}.`) : null;
  return h("div", {}, parent, indent, key ? h("span", { class: "yaml-key" }, visible(key)) : null, h("span", { class: /^\s*(null|''|\[\]|\{\})$/.test(value) ? "muted" : "" }, visible(value)), "\n");
}

async function renderDiff(body, id, own, context) {
  if (!own.other) return replace(body, emptyState("Only one run", "The difference needs a second run: start the dashboard with its folder too."));
  const { rows } = await get("compare", { a: id, b: own.other });
  const words = own.find.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter((row) => matches(`${row.key} ${row.a} ${row.b}`, words));
  if (!found.length) return replace(body, emptyState(rows.length ? "No difference matches" : "No difference", rows.length ? "Clear the search." : "Both runs have the same settings."));
  const cell = (value) => h("td", { class: "mono" }, value === null || value === undefined ? h("span", { class: "muted" }, "not set") : visible(typeof value === "object" ? JSON.stringify(value) : String(value)));
  replace(body, h("div", { class: "card table-wrap" }, h("table", { class: "diff-table" },
    h("thead", {}, h("tr", {}, h("th", {}, "Key"), h("th", {}, context.runName(id)), h("th", {}, context.runName(own.other)))),
    h("tbody", {}, found.slice(0, 3000).map((row) => h("tr", {}, h("th", { class: "mono", scope: "row" }, visible(String(row.key))), cell(row.a), cell(row.b)))))));
}
