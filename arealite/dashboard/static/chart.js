// Line charts on a canvas: bands, marks, log axis, crosshair and zoom shared by a group of charts, PNG and CSV export.

import { cssColor, download, h, hideTip, perFrame, showTip, tipRows } from "./dom.js";
import { num, tickLabel, ticks } from "./format.js";
import { extent, nearest, smooth, tracePath } from "./series.js";

const FONT = "11px Inter, ui-sans-serif, system-ui, sans-serif";
const PAD = { left: 36, right: 12, top: 12, bottom: 22 };
const measure = h("canvas").getContext("2d");
measure.font = FONT;

/** Charts that share crosshair and zoom. */
export class ChartGroup {
  charts = new Set();
  hover = null;
  range = null;
  onzoom = null;

  setHover(x) {
    if (this.hover === x) return;
    this.hover = x;
    for (const chart of this.charts) chart.paintOverlay();
  }

  setRange(range) {
    this.range = range;
    this.onzoom?.(range);
    for (const chart of this.charts) chart.paint();
  }
}

const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.chart.seen(isIntersecting);
}, { rootMargin: "200px" });
const resizes = new ResizeObserver((entries) => { for (const { target } of entries) target.chart.paint(); });

/** Return [value, label] of the lines of the y axis. With a log axis, y0 and y1 are logarithms. */
function yTicks(y0, y1, log, height) {
  if (log && y1 - y0 >= 1) return ticks(y0, y1, 4, y1 - y0 > 3 ? "integer" : "number").map((v) => [10 ** v, num(10 ** v, 2)]);
  const ys = log ? ticks(10 ** y0, 10 ** y1, 4) : ticks(y0, y1, Math.max(2, height / 30));
  const step = ys.length > 1 ? ys[1] - ys[0] : 1;
  return ys.map((y) => [y, log ? num(y, 2) : tickLabel(y, step)]);
}

