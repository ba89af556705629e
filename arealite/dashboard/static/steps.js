// Numbers of training steps. Files and the API count them from 0, people from 1: as the console and `arealite report`.

/** The number that people know a stored step by; 0 is before the first step. */
export const shownStep = (step) => (step === null || step === undefined ? null : step + 1);

/** Rows with the numbers that people know their steps by. */
export const withShownSteps = (rows) => rows.map((row) => ({ ...row, step: shownStep(row.step) }));

/** The stored step that a typed number means; what is no number is passed on. */
export function storedStep(text) {
  const number = Number(text);
  return text === null || text === undefined || String(text).trim() === "" || Number.isNaN(number) ? text : number - 1;
}

/** The step that trained on a rollout, as [name, number]. For an evaluation the ledger stores the evaluated version. */
export function stepOf({ source, step }) {
  return source === "direct" ? ["version", step ?? "–"] : ["step", shownStep(step) ?? "–"];
}
