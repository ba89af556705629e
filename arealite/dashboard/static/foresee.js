// What steps waited for as chains, what would have helped, and sweeps that were predicted: panels of the timeline.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { phaseColor, seriesColor } from "./colors.js";
import { emptyState, h, replace } from "./dom.js";
import { duration, num, percent } from "./format.js";
import { shownStep } from "./steps.js";

const COLORS = { generation: "generate", stragglers: "prefill", admission: "wait", collect: "load" };
const linkColor = (kind) => phaseColor(COLORS[kind] ?? kind);
const MAX_WORDS = 6;

/** Three panels that fill themselves: `waits`, `helps` and `sweeps`, which stays empty without sweeps. */
export class Foresight {
  constructor() {
    this.waits = h("div", { class: "card panel foresee-waits" });
    this.helps = h("div", { class: "card panel foresee-helps" });
    this.sweeps = h("div", { class: "foresee-sweeps" });
    this.charts = [];
  }

  async load(path) {
    try {
      const [found, saved] = await Promise.all([get(path("foresight")), get(path("sweeps"))]);
      // Charts keep their crosshair while nothing changes.
      const text = JSON.stringify([found, saved]);
      if (text === this.text) return;
      Object.assign(this, { text, found, saved });
      this.paint();
    } catch (error) {
      for (const panel of [this.waits, this.helps]) replace(panel, emptyState("Cannot be read", error.message));
    }
  }

  paint() {
    if (!this.found) return;
    this.destroy();
    const { found } = this;
    if (found.problem) {
      for (const panel of [this.waits, this.helps]) replace(panel, emptyState("Not known for this run", found.problem));
    } else {
      replace(this.waits, waitsPanel(found));
      replace(this.helps, this.#helpsPanel(found));
    }
    replace(this.sweeps, this.saved.sweeps.map((sweep) => this.#sweepPanel(sweep)));
  }

  destroy() {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
  }

  #helpsPanel(found) {
    const rows = found.advice.map((answer) => h("div", { class: "wait-row" },
      h("span", { class: "wait-name", title: answer.question }, answer.question),
      bar([[phaseColor("update"), answer.step_s, "predicted"]], found.rerun_step_s),
      h("span", { class: "num wait-share" }, `−${percent(-answer.change)}`),
      h("span", { class: "muted wait-why" }, `${duration(answer.step_s)} a step, waits ${percent(answer.wait_share)}, mean age ${num(answer.mean_age, 3)}`)));
    const eta = found.settings.max_head_offpolicyness;
    const xs = found.eta.map((answer) => answer.eta);
    const marks = [{ x: eta, text: "this run", level: "info" }];
    return [rows.length ? h("div", { class: "waits" }, rows) : h("p", { class: "muted" }, "No single change would save 1% of a step."),
      h("div", { class: "two" },
        this.#chart("Seconds a step", "max_head_offpolicyness", xs, [["seconds", found.eta.map((a) => a.step_s)]], { marks, floor: 0 }),
        this.#chart("Mean age of samples", "max_head_offpolicyness", xs, [["versions", found.eta.map((a) => a.mean_age)]], { marks, floor: 0 })),
      found.notes.map((note) => h("p", { class: "muted" }, `Note: ${note}`))];
  }

  #sweepPanel({ key, title, values, columns }) {
    const numbers = values.map(Number);
    const xs = numbers.every(Number.isFinite) ? numbers : values.map((_, i) => i);
    const order = xs.map((_, i) => i).sort((a, b) => xs[a] - xs[b]);
    const sorted = (list) => order.map((i) => list[i]);
    const draw = (name, series, options) => this.#chart(name, xs === numbers ? key : `${key}: ${values.join(", ")}`, sorted(xs),
      series.map(([label, column]) => [label, sorted(columns[column])]), options);
    return [h("div", { class: "section-title" }, h("h2", {}, `Predicted: ${key}`), h("p", {}, `arealite plan --sweep, ${title}`)),
      h("div", { class: "card panel three" },
        draw("Trained tokens/s", [["tokens/s", "tokens_per_s"]], { floor: 0 }),
        draw("Idle share", [["trainers", "trainer_idle"], ["servers", "server_idle"]], { floor: 0, ceiling: 1 }),
        draw("Mean staleness", [["versions", "staleness_mean"]], { floor: 0 }))];
  }

  #chart(label, xName, x, series, options) {
    const chart = new Chart({ height: 140, label });
    this.charts.push(chart);
    const drawn = series.map(([name, y], i) => ({ name, color: seriesColor(i), x, y }));
    chart.setData({ series: drawn, xKind: "number", xName, ...options });
    const names = series.length > 1 ? h("span", { class: "phases" }, drawn.map(({ name, color }) => h("span", {}, h("i", { class: "swatch", style: { background: color } }), name))) : null;
    return h("div", { class: "foresee-chart" }, h("h3", {}, label, " ", h("small", { class: "muted" }, `by ${xName}`), names), chart.element);
  }
}

/** A bar whose parts [color, size, text] are shares of `total`. */
function bar(parts, total) {
  return h("div", { class: "share-bar" }, parts.map(([color, size, text]) => h("i", { title: text, style: { width: `${(100 * size) / Math.max(total, 1e-9)}%`, background: color } })));
}

function waitsPanel(found) {
  const describe = ({ text, seconds, episode }) => `${text}${episode === null || episode === undefined ? "" : ` of episode ${episode}`} ${duration(seconds)}`;
  const parts = (links) => links.map((link) => [linkColor(link.kind), link.seconds, describe(link)]);
  const longest = Math.max(...found.chains.map((chain) => chain.waited_s), 0);
  const chain = ({ step, waited_s, links }) => {
    const words = links.filter((link) => link.seconds > 0.01 * waited_s).map(describe);
    const text = words.length > MAX_WORDS ? [...words.slice(0, 2), "…", ...words.slice(-3)] : words;
    return h("div", { class: "wait-row" }, h("span", { class: "wait-name" }, `step ${shownStep(step)}`), bar(parts(links), longest),
      h("span", { class: "num wait-share" }, duration(waited_s)), h("span", { class: "muted wait-why", title: words.join(" → ") }, text.join(" → ")));
  };
  return [h("p", { class: "foresee-sentence" }, found.sentence[0].toUpperCase() + found.sentence.slice(1)),
    h("div", { class: "phases" }, found.waits.map(({ kind, text, seconds }) => h("span", { class: "phase" },
      h("i", { class: "swatch", style: { background: linkColor(kind) } }), `${text} ${percent(seconds / found.seconds)}`))),
    h("div", { class: "waits" }, found.chains.map(chain))];
}
