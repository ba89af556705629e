// Numbers, times and durations as short text.

/** Format a number with about `digits` significant digits: 0.0012, 52.3k, 1.2e-7. */
export function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e");
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) {
      const scaled = value / (suffix === "k" ? 1e3 : unit);
      return trim(scaled.toPrecision(Math.max(3, digits - 1))) + suffix;
    }
  }
  return Number.isInteger(value) ? String(value) : size >= 10 ** digits ? value.toFixed(0) : trim(value.toPrecision(digits));
}

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** Format a whole number with separators: 100,000. */
export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  const unit = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${trim((value / 1024 ** unit).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** Format seconds: 250 µs, 12.4 ms, 3.2 s, 4m 05s, 2h 10m, 3d 4h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const sign = seconds < 0 ? "−" : "";
  const s = Math.abs(seconds);
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  if (s === 0) return "0 s";
  if (s < 1e-3) return `${sign}${trim((s * 1e6).toPrecision(3))} µs`;
  if (s < 1) return `${sign}${trim((s * 1e3).toPrecision(3))} ms`;
  if (s < 60) return `${sign}${trim(s.toPrecision(3))} s`;
  if (s < 3600) return `${sign}${Math.floor(s / 60)}m ${two(s % 60)}s`;
  if (s < 86400) return `${sign}${Math.floor(s / 3600)}h ${two((s % 3600) / 60)}m`;
  return `${sign}${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function dateTime(time) {
  if (!time) return "–";
  const date = new Date(time * 1000);
  return `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB")}`;
}

/** Say how long ago a time was: "now", "5m ago", "3d ago". */
export function ago(time) {
  const s = Date.now() / 1000 - time;
  if (s < 45) return "now";
  if (s < 3600) return `${Math.max(1, Math.round(s / 60))}m ago`;
  if (s < 86400) return `${Math.round(s / 3600)}h ago`;
  return `${Math.round(s / 86400)}d ago`;
}

const DURATION_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
];

/** Return round values between low and high, about `want` of them. `kind`: number, integer or duration. */
export function ticks(low, high, want, kind = "number") {
  const rough = (high - low) / Math.max(1, want);
  if (!(rough > 0)) return [low];
  let step = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5, 10]) if (step * factor >= rough) { step *= factor; break; }
  if (kind === "integer") step = Math.max(1, Math.round(step));
  if (kind === "duration" && rough >= 1) step = DURATION_STEPS.find((s) => s >= rough) ?? Math.ceil(rough / 604800) * 604800;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 200; i++) found.push(i * step);
  // One line says nothing about the scale.
  return found.length < 2 && kind === "number" ? ticks(low, high, want * 1.5, kind) : found;
}

/** Label of a tick among its neighbours: as few digits as tell them apart. */
export function tickLabel(value, step, kind = "number") {
  if (kind === "duration") {
    if (value === 0) return "0";
    if (Math.abs(value) < 60 || step < 1) return duration(Number(value.toPrecision(6)));
    const text = duration(value);
    return step >= 60 ? text.replace(" 00s", "").replace(" 00m", "") : text;
  }
  if (Math.abs(value) < step / 1e6) return "0";
  const digits = Math.ceil(Math.log10(Math.abs(value) / step) + 1e-9) + 1;
  if (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3) return num(Number(value.toPrecision(Math.max(6, digits))), Math.max(4, digits + 1));
  return value.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9))));
}
