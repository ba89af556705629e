// Colours of series, phases and scales, for both themes. Scales keep contrast with the text on them.

export const isDark = () => document.documentElement.dataset.theme === "dark";

const SERIES = [
  ["#4353e0", "#8b9bff"], ["#e0562b", "#ff8f66"], ["#0c9a78", "#3fd0a5"], ["#b5369f", "#ee7ed8"],
  ["#b97f00", "#f0bb45"], ["#1789c4", "#56bff2"], ["#7a5b3a", "#c9a27a"], ["#6b6f7b", "#a8adba"],
];

export function seriesColor(index) {
  return SERIES[index % SERIES.length][isDark() ? 1 : 0];
}

// Phases by the beginning of their name: what they are about, not who does them.
const PHASES = [
  [/^(wait|idle|paused?|blocked)/, "#9aa0ac", "#6d7482"],
  [/^(generate|decode|rollout|episode|request)/, "#3aa8e6", "#3b9bd4"],
  [/^(prefill)/, "#1f7fc0", "#2f78b8"],
  [/^(update|train|backward|forward|minibatch|optim)/, "#6a5be8", "#8478f0"],
  [/^(micro-?batch)/, "#4a74c9", "#6b93dc"],
  [/^(logp|prox|ref|values|critic|advantage)/, "#b08cf0", "#a486e6"],
  [/^(weights|publish|load|sync|transfer|broadcast)/, "#f08a24", "#e8913c"],
  [/^(reward|judge|verify|score|tool|env)/, "#22b07d", "#2fae80"],
  [/^(save|checkpoint|recover)/, "#c2a32a", "#c4a63a"],
  [/^(eval)/, "#e0559b", "#dd6aa5"],
  [/^(error|fail|lost|abort)/, "#dc3f3f", "#ec5f5f"],
  [/^(launch|imports|servers|startup|compile|warm)/, "#8b95a7", "#7d879a"],
];
const phaseCache = new Map();

export function phaseColor(name) {
  const key = `${name} ${isDark()}`;
  if (!phaseCache.has(key)) {
    const found = PHASES.find(([pattern]) => pattern.test(name.toLowerCase()));
    phaseCache.set(key, found ? found[isDark() ? 2 : 1] : hashColor(name));
    if (phaseCache.size > 5000) phaseCache.clear();
  }
  return phaseCache.get(key) ?? hashColor(name);
}

function hashColor(name) {
  let sum = 0;
  for (const char of name) sum = (sum * 31 + char.codePointAt(0)) % 360;
  return `hsl(${sum} 45% ${isDark() ? 58 : 55}%)`;
}

const STATES = {
  admitted: ["#5b6577", "#98a2b5"], running: ["#3aa8e6", "#4fb0ea"], buffered: ["#b97f00", "#e3b04b"],
  trained: ["#0c9a78", "#3fd0a5"], stale: ["#8b6f47", "#c29f6b"], rejected: ["#b5369f", "#ee7ed8"],
  accepted: ["#6a5be8", "#9a8ffa"], failed: ["#d03a3a", "#f27272"], evaluated: ["#e0559b", "#f08abf"],
};

export function stateColor(state) {
  return (STATES[state] ?? STATES.admitted)[isDark() ? 1 : 0];
}

function mix(stops, share) {
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  return stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i)));
}

const HEAT = {
  light: [[246, 247, 252], [198, 206, 250], [127, 141, 240], [67, 83, 224], [36, 38, 128]],
  dark: [[24, 26, 34], [40, 48, 110], [72, 88, 205], [139, 155, 255], [226, 231, 255]],
};

export function heat(share) {
  return mix(HEAT[isDark() ? "dark" : "light"], share);
}

const rgb = (color, alpha = 1) => `rgb(${color[0]} ${color[1]} ${color[2]} / ${alpha})`;

// Backgrounds behind text: pale in the light theme, deep in the dark one.
const TINTS = {
  version: [[212, 224, 255], [204, 240, 228], [253, 236, 190], [255, 214, 196], [244, 205, 238]],
  versionDark: [[41, 52, 110], [18, 78, 66], [94, 72, 14], [108, 48, 26], [90, 34, 82]],
};

/** Background of a token written by a version; `share` 0 is the newest, 1 the oldest of the answer. */
export function versionTint(share) {
  return rgb(mix(TINTS[isDark() ? "versionDark" : "version"], share));
}

/** Background of a token by its probability: unlikely ones stand out. */
export function probabilityTint(p) {
  const surprise = Math.min(1, -Math.log(Math.max(p, 1e-6)) / 6);
  return isDark() ? `rgb(214 84 40 / ${0.75 * surprise})` : `rgb(238 98 44 / ${0.62 * surprise})`;
}

/** Background for a signed value between -1 and 1: blue or orange. */
export function signedTint(value) {
  const size = Math.min(1, Math.abs(value));
  if (value >= 0) return isDark() ? `rgb(34 160 120 / ${0.6 * size})` : `rgb(20 170 120 / ${0.48 * size})`;
  return isDark() ? `rgb(224 80 70 / ${0.62 * size})` : `rgb(230 80 66 / ${0.5 * size})`;
}
