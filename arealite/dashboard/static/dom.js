// Builds DOM nodes and formats values. Text reaches the page through text nodes only, never as HTML.

/** Create an element: h("button", {class: "quiet", onclick: f, "aria-label": "…"}, "text", node, …). */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Create an SVG element. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (key === "dataset") Object.assign(node.dataset, value);
    else if (key === "value" || key === "checked" || key === "disabled") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

const ICONS = {
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  close: "M4 4l8 8M12 4l-8 8",
  curves: "M2 13V3M2 13h12M4.5 10l3-3.5 2.5 2L13.5 4",
  timeline: "M2 4h6M5 8h7M9 12h5",
  rollouts: "M2.5 3.5h11v7h-6l-3 2.5v-2.5h-2z",
  events: "M8 2.5v7M8 12.8v.2",
  config: "M2.5 5h5M11 5h2.5M2.5 11H5M8.5 11h5M9.2 3.2v3.6M6.8 9.2v3.6",
  logs: "M3 3.5h10M3 6.5h7M3 9.5h10M3 12.5h5",
  expand: "M9.5 2.5h4v4M13.5 2.5l-5 5M6.5 13.5h-4v-4M2.5 13.5l5-5",
  image: "M2.5 3.5h11v9h-11zM2.5 11l3.5-3.5 2.5 2.5 2-2 3 3",
  table: "M2.5 3h11v10h-11zM2.5 6.4h11M2.5 9.7h11M6.5 3v10",
  pin: "M8 2.2l1.7 3.6 3.9.5-2.9 2.7.8 3.9L8 11l-3.5 1.9.8-3.9-2.9-2.7 3.9-.5z",
  sun: "M8 5.2a2.8 2.8 0 100 5.6 2.8 2.8 0 000-5.6zM8 1.5v1.6M8 12.9v1.6M1.5 8h1.6M12.9 8h1.6M3.4 3.4l1.1 1.1M11.5 11.5l1.1 1.1M12.6 3.4l-1.1 1.1M4.5 11.5l-1.1 1.1",
  moon: "M13 9.6A5.6 5.6 0 016.4 3 5.6 5.6 0 1013 9.6z",
  left: "M10 3.5L5.5 8l4.5 4.5",
  right: "M6 3.5L10.5 8 6 12.5",
  chevron: "M4 6l4 4 4-4",
  link: "M6.8 9.2a2.6 2.6 0 003.7 0l2-2a2.6 2.6 0 00-3.7-3.7l-.9.9M9.2 6.8a2.6 2.6 0 00-3.7 0l-2 2a2.6 2.6 0 003.7 3.7l.9-.9",
};

/** Return a 16-pixel icon that screen readers skip. */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", class: "icon-svg", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** Replace all children, and keep the scroll position of the node. */
export function replace(node, ...children) {
  const top = node.scrollTop;
  node.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  node.scrollTop = top;
  return node;
}

/** An empty or error state: what is missing and why. */
export function emptyState(title, why, action) {
  return h("div", { class: "empty" }, h("h2", {}, title), why ? h("p", {}, why) : null, action ?? null);
}

/** A group of buttons of which one is pressed. `options` are [value, label, title?]. */
export function segmented(label, options, value, onchange) {
  const group = h("div", { class: "segmented", role: "group", "aria-label": label });
  const paint = (chosen) => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === chosen));
  };
  for (const [key, text, title] of options) {
    const click = () => { paint(key); onchange(key); };
    group.append(h("button", { type: "button", dataset: { value: key }, title, onclick: click }, text));
  }
  paint(value);
  return Object.assign(group, { set: paint });
}

const TIP = () => document.getElementById("tip");

/** Show the tooltip beside a point of the window. `content` is an array of nodes or strings. */
export function showTip(x, y, ...content) {
  const tip = TIP();
  tip.replaceChildren(...content.flat().filter((c) => c !== null && c !== undefined && c !== false));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? Math.max(4, x - width - 12) : x + 16;
  const top = y + 16 + height > innerHeight ? Math.max(4, y - height - 10) : y + 16;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

export function hideTip() {
  TIP().hidden = true;
}

/** Rows of a tooltip: [[label, value, colour?], …]. */
export function tipRows(rows) {
  return h("dl", {}, rows.filter(Boolean).map(([key, value, color]) => [
    h("dt", {}, color ? h("i", { class: "swatch", style: { background: color } }) : null, key), h("dd", {}, value),
  ]));
}

let toastTimer;
export function toast(text) {
  const node = document.getElementById("toast");
  node.textContent = text;
  node.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => node.classList.remove("shown"), 2600);
}

/** Open the one modal dialog with a title; returns its body. */
export function openDialog(title, ...body) {
  const dialog = document.getElementById("dialog");
  const close = h("button", { class: "icon", type: "button", "aria-label": "Close", onclick: () => dialog.close() }, icon("close"));
  const content = h("div", { class: "dialog-body" }, ...body);
  dialog.replaceChildren(h("div", { class: "dialog-head" }, h("h2", { id: "dialog-title" }, title), close), content);
  dialog.setAttribute("aria-labelledby", "dialog-title");
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  if (!dialog.open) dialog.showModal();
  return content;
}

export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name.replaceAll(/[^\w.@=-]+/g, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Call `f` once `wait` milliseconds after the last call. */
export function debounce(f, wait) {
  let timer;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => f(...args), wait); };
}

/** Call `f` at most once per frame. */
export function perFrame(f) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; f(); });
  };
}

/** Return a custom property of the current theme, such as `--text`. */
export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function stored(key, fallback) {
  try { return JSON.parse(localStorage.getItem(key)) ?? fallback; } catch { return fallback; }
}

export function store(key, value) {
  try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* storage is blocked: the choice lasts until a reload */ }
}

/** Give a canvas a size in CSS pixels, sharp on every screen; returns its context. */
export function sizeCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  return ctx;
}
