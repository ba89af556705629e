// The state that a link carries: #/VIEW/RUN?with=RUN,RUN&other=choices. Views keep their choices in `params`.

export const VIEWS = ["curves", "timeline", "rollouts", "events", "config", "logs"];

/** Parse the hash into {view, run, others, params}. */
export function parse(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view, run] = path.split("/").map(decodePart);
  const params = Object.fromEntries(new URLSearchParams(query));
  const others = (params.with ?? "").split(",").filter(Boolean);
  delete params.with;
  return { view: VIEWS.includes(view) ? view : "curves", run: run || null, others, params };
}

function decodePart(text) {
  try { return decodeURIComponent(text); } catch { return ""; }
}

export function format({ view, run, others, params }) {
  const search = new URLSearchParams();
  if (others.length) search.set("with", others.join(","));
  for (const [key, value] of Object.entries(params)) if (value !== undefined && value !== null && value !== "") search.set(key, value);
  const query = search.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  return `#/${view}${run ? `/${encodeURIComponent(run)}` : ""}${query ? `?${query}` : ""}`;
}

/** Change parameters of the link without a new entry in the browser's history, and without a new rendering. */
export function keep(params) {
  const route = parse();
  history.replaceState(null, "", format({ ...route, params: { ...route.params, ...params } }));
}

/** Go to another route; fires hashchange. */
export function go(patch) {
  const route = parse();
  const params = patch.view && patch.view !== route.view ? patch.params ?? {} : patch.params ?? route.params;
  location.hash = format({ ...route, ...patch, params });
}
