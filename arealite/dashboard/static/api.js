// Reads the dashboard's API. Paths are relative, so that the page works behind a proxy's prefix.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const TIMEOUT_MS = 60_000;

/** The address of a path of the API with a query; undefined, null and empty values are left out. */
export function address(path, query = {}) {
  const parts = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(parts).toString();
  return `api/${path}${search ? `?${search}` : ""}`;
}

/** GET a path of the API with a query. */
export async function get(path, query = {}, signal = undefined) {
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  let response;
  try {
    response = await fetch(address(path, query), { signal: signal ? AbortSignal.any([signal, limit]) : limit });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The dashboard's server does not answer. Is `arealite dashboard` still running?");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, body.error ?? `The server answered with status ${response.status}.`);
  return body;
}

export const runPath = (id, rest) => `runs/${encodeURIComponent(id)}/${rest}`;