export class Chart {
  /** `height` in pixels; `group` shares crosshair and zoom; `compact` leaves axes out; `onreadout` is told x or null. */
  constructor({ group = new ChartGroup(), height = 172, onreadout = null, label = "chart", compact = false } = {}) {
    Object.assign(this, { group, onreadout, label, compact, visible: false, dirty: true, drag: null });
    this.data = { series: [], marks: [], xKind: "integer", smoothing: 0, log: false, floor: null, ceiling: null };
    this.base = h("canvas");
    this.overlay = h("canvas");
    this.element = h("div", { class: "chart", tabindex: 0, role: "img", style: { height: `${height}px` } }, this.base, this.overlay);
    this.element.chart = this;
    this.paint = perFrame(() => this.#draw());
    this.paintOverlay = perFrame(() => this.#drawOverlay());
    this.#listen();
    group.charts.add(this);
    observer.observe(this.element);
    resizes.observe(this.element);
  }

  destroy() {
    this.group.charts.delete(this);
    observer.unobserve(this.element);
    resizes.unobserve(this.element);
  }

  /** series: [{name, color, x, y, dash?, low?, high?, points?}]; marks: [{x, text, level}]; xKind: integer, number or duration;
   *  the y axis reaches at least from floor to ceiling. */
  setData(data) {
    this.data = { ...this.data, ...data };
    for (const one of this.data.series) one.shown = smooth(one.y, this.data.smoothing && !one.points ? this.data.smoothing : 0);
    this.paint();
    const texts = this.data.series.slice(0, 8).map((s) => `${s.name} ${num(s.y.findLast((v) => v !== null) ?? null)}`);
    this.element.setAttribute("aria-label", `${this.label}: last values ${texts.join(", ") || "none"}. Arrow keys move the crosshair.`);
  }

  seen(visible) {
    this.visible = visible;
    if (visible && this.dirty) this.paint();
  }

  #draw() {
    this.dirty = !this.visible;
    if (!this.visible) return;
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    for (const canvas of [this.base, this.overlay]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const ctx = this.base.getContext("2d");
    ctx.scale(ratio, ratio);
    this.scale = this.#render(ctx, width, height);
    this.#drawOverlay();
  }

  #scales(width, height) {
    const { series, log } = this.data;
    const pad = this.compact ? { left: 1, right: 1, top: 3, bottom: 3 } : { ...PAD };
    let [x0, x1] = this.group.range ?? [Infinity, -Infinity];
    if (!this.group.range) {
      for (const { x } of series) if (x.length) { x0 = Math.min(x0, x[0] ?? Infinity); x1 = Math.max(x1, x.at(-1) ?? -Infinity); }
    }
    let y0 = Infinity;
    let y1 = -Infinity;
    for (const one of series) {
      for (const values of [one.shown, one.low, one.high]) {
        if (!values) continue;
        const [low, high] = extent(one.x, values, [x0, x1], log);
        y0 = Math.min(y0, low);
        y1 = Math.max(y1, high);
      }
    }
    if (!(x1 >= x0) || !(y1 >= y0)) return null;
    y0 = Math.min(y0, this.data.floor ?? y0);
    y1 = Math.max(y1, this.data.ceiling ?? y1);
    if (x1 === x0) { x0 -= 0.5; x1 += 0.5; }
    if (log) { y0 = Math.log10(y0); y1 = Math.log10(y1); }
    // A constant stays one, whatever smoothing does to its last digits.
    const flat = y1 - y0 <= 1e-9 * Math.max(Math.abs(y0), Math.abs(y1));
    const margin = flat ? Math.abs(y0) * 0.1 || 0.5 : (y1 - y0) * 0.07;
    // A margin must not suggest negative values where there are none.
    const floor = !log && y0 >= 0 && y0 - margin < 0 ? 0 : y0 - margin;
    [y0, y1] = [floor, y1 + margin];
    const yLabels = this.compact ? [] : yTicks(y0, y1, log, height - pad.top - pad.bottom);
    for (const [, label] of yLabels) pad.left = Math.max(pad.left, measure.measureText(label).width + 12);
    const inner = { width: width - pad.left - pad.right, height: height - pad.top - pad.bottom };
    return {
      x0, x1, yLabels, pad, inner, width, height,
      toX: (x) => pad.left + ((x - x0) / (x1 - x0)) * inner.width,
      toY: (y) => (log && y <= 0 ? null : pad.top + inner.height - (((log ? Math.log10(y) : y) - y0) / (y1 - y0)) * inner.height),
      fromX: (px) => x0 + ((px - pad.left) / inner.width) * (x1 - x0),
    };
  }

  #render(ctx, width, height) {
    ctx.font = FONT;
    const scale = this.#scales(width, height);
    if (!scale) {
      ctx.fillStyle = cssColor("--faint");
      ctx.textAlign = "center";
      const filled = this.data.series.some((s) => s.y.some((v) => v !== null));
      ctx.fillText(!filled ? "no values yet" : this.data.log ? "no positive values in this range" : "no values in this range", width / 2, height / 2);
      return null;
    }
    if (!this.compact) this.#axes(ctx, scale);
    ctx.save();
    ctx.beginPath();
    ctx.rect(scale.pad.left - 4, 0, scale.inner.width + 8, height - scale.pad.bottom + 4);
    ctx.clip();
    this.#marks(ctx, scale);
    for (const one of this.data.series) this.#line(ctx, scale, one);
    ctx.restore();
    return scale;
  }

