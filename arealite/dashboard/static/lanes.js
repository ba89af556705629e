// The timeline's canvas: lanes of spans over time with zoom and pan, an overview above, waits hatched.

import { cssColor, h, hideTip, perFrame, showTip, sizeCanvas, tipRows } from "./dom.js";
import { clock, duration, num, tickLabel, ticks } from "./format.js";
import { isDark, phaseColor } from "./colors.js";

export const GROUPS = { trainer: "Trainer", weights: "Weight updates", server: "Servers", rollout: "Rollout workers", reward: "Rewards" };
// The trace holds the first episodes and then a few per second: empty lanes are not idle workers.
const NOTES = { rollout: ", a sample of all episodes" };
const [AXIS, HEAD, LANE, THIN, GAP, OVERVIEW] = [24, 24, 22, 11, 2, 34];
const MIN_SPAN_S = 1e-5;
// Unix times in doubles are exact to a quarter of a microsecond.
const TOLERANCE_S = 2e-6;
const REASONS = [
  [/^wait: batch/, "waits for a batch: too few finished groups"],
  [/^wait: staleness limit/, "admits no episodes: the staleness limit is reached until the next update"],
  [/^wait: concurrency limit/, "admits no episodes: as many as allowed are running"],
];
const WAIT = /^(wait|idle|pause|block)/i;

/** Say why a span is a wait; null if it is work. */
export function waitReason(span, group) {
  const [, , name, args] = span;
  if (args?.reason) return String(args.reason);
  const known = REASONS.find(([pattern]) => pattern.test(name));
  if (known) return known[1];
  if (WAIT.test(name)) return name.replace(/^wait:\s*/i, "waits for ");
  // The trainer's phase `rollout` is the time until the next batch is complete.
  return group === "trainer" && name === "rollout" ? "waits for rollouts: the next batch is not complete" : null;
}

/** Give overlapping spans of a lane rows of their own: sets span.row, returns the number of rows. */
function stack(lane) {
  if (lane.rows) return lane.rows;
  lane.spans.sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  const ends = [];
  for (const span of lane.spans) {
    let row = ends.findIndex((end) => end <= span[0] + TOLERANCE_S);
    if (row < 0) row = ends.length < 4 ? ends.length : 3;
    ends[row] = Math.max(ends[row] ?? -Infinity, span[0] + span[1]);
    span.row = row;
  }
  return (lane.rows = Math.max(1, ends.length));
}

export class Lanes {
  /** `onwindow` is told [start, end] when the user moves it. */
  constructor({ onwindow }) {
    Object.assign(this, { onwindow, full: [0, 1], window: [0, 1], lanes: [], overviewLanes: [], folded: new Set(), boxes: [], drag: null, marks: [] });
    this.canvas = h("canvas");
    this.element = h("div", { class: "lanes", tabindex: 0, role: "application", "aria-label": "Timeline. w and s zoom, a and d move, 0 shows the whole run." }, this.canvas);
    this.paint = perFrame(() => this.#draw());
    this.resizes = new ResizeObserver(() => this.paint());
    this.resizes.observe(this.element);
    this.#listen();
  }

  destroy() { this.resizes.disconnect(); }

  /** Show the lanes of a window. `overview` replaces what is drawn above, and the whole range. */
  setData({ lanes, full, overview }) {
    if (full) this.full = full;
    if (overview) this.overviewLanes = lanes;
    const order = Object.keys(GROUPS);
    this.lanes = [...lanes].sort((a, b) => order.indexOf(a.group) - order.indexOf(b.group));
    this.paint();
  }

  setWindow(start, end, tell = true) {
    const [low, high] = this.full;
    const size = Math.max(MIN_SPAN_S, Math.min(end - start, high - low));
    const from = Math.max(low, Math.min(start, high - size));
    this.window = [from, from + size];
    if (tell) this.onwindow(this.window);
    this.paint();
  }

  zoom(factor, at = (this.window[0] + this.window[1]) / 2) {
    const [a, b] = this.window;
    this.setWindow(at - (at - a) * factor, at + (b - at) * factor);
  }

  pan(share) {
    const [a, b] = this.window;
    this.setWindow(a + (b - a) * share, b + (b - a) * share);
  }

  get left() { return this.element.clientWidth < 600 ? 84 : 150; }

  /** Rows from top to bottom: [{group} or {lane}, y, height]. */
  #layout() {
    const rows = [];
    let y = OVERVIEW + AXIS;
    for (const group of new Set(this.lanes.map((lane) => lane.group))) {
      const members = this.lanes.filter((lane) => lane.group === group);
      rows.push({ group, members, y, height: HEAD });
      y += HEAD;
      if (this.folded.has(group)) continue;
      const unit = members.length > 12 ? THIN : LANE;
      for (const lane of members) {
        const height = stack(lane) * unit;
        rows.push({ lane, y, height, unit });
        y += height + GAP;
      }
      y += 6;
    }
    return { rows, height: y + 6 };
  }

