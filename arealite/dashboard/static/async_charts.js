// Charts of asynchrony below the timeline: ages of samples, the flow of episodes, servers, who waited.

import { cssColor, h, hideTip, perFrame, replace, showTip, svg, tipRows } from "./dom.js";
import { count, duration, num, percent, tickLabel, ticks } from "./format.js";
import { heat, phaseColor, seriesColor, stateColor } from "./colors.js";
import { Chart } from "./chart.js";
import { waitReason } from "./lanes.js";

/** Heat map of samples by step and age in versions. */
export class AgeMap {
  constructor() {
    this.data = { steps: [], ages: [], counts: [] };
    this.canvas = h("canvas", { role: "img" });
    this.element = h("div", { class: "age-map" }, this.canvas);
    this.paint = perFrame(() => this.#draw());
    this.resizes = new ResizeObserver(() => this.paint());
    this.resizes.observe(this.element);
    this.element.addEventListener("pointermove", (event) => this.#hover(event));
    this.element.addEventListener("pointerleave", hideTip);
  }

  destroy() { this.resizes.disconnect(); }

  setData(data) {
    this.data = data;
    const sums = data.ages.map((_, a) => data.counts.reduce((sum, column) => sum + (column[a] ?? 0), 0));
    this.canvas.setAttribute("aria-label", `Samples by age in versions: ${data.ages.map((age, a) => `age ${age}: ${count(sums[a])}`).join(", ")}`);
    this.paint();
  }

  #draw() {
    const { steps, ages, counts } = this.data;
    const width = this.element.clientWidth;
    const row = Math.max(12, Math.min(26, 190 / Math.max(1, ages.length)));
    const [left, bottom] = [34, 22];
    const height = ages.length * row + bottom + 4;
    if (!width || !steps.length) return;
    const ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const top = Math.log1p(Math.max(1, ...counts.flat()));
    const size = (width - left - 6) / steps.length;
    counts.forEach((column, i) => ages.forEach((_, a) => {
      const [r, g, b] = heat(Math.log1p(column[a] ?? 0) / top);
      ctx.fillStyle = `rgb(${r} ${g} ${b})`;
      ctx.fillRect(left + i * size, 2 + (ages.length - 1 - a) * row, size + 0.6, row - 1);
    }));
    ctx.font = "11px Inter, system-ui, sans-serif";
    ctx.fillStyle = cssColor("--faint");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const skip = Math.ceil(14 / row);
    ages.forEach((age, a) => { if (a % skip === 0) ctx.fillText(String(age), left - 7, 2 + (ages.length - 0.5 - a) * row); });
    ctx.textAlign = "center";
    const xs = ticks(steps[0], steps.at(-1), width / 90, "integer");
    for (const x of xs) {
      const at = steps.findIndex((s) => s >= x);
      if (at >= 0) ctx.fillText(tickLabel(x, 1), Math.min(width - 16, left + (at + 0.5) * size), height - 9);
    }
    this.place = { left, size, row };
  }

  #hover(event) {
    if (!this.place) return;
    const box = this.canvas.getBoundingClientRect();
    const { left, size, row } = this.place;
    const { steps, ages, counts } = this.data;
    const i = Math.floor((event.clientX - box.left - left) / size);
    const a = ages.length - 1 - Math.floor((event.clientY - box.top - 2) / row);
    if (i < 0 || i >= steps.length || a < 0 || a >= ages.length) return hideTip();
    const all = counts[i].reduce((x, y) => x + y, 0);
    showTip(event.clientX, event.clientY, h("strong", {}, `step ${steps[i]}`),
      tipRows([["age", `${ages[a]} versions`], ["samples", count(counts[i][a] ?? 0)], ["share of the step", all ? percent((counts[i][a] ?? 0) / all) : "–"]]));
  }
}

const FLOW_STATES = ["running", "buffered", "trained", "stale", "rejected", "failed", "evaluated"];
const FLOW_TEXT = {
  running: "being generated", buffered: "wait for a batch", trained: "used for an update", stale: "too old, discarded",
  rejected: "by the filter", failed: "raised an error", evaluated: "not for training",
};

