// Logs: the tail of each file, which follows a live run, earlier parts on demand, and search.

import { get, runPath } from "./api.js";
import { debounce, emptyState, h, replace } from "./dom.js";
import { bytes } from "./format.js";
import { keep } from "./route.js";
import { visible } from "./text.js";

const PART = 128 * 1024;
const MAX_LINES = 4000;

export function logsView(root, context) {
  const { run: id, params } = context.route();
  const own = { id, file: params.file ?? null, find: params.find ?? "", follow: true, text: "", start: 0, end: 0, size: 0, request: 0 };
  own.box = h("div", { class: "log", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Log" });
  own.status = h("span", { class: "muted num" });
  own.files = h("select", { "aria-label": "File", onchange: () => open(own, own.files.value) });
  own.earlier = h("button", { class: "button", type: "button", onclick: () => loadEarlier(own) }, "Earlier");
  const search = h("input", { type: "search", placeholder: "Find in what is loaded…", "aria-label": "Find in the log", value: own.find, oninput: debounce(() => { own.find = search.value; keep({ find: own.find }); render(own); }, 100) });
  own.button = h("button", { class: "button", type: "button", "aria-pressed": "true", title: "Stay at the end (f)", onclick: () => setFollow(own, !own.follow) }, "Follow");
  own.box.addEventListener("scroll", () => {
    const atEnd = own.box.scrollTop + own.box.clientHeight >= own.box.scrollHeight - 24;
    if (own.follow !== atEnd && !own.writing) setFollow(own, atEnd, false);
  });
  own.panel = h("div", { class: "log-view" }, h("div", { class: "sticky toolbar" }, own.files, search, own.earlier, own.button, own.status), own.box);
  root.append(own.panel);
  listFiles(own);
  return { tick: () => more(own), keys: [["f", "Follow the end", () => setFollow(own, !own.follow)], ["e", "Load an earlier part", () => loadEarlier(own)]] };
}

function setFollow(own, follow, scroll = true) {
  own.follow = follow;
  own.button.setAttribute("aria-pressed", String(follow));
  if (follow && scroll) toEnd(own);
}

/** Scroll to the end. Lines get their height when they become visible, so it takes a few frames. */
function toEnd(own, frames = 4) {
  own.writing = true;
  own.box.scrollTop = own.box.scrollHeight;
  requestAnimationFrame(() => {
    if (frames) toEnd(own, frames - 1);
    else own.writing = false;
  });
}

async function listFiles(own) {
  try {
    const { files } = await get(runPath(own.id, "logs"));
    if (!files.length) return replace(own.box, emptyState("No logs", "The launcher writes logs/NAME.log for each process. A run started without it prints to its terminal only."));
    if (!files.some((file) => file.name === own.file)) own.file = files[0].name;
    replace(own.files, files.map((file) => h("option", { value: file.name, selected: file.name === own.file ? "" : null }, `${file.name} (${bytes(file.size)})`)));
    await open(own, own.file);
  } catch (error) {
    replace(own.box, emptyState("The logs cannot be read", error.message));
  }
}

async function read(own, end, since) {
  return get(runPath(own.id, `logs/${own.file.split("/").map(encodeURIComponent).join("/")}`), { since, end, size: PART });
}

async function open(own, file) {
  const request = ++own.request;
  own.file = file;
  keep({ file });
  try {
    const answer = await read(own);
    if (request !== own.request) return;
    Object.assign(own, answer);
    render(own);
    setFollow(own, true);
  } catch (error) {
    replace(own.box, emptyState("This log cannot be read", error.message));
  }
}

async function loadEarlier(own) {
  if (!own.start) return;
  const request = own.request;
  const answer = await read(own, own.start);
  if (request !== own.request) return;
  const before = own.box.scrollHeight - own.box.scrollTop;
  own.text = answer.text + own.text;
  own.start = answer.start;
  setFollow(own, false);
  render(own, true);
  own.box.scrollTop = own.box.scrollHeight - before;
}

/** Read what a live run has written since. */
async function more(own) {
  if (!own.file || !own.size) return;
  const request = own.request;
  let answer = await read(own, undefined, own.end);
  // More than a part is missing: show the end.
  if (answer.size - answer.end > PART) answer = await read(own);
  if (request !== own.request || answer.end === own.end) return;
  // A file that was replaced is shown from its end, too.
  if (answer.start !== own.end) Object.assign(own, answer);
  else Object.assign(own, { text: own.text + answer.text, end: answer.end, size: answer.size });
  render(own);
}

function level(line) {
  if (/\b(ERROR|CRITICAL|FATAL|Traceback|Exception|Error:)/.test(line)) return "error";
  return /\b(WARNING|WARN)\b/.test(line) ? "warn" : "";
}

function render(own, whole = false) {
  const words = own.find.toLowerCase();
  const all = own.text.split("\n");
  if (all.at(-1) === "") all.pop();
  const numbered = words ? all.filter((line) => line.toLowerCase().includes(words)) : all;
  const kept = whole ? numbered : numbered.slice(-MAX_LINES);
  own.earlier.disabled = own.start === 0;
  own.status.textContent = `${words ? `${numbered.length} of ` : ""}${all.length} lines, ${bytes(own.end - own.start)} of ${bytes(own.size)}`;
  if (!kept.length) replace(own.box, all.length ? emptyState("No line matches", "Only the loaded part of the file is searched. Earlier loads more.") : emptyState("The file is empty", own.file));
  else replace(own.box, kept.map((line) => h("div", { class: `line ${level(line)}` }, visible(line.slice(0, 20_000)))));
  if (own.follow) toEnd(own);
}
