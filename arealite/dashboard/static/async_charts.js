// Charts of asynchrony below the timeline: ages of samples, the flow of episodes, servers, who waited.

import { cssColor, h, hideTip, perFrame, replace, showTip, sizeCanvas, svg, tipRows } from "./dom.js";
import { count, duration, num, percent, tickLabel, ticks } from "./format.js";
import { heat, phaseColor, seriesColor, stateColor } from "./colors.js";
import { Chart } from "./chart.js";
import { waitReason } from "./lanes.js";

/** Colour of a share; the root keeps small ones visible. */
function heatColor(share) {
  const [r, g, b] = heat(Math.sqrt(share));
  return `rgb(${r} ${g} ${b})`;
}

/** Heat map of samples by step and age in versions. */
export class AgeMap {
  constructor() {
    this.data = { steps: [], ages: [], counts: [] };
    this.canvas = h("canvas", { role: "img" });
    this.legend = h("div", { class: "scale" });
    this.element = h("div", { class: "age-map" }, this.canvas, this.legend);
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
    const ctx = sizeCanvas(this.canvas, width, height);
    const size = (width - left - 6) / steps.length;
    const sums = counts.map((column) => Math.max(1, column.reduce((sum, value) => sum + value, 0)));
    counts.forEach((column, i) => ages.forEach((_, a) => {
      ctx.fillStyle = heatColor((column[a] ?? 0) / sums[i]);
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
    replace(this.legend, "age in versions (up), step (right); colour: share of the step's samples",
      [0, 0.25, 0.5, 1].map((share) => [h("i", { style: { background: heatColor(share) } }), percent(share)]));
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

// Where episodes go: [state, explanation, the node it comes from].
const FLOW = [
  ["accepted", "finished and put into the buffer", "admitted"], ["running", "being generated", "admitted"], ["rejected", "dropped by the filter", "admitted"],
  ["failed", "ended with an error", "admitted"], ["evaluated", "not for training", "admitted"],
  ["trained", "used for an update", "accepted"], ["buffered", "wait for a batch", "accepted"], ["stale", "too old, discarded", "accepted"],
];
const [FLOW_WIDTH, FLOW_ROOM, FLOW_GAP, FLOW_BAR, FLOW_THIN] = [520, 150, 16, 9, 5];

/** Flow diagram of all episodes: admitted, then what became of them, then what became of those in the buffer. */
export function flowDiagram(now) {
  const counts = { ...now, accepted: (now.trained ?? 0) + (now.buffered ?? 0) + (now.stale ?? 0) };
  const rows = FLOW.filter(([state]) => counts[state]);
  counts.admitted = rows.filter(([, , from]) => from === "admitted").reduce((sum, [state]) => sum + counts[state], 0);
  if (!counts.admitted) return null;
  // Small flows keep a visible height.
  const thick = (state) => Math.max(FLOW_THIN, (counts[state] / counts.admitted) * FLOW_ROOM);
  const nodes = { admitted: { x: 70, y: 0, size: 0, state: "admitted" } };
  const paths = [];
  for (const [from, x] of [["admitted", 236], ["accepted", 404]]) {
    const source = nodes[from];
    if (!source) continue;
    const members = rows.filter((row) => row[2] === from);
    source.size = Math.max(source.size, members.reduce((sum, [state]) => sum + thick(state), 0));
    // What leaves for good is drawn below what goes on.
    let [out, y] = [source.y, from === "accepted" ? source.y : 0];
    for (const [state, note] of members) {
      const size = thick(state);
      nodes[state] = { x, y, size, state, note };
      paths.push(ribbon(source, out, nodes[state]));
      out += size;
      y += Math.max(size, FLOW_GAP) + (size > FLOW_GAP ? 16 : 6);
    }
  }
  const height = Math.max(...Object.values(nodes).map((node) => node.y + Math.max(node.size, 18)));
  const label = `${count(counts.admitted)} episodes admitted: ${rows.map(([state]) => `${count(counts[state])} ${state}`).join(", ")}`;
  return svg("svg", { viewBox: `0 -12 ${FLOW_WIDTH} ${height + 24}`, class: "flow", role: "img", "aria-label": label }, paths, Object.values(nodes).map((node) => flowNode(node, counts)));
}

function ribbon(source, out, { x, y, size, state }) {
  const left = source.x + FLOW_BAR;
  const middle = (left + x) / 2;
  const d = `M${left} ${out} C${middle} ${out} ${middle} ${y} ${x} ${y} L${x} ${y + size} C${middle} ${y + size} ${middle} ${out + size} ${left} ${out + size} Z`;
  return svg("path", { d, fill: stateColor(state), "fill-opacity": 0.25 });
}

function flowNode({ x, y, size, state, note }, counts) {
  const first = state === "admitted";
  const place = first ? { x: x - 8, "text-anchor": "end" } : { x: x + FLOW_BAR + 7 };
  const share = percent(counts[state] / counts.admitted);
  return [
    svg("rect", { x, y, width: FLOW_BAR, height: size, rx: 2, fill: stateColor(state) }, svg("title", {}, note ?? "all episodes that were started")),
    svg("text", { ...place, y: y + size / 2 - (size > 24 ? 8 : 0), class: "flow-text" }, svg("tspan", { class: "flow-count" }, count(counts[state])), size > 24 ? null : svg("tspan", { dx: 5, class: "flow-state" }, state)),
    size > 24 ? svg("text", { ...place, y: y + size / 2 + 9, class: "flow-text flow-state" }, state, first ? null : svg("tspan", { dx: 5, class: "flow-note" }, share)) : null,
  ];
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
    // Such as the start-up, outside of the window.
    if (!phases.size) continue;
    const total = (end - start) * members.length;
    const top = [...reasons].sort((a, b) => b[1] - a[1])[0];
    const name = members.length > 1 ? `${members.length} ${members[0].group} lanes` : members[0].name.includes(members[0].group) ? members[0].name : `${members[0].group}: ${members[0].name}`;
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
      row.charts[i].setData({ series: known ? [{ name, color, x: server.columns.time, y }] : [], xKind: "duration", floor: name === "version" ? null : 0, ceiling: SERVER_COLUMNS[i][2] === percent ? 1 : null });
      this.#readout(row.charts[i], row.values[i], SERVER_COLUMNS[i][2], null);
    });
  }
}
