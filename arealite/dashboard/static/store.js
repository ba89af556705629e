// Keeps what the page has read of each run, and reads what is new of live ones.

import { get, runPath } from "./api.js";
import { shownStep, withShownSteps } from "./steps.js";

const cache = new Map();
let runs = [];

export const allRuns = () => runs;
export const findRun = (id) => runs.find((run) => run.id === id);

export async function loadRuns() {
  runs = (await get("runs")).runs;
  return runs;
}

function entry(id) {
  if (!cache.has(id)) cache.set(id, { stats: { next: 0, rows: 0, columns: {} }, evaluations: null, events: null });
  return cache.get(id);
}

/** Read new rows of the statistics. Returns true if there were any. Calls for one run are made one after another. */
export function loadStats(id) {
  const own = entry(id);
  own.pending = (own.pending ?? Promise.resolve()).catch(() => {}).then(() => readStats(id, own.stats));
  return own.pending;
}

async function readStats(id, stats) {
  const answer = await get(runPath(id, "stats"), { since: stats.next });
  if (answer.reset) Object.assign(stats, { rows: 0, columns: {} });
  stats.next = answer.next;
  const fresh = answer.columns.step?.length ?? 0;
  if (!fresh) return Boolean(answer.reset);
  for (const [name, values] of Object.entries(answer.columns)) {
    stats.columns[name] ??= new Array(stats.rows).fill(null);
    for (const value of values) stats.columns[name].push(name === "step" ? shownStep(value) : value);
  }
  stats.rows += fresh;
  for (const column of Object.values(stats.columns)) while (column.length < stats.rows) column.push(null);
  return true;
}

export const statsOf = (id) => entry(id).stats;

export async function loadEvaluations(id) {
  return (entry(id).evaluations = withShownSteps((await get(runPath(id, "evaluations"))).rows));
}

export const evaluationsOf = (id) => entry(id).evaluations ?? [];

export async function loadEvents(id) {
  const own = entry(id);
  const last = own.events?.length ? own.events.at(-1).time : 0;
  const { rows } = await get(runPath(id, "events"), { since: last || undefined });
  const known = new Set((own.events ?? []).slice(-50).map((row) => `${row.time} ${row.kind} ${row.text}`));
  own.events = [...(own.events ?? []), ...withShownSteps(rows).filter((row) => !known.has(`${row.time} ${row.kind} ${row.text}`))];
  return own.events;
}

export const eventsOf = (id) => entry(id).events ?? [];

/** Values of the x axis of a run: step, seconds since its first row, or samples so far. */
export function xValues(id, kind) {
  const { columns, rows } = statsOf(id);
  if (kind === "time") {
    const first = columns.time?.find((t) => t !== null) ?? 0;
    return (columns.time ?? []).map((t) => (t === null ? null : t - first));
  }
  if (kind === "samples") {
    let sum = 0;
    return Array.from({ length: rows }, (_, i) => (sum += columns.num_seqs?.[i] ?? 0));
  }
  return columns.step ?? [];
}

/** Place a moment of a run, given by its step or its time, on an x axis. */
export function xOf(id, kind, { step, time }) {
  const { columns, rows } = statsOf(id);
  if (!rows) return null;
  if (kind === "step" && step !== null && step !== undefined) return step;
  let index = step !== null && step !== undefined ? columns.step.findIndex((s) => s >= step) : (columns.time ?? []).findIndex((t) => t >= time);
  if (index < 0) index = rows - 1;
  return xValues(id, kind)[index] ?? null;
}
