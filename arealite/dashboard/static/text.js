// Shows text that a model wrote. It becomes text nodes only; characters that hide or reorder text are made visible; long
// texts are added in parts as they are scrolled to.

import { h } from "./dom.js";

// Controls, soft hyphen, bidirectional marks and overrides, zero-width and tag characters, lone surrogates.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|\p{Cs}/gu;
const NAMES = {
  0xad: "SHY", 0x61c: "ALM", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM", 0x2028: "LSEP", 0x2029: "PSEP", 0x202a: "LRE",
  0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM",
};
const JOINED = /[\p{Extended_Pictographic}\ufe0f\p{M}\p{Script=Arabic}\p{Script=Devanagari}\p{Script=Bengali}]/u;
const CHUNK = 4000;
const FIRST_CHUNKS = 6;

function nameOf(code) {
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Joiners inside emoji and scripts that need them are ordinary text. */
function joins(text, at) {
  const before = text.slice(Math.max(0, at - 2), at);
  return JOINED.test(before.at(-1) ?? "") || /\p{Extended_Pictographic}$/u.test(before);
}

/** Call `plain(text)` and `hidden(code, name)` for the parts of a text. */
function split(text, plain, hidden) {
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    const code = match[0].codePointAt(0);
    if ((code === 0x200c || code === 0x200d) && joins(text, match.index)) continue;
    if (match.index > last) plain(text.slice(last, match.index));
    hidden(code, nameOf(code));
    last = match.index + match[0].length;
  }
  if (last < text.length) plain(text.slice(last));
}

/** Return nodes of a text; hidden characters become labelled boxes. */
export function visible(text) {
  const nodes = [];
  split(text, (part) => nodes.push(part), (code, name) => nodes.push(h("span", { class: "ctl", title: `U+${code.toString(16).toUpperCase().padStart(4, "0")}` }, name)));
  return nodes;
}

/** Return a text as one line of at most `max` characters. */
export function oneLine(text, max = 220) {
  const parts = [];
  split(text.slice(0, max).replaceAll(/\s+/g, " ").trim(), (part) => parts.push(part), (code, name) => parts.push(`⟨${name}⟩`));
  return parts.join("");
}

/** Leave out what a chat template puts before the user's words: it is the same in every prompt. */
export function question(prompt) {
  return prompt.replace(/^[^]{0,4000}?<\|[^|>]{1,30}\|>user(?:<\|[^|>]{1,30}\|>)?\s*/, "");
}

/** Cut a text into parts of about CHUNK characters, at line breaks where there are some, never inside a surrogate pair. */
export function* chunks(text) {
  for (let from = 0; from < text.length;) {
    let to = Math.min(text.length, from + CHUNK);
    if (to < text.length) {
      const line = text.lastIndexOf("\n", to);
      if (line > from + CHUNK / 4) to = line + 1;
      else if (/[\ud800-\udbff]/.test(text[to - 1])) to += 1;
    }
    yield text.slice(from, to);
    from = to;
  }
}

/** Add the nodes of an iterator to a box in parts: some now, the rest as the end comes into view. */
export function addLazily(box, nodes, first) {
  const add = (number) => {
    for (let i = 0; i < number; i++) {
      const { value, done } = nodes.next();
      if (done) return false;
      box.append(value);
    }
    return true;
  };
  if (!add(first)) return box;
  const end = h("div", { class: "more" }, "…");
  box.append(end);
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    if (!box.isConnected) return observer.disconnect();
    end.remove();
    if (add(first)) box.append(end);
    else observer.disconnect();
  }, { rootMargin: "1200px" });
  observer.observe(end);
  return box;
}

/** A box with a text of any length. */
export function longText(text, props = {}) {
  const box = h("div", { dir: "auto", ...props, class: `text ${props.class ?? ""}` });
  const parts = chunks(text);
  const nodes = (function* () {
    // A part that ends with a line break is a block, which breaks the line itself.
    for (const part of parts) yield h("div", { class: "chunk" }, visible(part.endsWith("\n") ? part.slice(0, -1) || "\n" : part));
  })();
  if (!text) box.append(h("span", { class: "muted" }, "(empty)"));
  return addLazily(box, nodes, FIRST_CHUNKS);
}
