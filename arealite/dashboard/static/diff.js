// Difference of two texts by words (Myers' algorithm), with a bound on the work.

const MAX_EDITS = 1200;
const MAX_WORDS = 20_000;

const words = (text) => text.match(/\n|[^\S\n]+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/** Return [[kind, text], …] with kind "same", "removed" or "added". Texts too different to align are shown one after the other. */
export function diffWords(before, after) {
  const [a, b] = [words(before.slice(0, 400_000)), words(after.slice(0, 400_000))];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const [left, right] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const middle = left.length + right.length > MAX_WORDS ? null : myers(left, right);
  const parts = [
    ["same", a.slice(0, start).join("")],
    ...(middle ?? [["removed", left.join("")], ["added", right.join("")]]),
    ["same", end ? a.slice(-end).join("") : ""],
  ];
  return merge(parts);
}

function merge(parts) {
  const merged = [];
  for (const [kind, text] of parts) {
    if (!text) continue;
    if (merged.at(-1)?.[0] === kind) merged.at(-1)[1] += text;
    else merged.push([kind, text]);
  }
  return merged;
}

function myers(a, b) {
  const ends = new Map([[1, 0]]);
  const trace = [];
  for (let d = 0; d <= Math.min(MAX_EDITS, a.length + b.length); d++) {
    trace.push(new Map(ends));
    for (let k = -d; k <= d; k += 2) {
      let x = k === -d || (k !== d && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1)) ? ends.get(k + 1) : ends.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      ends.set(k, x);
      if (x >= a.length && x - k >= b.length) return walk(a, b, trace, d);
    }
  }
  return null;
}

function walk(a, b, trace, edits) {
  const parts = [];
  let [x, y] = [a.length, b.length];
  for (let d = edits; d >= 0; d--) {
    const ends = trace[d];
    const k = x - y;
    const from = k === -d || (k !== d && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1)) ? k + 1 : k - 1;
    const px = d ? ends.get(from) : 0;
    const py = d ? px - from : 0;
    while (x > px && y > py) { parts.push(["same", a[x - 1]]); x -= 1; y -= 1; }
    if (!d) break;
    if (x > px) { parts.push(["removed", a[x - 1]]); x -= 1; } else { parts.push(["added", b[y - 1]]); y -= 1; }
  }
  return parts.reverse();
}