/** Flow diagram of all episodes: admitted on the left, what became of them on the right. */
export function flowDiagram(now) {
  const states = FLOW_STATES.filter((state) => now[state]);
  const total = states.reduce((sum, state) => sum + now[state], 0);
  if (!total) return null;
  const [width, height, gap, bar] = [560, Math.max(150, 34 * states.length), 10, 10];
  const room = height - gap * (states.length - 1);
  // Small flows keep a visible height; the rest is shared in proportion.
  const floor = 16;
  const small = states.filter((state) => (now[state] / total) * room < floor);
  const rest = states.filter((state) => !small.includes(state)).reduce((sum, state) => sum + now[state], 0);
  const thick = (state) => (small.includes(state) ? floor : (now[state] / rest) * (room - floor * small.length));
  const left = 118;
  const right = 330;
  const children = [];
  let source = (height - room) / 2;
  let y = 0;
  const start = source;
  for (const state of states) {
    const size = thick(state);
    const middle = (left + bar + right) / 2;
    const path = `M${left + bar} ${source} C${middle} ${source} ${middle} ${y} ${right} ${y} L${right} ${y + size} C${middle} ${y + size} ${middle} ${source + size} ${left + bar} ${source + size} Z`;
    const color = stateColor(state);
    children.push(svg("path", { d: path, fill: color, "fill-opacity": 0.28 }), svg("rect", { x: right, y, width: bar, height: size, rx: 2, fill: color }));
    const text = svg("text", { x: right + bar + 10, y: y + size / 2, class: "flow-text" },
      svg("tspan", { class: "flow-count" }, count(now[state])), svg("tspan", { dx: 6, class: "flow-state" }, state), svg("tspan", { dx: 6, class: "flow-note" }, `${percent(now[state] / total)}`));
    text.append(svg("title", {}, FLOW_TEXT[state]));
    children.push(text);
    source += size;
    y += size + gap;
  }
  children.push(svg("rect", { x: left, y: start, width: bar, height: source - start, rx: 2, fill: stateColor("admitted") }));
  children.push(svg("text", { x: left - 10, y: height / 2 - 8, class: "flow-text", "text-anchor": "end" }, svg("tspan", { class: "flow-count" }, count(total))));
  children.push(svg("text", { x: left - 10, y: height / 2 + 9, class: "flow-text flow-state", "text-anchor": "end" }, "admitted"));
  const label = `${count(total)} episodes admitted: ${states.map((s) => `${count(now[s])} ${s}`).join(", ")}`;
  return svg("svg", { viewBox: `0 -4 ${width} ${height + 8}`, class: "flow", role: "img", "aria-label": label }, children);
}

