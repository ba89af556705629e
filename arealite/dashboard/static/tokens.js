// The tokens of a rollout, coloured by version, probability, gap between engine and trainer, or advantage.

import { h, hideTip, replace, segmented, showTip, tipRows } from "./dom.js";
import { num } from "./format.js";
import { probabilityTint, signedTint, versionTint } from "./colors.js";
import { addLazily, oneLine, visible } from "./text.js";

const [BLOCK, MAX_BLOCK] = [160, 600];
const COLORS = [["version", "Version"], ["probability", "Probability"], ["gap", "Gap", "log-probability of the trainer minus that of the engine"], ["advantage", "Advantage"], ["none", "Plain"]];
// A gap of this many nats has the full colour.
const GAP_FULL = 0.5;

const known = (values) => (values ?? []).filter((v) => v !== null && v !== undefined);

/** Return {paint(i) → colour or null, legend: nodes, missing: text or null} of a way to colour. */
function painter(color, tokens) {
  const { trained, version, logp, prox_logp: prox, advantage } = tokens;
  const chip = (text, background) => h("span", { class: "token-chip" }, h("i", { style: { background } }), text);
  const own = (f) => (i) => (trained && !trained[i] ? null : f(i));
  if (color === "version") {
    const all = [...new Set(known(version).filter((v) => v >= 0))].sort((a, b) => b - a);
    const place = new Map(all.map((v, i) => [v, all.length > 1 ? i / (all.length - 1) : 0]));
    const shown = all.length > 8 ? [...all.slice(0, 4), ...all.slice(-4)] : all;
    return { paint: own((i) => (place.has(version?.[i]) ? versionTint(place.get(version[i])) : null)), legend: shown.map((v) => chip(`version ${v}`, versionTint(place.get(v)))), missing: all.length ? null : "Versions of tokens were not recorded." };
  }
  if (color === "probability") {
    return { paint: own((i) => (logp?.[i] === null || logp?.[i] === undefined ? null : probabilityTint(Math.exp(logp[i])))), legend: [0.9, 0.5, 0.1, 0.01].map((p) => chip(`p ${p}`, probabilityTint(p))), missing: known(logp).length ? null : "Log-probabilities were not recorded." };
  }
  if (color === "gap") {
    const gap = (i) => (prox && prox[i] !== null && logp?.[i] !== null ? prox[i] - logp[i] : null);
    return { paint: own((i) => (gap(i) === null ? null : signedTint(gap(i) / GAP_FULL))), legend: [chip("trainer finds it less likely", signedTint(-0.8)), chip("more likely", signedTint(0.8)), chip(`full colour at ${GAP_FULL} nats`, "transparent")], missing: known(prox).length ? null : "The trainer's log-probabilities were not recorded: the run did not recompute them." };
  }
  if (color === "advantage") {
    const top = Math.max(1e-9, ...known(advantage).map(Math.abs).slice(0, 100_000));
    return { paint: own((i) => (advantage?.[i] === null || advantage?.[i] === undefined ? null : signedTint(advantage[i] / top))), legend: [chip(`−${num(top, 3)}`, signedTint(-1)), chip("0", "transparent"), chip(`+${num(top, 3)}`, signedTint(1))], missing: known(advantage).length ? null : "Advantages were not recorded." };
  }
  return { paint: () => null, legend: [], missing: null };
}

function tip(event, tokens, i) {
  const at = (values) => (values?.[i] === undefined ? null : values[i]);
  const [logp, prox] = [at(tokens.logp), at(tokens.prox_logp)];
  const trained = !tokens.trained || tokens.trained[i];
  showTip(event.clientX, event.clientY, h("strong", { class: "mono" }, JSON.stringify(oneLine(tokens.text[i], 80)) === '""' ? "⏎" : oneLine(tokens.text[i], 80)), tipRows([
    ["token", `${i + 1} of ${tokens.text.length}`], trained ? null : ["", "not trained on"], at(tokens.version) === null ? null : ["version", at(tokens.version)],
    logp === null ? null : ["probability", num(Math.exp(logp), 3)], logp === null ? null : ["log-prob (engine)", num(logp, 4)], prox === null ? null : ["log-prob (trainer)", num(prox, 4)],
    prox === null || logp === null ? null : ["gap", num(prox - logp, 3)], at(tokens.advantage) === null ? null : ["advantage", num(at(tokens.advantage), 4)],
  ]));
}

/** A text that shows one token: line breaks are visible and break the line. */
function tokenNodes(text) {
  if (!text.includes("\n")) return visible(text);
  return text.split("\n").flatMap((part, i) => (i ? [h("span", { class: "newline" }, "⏎"), "\n", ...visible(part)] : visible(part)));
}

function* blocks(tokens, paint) {
  const { text, trained } = tokens;
  for (let from = 0; from < text.length;) {
    let to = Math.min(text.length, from + BLOCK);
    while (to < text.length && to - from < MAX_BLOCK && !text[to - 1].endsWith("\n")) to += 1;
    const block = h("div", { class: "chunk" });
    for (let i = from; i < to; i++) {
      const node = h("span", { class: trained && !trained[i] ? "token given" : "token" }, tokenNodes(text[i]));
      node.index = i;
      const background = paint(i);
      if (background) node.style.background = background;
      block.append(node);
    }
    yield block;
    from = to;
  }
}

/** The coloured tokens with the choice of the colour. */
export function tokenView(tokens, color, onchoice) {
  const legend = h("div", { class: "token-legend" });
  const box = h("div", { class: "text tokens", dir: "auto" });
  const draw = (chosen) => {
    const { paint, legend: chips, missing } = painter(chosen, tokens);
    replace(legend, missing ? h("span", { class: "muted" }, missing) : chips);
    box.replaceChildren();
    addLazily(box, blocks(tokens, paint), 12);
  };
  box.addEventListener("pointerover", (event) => {
    const node = event.target.closest(".token");
    if (node) tip(event, tokens, node.index);
    else hideTip();
  });
  box.addEventListener("pointerleave", hideTip);
  draw(color);
  return h("div", {}, h("div", { class: "toolbar token-bar" }, h("span", { class: "muted" }, "Colour"), segmented("Colour of tokens", COLORS, color, (chosen) => { draw(chosen); onchoice(chosen); })), legend, box);
}