  #axes(ctx, { x0, x1, yLabels, pad, inner, toX, toY, height }) {
    const { xKind } = this.data;
    ctx.strokeStyle = cssColor("--grid");
    ctx.fillStyle = cssColor("--faint");
    ctx.lineWidth = 1;
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    for (const [y, label] of yLabels) {
      const py = Math.round(toY(y) ?? -9) + 0.5;
      if (py < pad.top - 2 || py > pad.top + inner.height + 1) continue;
      ctx.beginPath();
      ctx.moveTo(pad.left, py);
      ctx.lineTo(pad.left + inner.width, py);
      ctx.stroke();
      ctx.fillText(label, pad.left - 7, py);
    }
    ctx.textBaseline = "alphabetic";
    ctx.textAlign = "center";
    const xs = ticks(x0, x1, Math.max(2, inner.width / 58), xKind);
    const xStep = xs.length > 1 ? xs[1] - xs[0] : 1;
    for (const x of xs) {
      const px = toX(x);
      if (px > pad.left + inner.width - 8) ctx.textAlign = "right";
      ctx.fillText(tickLabel(x, xStep, xKind), Math.min(px, pad.left + inner.width + 8), height - 6);
      ctx.textAlign = "center";
    }
  }

  #marks(ctx, { toX, pad, inner }) {
    for (const { x, level } of this.data.marks) {
      if (x === null) continue;
      const px = Math.round(toX(x)) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = cssColor(level === "alarm" ? "--bad" : "--warn");
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([2, 3]);
      ctx.beginPath();
      ctx.moveTo(px, pad.top);
      ctx.lineTo(px, pad.top + inner.height);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(px - 4.5, pad.top - 8);
      ctx.lineTo(px + 4.5, pad.top - 8);
      ctx.lineTo(px, pad.top);
      ctx.fill();
    }
  }

  #line(ctx, { toX, toY, inner }, one) {
    ctx.strokeStyle = ctx.fillStyle = one.color;
    ctx.lineJoin = "round";
    if (one.low && one.high) {
      ctx.globalAlpha = 0.14;
      ctx.beginPath();
      const known = one.x.map((x, i) => [x, one.low[i], one.high[i]]).filter(([, low, high]) => low !== null && high !== null && toY(low) !== null);
      known.forEach(([x, , high], i) => (i ? ctx.lineTo(toX(x), toY(high)) : ctx.moveTo(toX(x), toY(high))));
      known.reverse().forEach(([x, low]) => ctx.lineTo(toX(x), toY(low)));
      ctx.fill();
      ctx.globalAlpha = 0.7;
      ctx.lineWidth = 1.2;
      for (const [x, low, high] of known) { ctx.beginPath(); ctx.moveTo(toX(x), toY(low)); ctx.lineTo(toX(x), toY(high)); ctx.stroke(); }
      ctx.globalAlpha = 1;
    }
    ctx.setLineDash(one.dash ?? []);
    // Many raw lines over each other only hide the smooth ones.
    if (one.shown !== one.y && this.data.series.length <= 4) {
      ctx.globalAlpha = 0.2;
      ctx.lineWidth = 1;
      tracePath(ctx, one.x, one.y, toX, toY, inner.width);
      ctx.globalAlpha = 1;
    }
    ctx.lineWidth = this.compact ? 1.3 : 1.7;
    tracePath(ctx, one.x, one.shown, toX, toY, inner.width);
    ctx.setLineDash([]);
    const single = one.y.filter((v) => v !== null).length === 1;
    if (!one.points && !single) return;
    one.x.forEach((x, i) => {
      const py = one.y[i] === null ? null : toY(one.y[i]);
      if (py === null) return;
      ctx.beginPath();
      ctx.arc(toX(x), py, 3, 0, 7);
      ctx.fill();
    });
  }

  #drawOverlay() {
    const { scale } = this;
    if (!this.visible) return;
    const ctx = this.overlay.getContext("2d");
    const ratio = devicePixelRatio || 1;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, this.element.clientWidth, this.element.clientHeight);
    const x = this.group.hover;
    this.onreadout?.(x);
    if (!scale) return;
    if (this.drag?.moved) {
      ctx.fillStyle = cssColor("--accent");
      ctx.globalAlpha = 0.15;
      ctx.fillRect(Math.min(this.drag.from, this.drag.to), scale.pad.top, Math.abs(this.drag.to - this.drag.from), scale.inner.height);
      ctx.globalAlpha = 1;
    }
    if (x === null || x < scale.x0 || x > scale.x1) return;
    ctx.strokeStyle = cssColor("--faint");
    ctx.beginPath();
    ctx.moveTo(Math.round(scale.toX(x)) + 0.5, scale.pad.top);
    ctx.lineTo(Math.round(scale.toX(x)) + 0.5, scale.pad.top + scale.inner.height);
    ctx.stroke();
    for (const one of this.data.series) {
      const i = nearest(one.x, one.y, x);
      const py = i < 0 ? null : scale.toY(one.shown[i]);
      if (py === null) continue;
      ctx.fillStyle = one.color;
      ctx.strokeStyle = cssColor("--surface");
      ctx.lineWidth = 2;
      ctx.beginPath();
      ctx.arc(scale.toX(one.x[i]), py, 4, 0, 7);
      ctx.fill();
      ctx.stroke();
    }
  }

  #snap(px) {
    const x = this.scale.fromX(px);
    const first = this.data.series.find((s) => s.x.length);
    const i = first ? nearest(first.x, first.y, x) : -1;
    return i < 0 ? x : first.x[i];
  }

  #listen() {
    const { element } = this;
    const inside = (event) => event.clientX - element.getBoundingClientRect().left;
    element.addEventListener("pointermove", (event) => {
      if (!this.scale) return;
      if (this.drag) {
        this.drag.to = Math.max(this.scale.pad.left, Math.min(this.scale.pad.left + this.scale.inner.width, inside(event)));
        this.drag.moved ||= Math.abs(this.drag.to - this.drag.from) > 5;
        hideTip();
        return this.paintOverlay();
      }
      this.group.setHover(this.#snap(inside(event)));
      this.#tip(event.clientX, event.clientY);
    });
    element.addEventListener("pointerleave", () => { this.group.setHover(null); hideTip(); });
    element.addEventListener("pointerdown", (event) => {
      if (event.button || !this.scale || this.compact || event.pointerType === "touch") return;
      this.drag = { from: inside(event), to: inside(event), moved: false };
      element.setPointerCapture(event.pointerId);
    });
    const end = (event) => {
      const { drag, scale } = this;
      this.drag = null;
      if (!drag?.moved || event.type === "pointercancel") return this.paintOverlay();
      const [a, b] = [drag.from, drag.to].sort((p, q) => p - q).map(scale.fromX);
      if (b > a) this.group.setRange([a, b]);
    };
    element.addEventListener("pointerup", end);
    element.addEventListener("pointercancel", end);
    element.addEventListener("dblclick", () => this.group.setRange(null));
    element.addEventListener("blur", () => { this.group.setHover(null); hideTip(); });
    element.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const first = this.data.series.find((s) => s.x.length);
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!first || !step || !this.scale) return;
    event.preventDefault();
    const at = this.group.hover === null ? first.x.length - 1 : nearest(first.x, first.y, this.group.hover) + step;
    this.group.setHover(first.x[Math.max(0, Math.min(first.x.length - 1, at))]);
    const box = this.element.getBoundingClientRect();
    this.#tip(box.left + this.scale.toX(this.group.hover), box.top + 20);
  }

  #tip(clientX, clientY) {
    const x = this.group.hover;
    if (x === null || this.compact) return;
    const { xKind, xName, series, marks } = this.data;
    const rows = series.slice(0, 16).map((one) => {
      const i = nearest(one.x, one.y, x);
      if (i < 0) return null;
      const interval = one.low && one.low[i] !== null && one.high[i] !== null ? ` [${num(one.low[i], 3)}, ${num(one.high[i], 3)}]` : "";
      const raw = one.shown !== one.y ? ` (${num(one.y[i], 3)})` : "";
      return [one.name, num(one.shown[i]) + raw + interval, one.color];
    });
    const width = this.scale.x1 - this.scale.x0;
    const near = marks.filter((mark) => mark.x !== null && Math.abs(mark.x - x) < width * 0.012).slice(0, 3);
    const title = `${xName ?? "step"} ${xKind === "duration" ? tickLabel(x, 1, "duration") : num(x, 6)}`;
    showTip(clientX, clientY, h("strong", {}, title), tipRows(rows), near.map((mark) => h("p", { class: `mark ${mark.level}` }, `⚠ ${mark.text}`)));
  }

  /** Download the chart as a PNG with its title and legend. */
  exportPng(title) {
    const [width, height, ratio] = [900, 420, 2];
    const canvas = h("canvas", { width: width * ratio, height: height * ratio });
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.fillStyle = cssColor("--surface");
    ctx.fillRect(0, 0, width, height);
    ctx.fillStyle = cssColor("--text");
    ctx.font = "600 15px Inter, ui-sans-serif, system-ui, sans-serif";
    ctx.fillText(title, 16, 26);
    ctx.font = FONT;
    let left = 16;
    for (const one of this.data.series.slice(0, 12)) {
      ctx.fillStyle = one.color;
      ctx.fillRect(left, 40, 9, 9);
      ctx.fillStyle = cssColor("--muted");
      ctx.fillText(one.name, left + 14, 48);
      left += 30 + ctx.measureText(one.name).width;
    }
    ctx.translate(0, 56);
    this.#render(ctx, width, height - 62);
    canvas.toBlob((blob) => download(`${title}.png`, blob));
  }

  /** Download the drawn values: one row per x, one column per series. */
  exportCsv(title) {
    const { series, xName = "step" } = this.data;
    const rows = new Map();
    series.forEach((one, column) => one.x.forEach((x, i) => {
      if (x === null) return;
      if (!rows.has(x)) rows.set(x, new Array(series.length).fill(""));
      // The line of an evaluation has the step of another line, and none of its values.
      if (one.y[i] !== null && one.y[i] !== undefined) rows.get(x)[column] = one.y[i];
    }));
    const quote = (text) => `"${String(text).replaceAll('"', '""')}"`;
    const lines = [...rows].sort(([a], [b]) => a - b).map(([x, values]) => [x, ...values].join(","));
    download(`${title}.csv`, new Blob([[xName, ...series.map((s) => quote(s.name))].join(","), "\n", lines.join("\n"), "\n"], { type: "text/csv" }));
  }
}