/** Table of lanes with the share of each phase in the window, and the reasons for waiting. */
export function waitTable(lanes, [start, end], max = 12) {
  const inside = (span) => Math.max(0, Math.min(end, span[0] + span[1]) - Math.max(start, span[0]));
  const rows = [];
  const groups = new Map();
  for (const lane of lanes) {
    const key = lane.group === "rollout" || lane.group === "reward" ? lane.group : lane.id;
    groups.set(key, [...(groups.get(key) ?? []), lane]);
  }
  for (const members of [...groups.values()].slice(0, max)) {
    const phases = new Map();
    const reasons = new Map();
    for (const lane of members) {
      for (const span of lane.spans) {
        const seconds = inside(span);
        if (!seconds || span.row) continue;
        const reason = waitReason(span, lane.group);
        const name = reason ? "wait" : span[2].replace(/\s*[#\d]+$/, "");
        phases.set(name, (phases.get(name) ?? 0) + seconds);
        if (reason) reasons.set(reason.replace(/\d+ of \d+/g, "some"), (reasons.get(reason.replace(/\d+ of \d+/g, "some")) ?? 0) + seconds);
      }
    }
    const total = (end - start) * members.length;
    const top = [...reasons].sort((a, b) => b[1] - a[1])[0];
    const name = members.length > 1 ? `${members.length} ${members[0].group} lanes` : members[0].name;
    rows.push({ name, total, phases: [...phases].sort((a, b) => (a[0] === "wait") - (b[0] === "wait") || b[1] - a[1]), waits: phases.get("wait") ?? 0, top });
  }
  return h("div", { class: "waits" }, rows.map((row) => h("div", { class: "wait-row" },
    h("span", { class: "wait-name" }, row.name), shareBar(row),
    h("span", { class: "num wait-share" }, row.waits ? `waits ${percent(row.waits / row.total)}` : ""),
    h("span", { class: "muted wait-why" }, row.top ? row.top[0] : ""))));
}

function shareBar({ phases, total }) {
  const bar = h("div", { class: "share-bar" }, phases.slice(0, 8).map(([name, seconds]) => h("i", {
    class: name === "wait" ? "hatched" : "", style: { width: `${Math.min(100, (seconds / total) * 100)}%`, background: name === "wait" ? "" : phaseColor(name) },
  })));
  bar.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, tipRows(phases.slice(0, 8).map(([name, s]) => [name, `${percent(s / total)} · ${duration(s)}`, name === "wait" ? "" : phaseColor(name)]))));
  bar.addEventListener("pointerleave", hideTip);
  return bar;
}

const SERVER_COLUMNS = [["running", "Running", num], ["waiting", "Waiting", num], ["kv_used", "KV cache", percent], ["prefix_hits", "Prefix hits", percent], ["tokens_per_s", "Tokens/s", num], ["version", "Version", num]];

/** One row of small charts per server; charts are kept over updates. */
export class ServerTable {
  constructor(group) {
    this.group = group;
    this.rows = new Map();
    this.element = h("div", { class: "servers" });
  }

  destroy() { for (const row of this.rows.values()) for (const chart of row.charts) chart.destroy(); }

  setData(servers) {
    const names = servers.map((server) => server.name).join("\n");
    if (names !== this.names) {
      this.destroy();
      this.rows.clear();
      this.names = names;
      replace(this.element, servers.slice(0, 64).map((server) => this.#row(server)));
    }
    for (const server of servers.slice(0, 64)) this.#fill(server);
  }

  #row(server) {
    const charts = SERVER_COLUMNS.map(([, label]) => new Chart({ height: 34, compact: true, label: `${server.name} ${label}`, group: this.group }));
    const values = SERVER_COLUMNS.map(() => h("b", { class: "num" }));
    charts.forEach((chart, i) => { chart.onreadout = (x) => this.#readout(chart, values[i], SERVER_COLUMNS[i][2], x); });
    const address = h("span", { class: "muted mono" });
    this.rows.set(server.name, { charts, values, address });
    return h("div", { class: "server" }, h("div", { class: "server-name" }, h("strong", {}, server.name), address),
      SERVER_COLUMNS.map(([, label], i) => h("div", { class: "server-cell" }, h("span", { class: "muted" }, label, values[i]), charts[i].element)));
  }

  #readout(chart, node, form, x) {
    const one = chart.data.series[0];
    if (!one) { node.textContent = "–"; return; }
    let at = one.y.findLastIndex((v) => v !== null);
    if (x !== null) at = one.x.findLastIndex((t) => t <= x);
    node.textContent = at < 0 || one.y[at] === null ? "–" : form(one.y[at], 3);
  }

  #fill(server) {
    const row = this.rows.get(server.name);
    row.address.textContent = server.address && server.address !== server.name ? server.address : "";
    SERVER_COLUMNS.forEach(([name], i) => {
      const y = server.columns[name];
      const color = seriesColor(i);
      const known = y?.some((v) => v !== null && v !== undefined);
      row.charts[i].setData({ series: known ? [{ name, color, x: server.columns.time, y }] : [], xKind: "duration" });
      this.#readout(row.charts[i], row.values[i], SERVER_COLUMNS[i][2], null);
    });
  }
}