  #draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    const { rows, height } = this.#layout();
    const ctx = sizeCanvas(this.canvas, width, height);
    ctx.textBaseline = "middle";
    const [a, b] = this.window;
    const { left } = this;
    const toX = (t) => left + ((t - a) / (b - a)) * (width - left);
    this.toTime = (px) => a + ((px - left) / (width - left)) * (b - a);
    this.boxes = [];
    this.rows = rows;
    this.colors = Object.fromEntries(["text", "muted", "faint", "line", "grid", "surface", "sunken", "accent", "bad"].map((n) => [n, cssColor(`--${n}`)]));
    this.#axis(ctx, toX, width, height);
    for (const row of rows) if (row.lane) this.#lane(ctx, row, toX, width); else this.#head(ctx, row, toX, width);
    this.#overview(ctx, width);
  }

  #axis(ctx, toX, width, height) {
    const [a, b] = this.window;
    const origin = this.full[0];
    ctx.font = "11px Inter, system-ui, sans-serif";
    ctx.textAlign = "center";
    const found = ticks(a - origin, b - origin, (width - this.left) / 96, "duration");
    const step = found.length > 1 ? found[1] - found[0] : 1;
    for (const t of found) {
      const x = Math.round(toX(origin + t)) + 0.5;
      if (x < this.left) continue;
      ctx.strokeStyle = this.colors.grid;
      ctx.beginPath();
      ctx.moveTo(x, OVERVIEW + AXIS - 4);
      ctx.lineTo(x, height);
      ctx.stroke();
      ctx.fillStyle = this.colors.faint;
      if (x < width - 22) ctx.fillText(tickLabel(t, step, "duration"), Math.max(x, this.left + 14), OVERVIEW + AXIS / 2);
    }
  }

  #head(ctx, row, toX, width) {
    ctx.fillStyle = this.colors.sunken;
    ctx.fillRect(0, row.y, width, HEAD - 2);
    ctx.fillStyle = this.colors.text;
    ctx.textAlign = "left";
    ctx.font = "600 11px Inter, system-ui, sans-serif";
    const folded = this.folded.has(row.group);
    ctx.fillText(`${folded ? "▸" : "▾"} ${GROUPS[row.group] ?? row.group}`, 8, row.y + HEAD / 2 - 1);
    ctx.fillStyle = this.colors.muted;
    ctx.font = "11px Inter, system-ui, sans-serif";
    if (folded) for (const lane of row.members) this.#density(ctx, lane, row, toX, width);
    else if (width > 600) ctx.fillText(`${row.members.length} ${row.members.length > 1 ? "lanes" : "lane"}${NOTES[row.group] ?? ""}`, this.left + 6, row.y + HEAD / 2 - 1);
  }

  #density(ctx, lane, row, toX, width) {
    ctx.globalAlpha = Math.max(0.06, 0.9 / row.members.length);
    for (const span of lane.spans) {
      if (waitReason(span, lane.group)) continue;
      const x = Math.max(this.left, toX(span[0]));
      const end = Math.min(width, toX(span[0] + span[1]));
      if (end < this.left || x > width) continue;
      ctx.fillStyle = phaseColor(span[2]);
      ctx.fillRect(x, row.y + 3, Math.max(0.6, end - x), HEAD - 8);
    }
    ctx.globalAlpha = 1;
  }

  #lane(ctx, row, toX, width) {
    const { lane, unit } = row;
    const { left } = this;
    ctx.textAlign = "left";
    if (unit > 10) {
      ctx.font = `${unit === THIN ? 9.5 : 11}px Inter, system-ui, sans-serif`;
      ctx.fillStyle = this.colors.muted;
      ctx.save();
      ctx.beginPath();
      ctx.rect(0, row.y, left - 6, row.height);
      ctx.clip();
      const fits = ctx.measureText(lane.name).width <= left - 14;
      ctx.fillText(fits ? lane.name : lane.name.replace(/^(127\.0\.0\.1|localhost)(?=:)/, ""), 8, row.y + unit / 2 + 0.5);
      ctx.restore();
    }
    let lastX = -1;
    for (const span of lane.spans) {
      const x = Math.max(left, toX(span[0]));
      const end = Math.min(width, toX(span[0] + span[1]));
      if (end < left || x > width) continue;
      const w = Math.max(1, end - x - (end - x > 3 ? 1 : 0));
      // Spans narrower than a pixel on the same pixel are drawn once.
      if (w <= 1 && Math.round(x) === lastX && !span.row) continue;
      lastX = Math.round(x);
      this.#span(ctx, span, lane, x, row.y + (span.row ?? 0) * unit, w, unit - 1);
    }
  }

  #span(ctx, span, lane, x, y, w, height) {
    const reason = waitReason(span, lane.group);
    if (reason && w > 2) {
      ctx.fillStyle = this.colors.sunken;
      ctx.fillRect(x, y, w, height);
      ctx.fillStyle = this.#hatch(ctx);
    } else ctx.fillStyle = reason ? this.colors.faint : phaseColor(span[2]);
    if (w > 5) {
      ctx.beginPath();
      ctx.roundRect(x, y, w, height, 3);
      ctx.fill();
    } else ctx.fillRect(x, y, w, height);
    this.boxes.push({ x, y, w, height, span, lane, reason });
    if (w < 34 || height < 14) return;
    ctx.save();
    ctx.beginPath();
    ctx.rect(x + 2, y, w - 4, height);
    ctx.clip();
    ctx.font = "500 10.5px Inter, system-ui, sans-serif";
    const text = reason && w > 240 ? reason : span[2].replace(/^wait: /, "");
    if (reason) {
      const size = Math.min(ctx.measureText(text).width + 8, w - 4);
      ctx.fillStyle = this.colors.surface;
      ctx.globalAlpha = 0.85;
      ctx.fillRect(x + 2, y + 2, size, height - 4);
      ctx.globalAlpha = 1;
    }
    ctx.fillStyle = reason ? this.colors.muted : "#fff";
    ctx.fillText(text, x + 6, y + height / 2 + 0.5);
    ctx.restore();
  }

  #hatch(ctx) {
    const key = isDark();
    if (this.hatchKey !== key) {
      this.hatchKey = key;
      const tile = h("canvas", { width: 6, height: 6 });
      const own = tile.getContext("2d");
      own.strokeStyle = this.colors.faint;
      own.globalAlpha = 0.55;
      own.lineWidth = 1.1;
      for (const d of [-6, 0, 6]) { own.beginPath(); own.moveTo(d, 6); own.lineTo(d + 6, 0); own.stroke(); }
      this.hatchPattern = ctx.createPattern(tile, "repeat");
    }
    return this.hatchPattern;
  }

  /** The whole run in one strip: the share of lanes that work, by phase; the window is bright. */
  #overview(ctx, width) {
    const [low, high] = this.full;
    const { left } = this;
    const toX = (t) => left + ((t - low) / (high - low || 1)) * (width - left);
    ctx.fillStyle = this.colors.sunken;
    ctx.fillRect(left, 4, width - left, OVERVIEW - 8);
    const wanted = this.overviewLanes.filter((lane) => lane.group === "trainer" || lane.group === "server").slice(0, 9);
    const unit = (OVERVIEW - 10) / Math.max(1, wanted.length);
    wanted.forEach((lane, i) => {
      for (const span of lane.spans) {
        if (waitReason(span, lane.group)) continue;
        ctx.fillStyle = phaseColor(span[2]);
        ctx.fillRect(toX(span[0]), 5 + i * unit, Math.max(0.5, toX(span[0] + span[1]) - toX(span[0])), unit - 0.5);
      }
    });
    const [x0, x1] = this.window.map(toX);
    ctx.fillStyle = this.colors.surface;
    ctx.globalAlpha = 0.72;
    ctx.fillRect(left, 4, x0 - left, OVERVIEW - 8);
    ctx.fillRect(x1, 4, width - x1, OVERVIEW - 8);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = this.colors.accent;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x0 + 0.75, 4.5, Math.max(3, x1 - x0 - 1.5), OVERVIEW - 9);
    ctx.fillStyle = this.colors.muted;
    ctx.font = "11px Inter, system-ui, sans-serif";
    ctx.textAlign = "left";
    ctx.fillText("Whole run", 8, OVERVIEW / 2);
  }

  #listen() {
    const { element, canvas } = this;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    element.addEventListener("wheel", (event) => {
      const [x] = place(event);
      const sideways = event.shiftKey ? event.deltaY : event.deltaX;
      const zooms = event.ctrlKey || event.metaKey || document.activeElement === element;
      if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.pan(sideways / 800);
      else if (zooms && x >= this.left) this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), this.toTime(x));
      else return;
      event.preventDefault();
    }, { passive: false });
    const pointers = new Map();
    element.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const [x, y] = place(event);
      pointers.set(event.pointerId, x);
      const head = this.rows?.find((row) => row.group && y >= row.y && y < row.y + row.height);
      if (head) return this.#fold(head.group);
      const overview = y < OVERVIEW;
      this.drag = { x, window: [...this.window], overview, select: event.shiftKey && !overview };
      if (overview && x >= this.left) this.#centre(x);
      element.setPointerCapture(event.pointerId);
    });
    element.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (pointers.size === 2 && pointers.has(event.pointerId)) return this.#pinch(pointers, event.pointerId, x);
      if (!this.drag) return this.#hover(event, x, y);
      hideTip();
      if (this.drag.overview) return this.#centre(x);
      const shift = ((this.drag.x - x) / (element.clientWidth - this.left)) * (this.drag.window[1] - this.drag.window[0]);
      if (Math.abs(this.drag.x - x) > 3) this.drag.moved = true;
      if (!this.drag.select) this.setWindow(this.drag.window[0] + shift, this.drag.window[1] + shift);
    });
    const end = (event) => {
      pointers.delete(event.pointerId);
      const { drag } = this;
      this.drag = null;
      if (!drag?.select || !drag.moved) return;
      const [a, b] = [drag.x, place(event)[0]].sort((p, q) => p - q).map(this.toTime);
      this.setWindow(a, b);
    };
    element.addEventListener("pointerup", end);
    element.addEventListener("pointercancel", end);
    element.addEventListener("pointerleave", hideTip);
    element.addEventListener("dblclick", (event) => {
      const box = this.#at(...place(event));
      if (!box) return this.setWindow(...this.full);
      const [start, size] = box.span;
      this.setWindow(start - size * 0.3, start + size * 1.3);
    });
  }

  #fold(group) {
    if (!this.folded.delete(group)) this.folded.add(group);
    this.paint();
  }

  #centre(x) {
    const size = this.window[1] - this.window[0];
    const share = (x - this.left) / (this.element.clientWidth - this.left);
    const at = this.full[0] + share * (this.full[1] - this.full[0]);
    this.setWindow(at - size / 2, at + size / 2);
  }

  #pinch(pointers, moved, x) {
    const [other] = [...pointers].filter(([id]) => id !== moved).map(([, at]) => at);
    const before = Math.abs(pointers.get(moved) - other);
    pointers.set(moved, x);
    const after = Math.abs(x - other);
    this.drag = null;
    if (before > 8 && after > 8) this.zoom(before / after, this.toTime((x + other) / 2));
  }

  #at(x, y) {
    return this.boxes.findLast((box) => x >= box.x - 1 && x <= box.x + box.w + 1 && y >= box.y && y <= box.y + box.height);
  }

  #hover(event, x, y) {
    const box = this.#at(x, y);
    if (!box) return hideTip();
    const [start, size, name, args] = box.span;
    const rest = Object.entries(args ?? {}).filter(([key]) => key !== "reason").slice(0, 10);
    showTip(event.clientX, event.clientY, h("strong", {}, box.reason ? `${box.lane.name} waits` : `${name} · ${box.lane.name}`), box.reason ? h("p", {}, box.reason) : null,
      tipRows([["duration", duration(size)], ["starts at", `${duration(start - this.full[0])} (${clock(start)})`], ...rest.map(([key, value]) => [key, typeof value === "number" ? num(value, 5) : String(typeof value === "object" ? JSON.stringify(value) : value).slice(0, 300)])]));
  }
}
