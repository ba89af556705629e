// One rollout: conversation, tokens, its group, and answers to the same prompt at other steps.

import { get, runPath } from "./api.js";
import { emptyState, h, icon, replace, segmented, toast } from "./dom.js";
import { count, num } from "./format.js";
import { keep } from "./route.js";
import { diffWords } from "./diff.js";
import { stepOf } from "./steps.js";
import { addLazily, longText, oneLine, question, visible } from "./text.js";
import { tokenView } from "./tokens.js";

const TABS = [["conversation", "Conversation"], ["tokens", "Tokens"], ["group", "Group"], ["steps", "Across steps"]];

export class RolloutDetail {
  constructor(own, context, actions) {
    Object.assign(this, { own, context, actions, data: null, key: null, request: 0 });
    const { params } = context.route();
    this.tab = TABS.some(([name]) => name === params.show) ? params.show : "conversation";
    this.color = params.color ?? "version";
    this.element = h("section", { class: "detail-pane", "aria-label": "Chosen rollout", tabindex: -1 });
    this.clear();
  }

  destroy() { this.request += 1; }

  clear() {
    this.key = this.data = null;
    replace(this.element, emptyState("No rollout is chosen", "Choose one in the list, or move with j and k."));
  }

  setChoices(params) {
    if (params.show && params.show !== this.tab) this.show(params.show);
  }

  show(tab) {
    this.tab = tab;
    keep({ show: tab === "conversation" ? null : tab });
    this.paint();
  }

  async load(key) {
    if (key === this.key) return;
    this.key = key;
    const request = ++this.request;
    const path = key.split("/").map(encodeURIComponent).join("/");
    try {
      const data = await get(runPath(this.own.id, `rollouts/${path}`));
      if (request !== this.request) return;
      this.data = data;
      this.paint();
      this.element.scrollTop = 0;
    } catch (error) {
      if (request === this.request) replace(this.element, this.#bar(), emptyState("This rollout cannot be shown", error.message));
    }
  }

  #bar() {
    const button = (name, label, action) => h("button", { class: "icon", type: "button", title: label, "aria-label": label, onclick: action }, icon(name));
    const copy = async () => {
      keep({ sel: this.key });
      try { await navigator.clipboard.writeText(location.href); toast("Link copied"); } catch { toast("The link is in the address bar"); }
    };
    return h("div", { class: "detail-bar" }, h("button", { class: "quiet back", type: "button", onclick: this.actions.close }, icon("left"), "List"),
      h("strong", { class: "mono", title: "source · episode · sample" }, this.key.replaceAll("/", " · ")), h("span", { class: "spacer" }),
      button("left", "Previous rollout (k)", () => this.actions.move(-1)), button("right", "Next rollout (j)", () => this.actions.move(1)), button("link", "Copy a link to this rollout", copy));
  }

  #head() {
    const { data } = this;
    const fact = (label, value, tone = "") => h("div", { class: "fact" }, h("span", { class: "muted" }, label), h("b", { class: `num ${tone}` }, value));
    const versions = data.oldest_version === data.newest_version ? String(data.newest_version ?? "–") : `${data.oldest_version} → ${data.newest_version}`;
    return h("div", { class: "facts" }, fact("reward", num(data.reward)), Object.entries(data.parts ?? {}).map(([name, value]) => fact(name, num(value))),
      fact(...stepOf(data)), fact("tokens", count(typeof data.num_tokens === "number" ? data.num_tokens : lengthOf(data))), fact("versions", versions), data.turns > 1 ? fact("turns", data.turns) : null, data.state ? fact("state", data.state) : null);
  }

  paint() {
    if (!this.data) return;
    const tabs = segmented("What to show", TABS.map(([name, text]) => [name, name === "steps" && this.data.same_prompt ? `${text} (${this.data.same_prompt})` : text]), this.tab, (tab) => this.show(tab));
    const body = h("div", { class: "detail-body" });
    replace(this.element, this.#bar(), this.#head(), h("div", { class: "detail-tabs" }, tabs), body);
    const painters = { conversation: () => conversation(body, this.data), tokens: () => this.#tokens(body), group: () => this.#group(body), steps: () => this.#steps(body) };
    painters[this.tab]();
  }

  #tokens(body) {
    if (!this.data.tokens) {
      return body.append(emptyState("No tokens recorded", "Versions, probabilities and advantages of single tokens were not recorded for this rollout. Its text is under Conversation."));
    }
    body.append(tokenView(this.data.tokens, this.color, (color) => { this.color = color; keep({ color: color === "version" ? null : color }); }));
  }

  async #fetch(body, path, query, fill) {
    const { request } = this;
    try {
      const { rows } = await get(runPath(this.own.id, path), query);
      if (request === this.request && body.isConnected) fill(rows);
    } catch (error) {
      if (body.isConnected) body.append(emptyState("Cannot be read", error.message));
    }
  }

  #group(body) {
    const { source, episode, sample } = this.data;
    this.#fetch(body, `groups/${encodeURIComponent(source)}/${episode}`, {}, (rows) => {
      const mean = rows.reduce((sum, row) => sum + (row.reward ?? 0), 0) / Math.max(1, rows.length);
      body.append(h("p", { class: "muted" }, `${rows.length} answers to one prompt, mean reward ${num(mean, 3)}`), promptBox(rows[0]?.prompt ?? this.data.prompt),
        h("div", { class: "group" }, rows.map((row) => h("article", { class: `card group-answer${row.sample === sample ? " current" : ""}` },
          h("header", {}, h("button", { class: "quiet", type: "button", onclick: () => this.actions.open(`${source}/${episode}/${row.sample}`) }, `#${row.sample}`), rewardBadge(row.reward), h("span", { class: "muted num" }, `${count(lengthOf(row))} tok`)),
          longText(row.completion ?? "", { class: "small" })))));
    });
  }

  #steps(body) {
    const { source, episode, sample } = this.data;
    this.#fetch(body, "same-prompt", { source, episode, sample }, (rows) => {
      if (rows.length < 2) return body.append(emptyState("Only one answer to this prompt", "The prompt was not drawn again at another step."));
      rows.sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
      const here = rows.findIndex((row) => `${row.source}/${row.episode}/${row.sample}` === this.key);
      body.append(promptBox(this.data.prompt), stepDiff(rows, here < 0 ? rows.length - 1 : here));
    });
  }
}

const lengthOf = (row) => (Array.isArray(row.tokens?.text) ? row.tokens.text.length : row.tokens);

function rewardBadge(reward) {
  const tone = reward === null || reward === undefined ? "" : reward > 0.5 ? "good" : reward <= 0 ? "bad" : "warn";
  return h("span", { class: `badge num ${tone}` }, num(reward, 3));
}

function promptBox(text) {
  return h("details", { class: "prompt-box" }, h("summary", {}, oneLine(question(text ?? ""), 120)), longText(text ?? ""));
}

function conversation(body, data) {
  const messages = data.messages ?? [{ role: "prompt", text: data.prompt ?? "" }, { role: "answer", text: data.completion ?? "" }];
  const images = pictures(data);
  let placed = false;
  const nodes = (function* () {
    for (const message of messages) {
      const holdsImages = !placed && ["user", "prompt"].includes(message.role);
      placed ||= holdsImages;
      yield h("article", { class: `message ${knownRole(message.role)}` }, h("header", {}, String(message.role)), holdsImages ? images : null,
        messageParts(String(message.text)));
    }
  })();
  body.append(addLazily(h("div", { class: "messages" }), nodes, 20));
}

const knownRole = (role) => (["system", "user", "assistant", "tool", "observation", "prompt", "answer"].includes(role) ? role : "other");

/** The images of the prompt, each a link to its full size; null without any. */
function pictures({ images, num_images: all }) {
  if (!all) return null;
  const shown = images.map((source, i) => h("a", { href: source, target: "_blank", rel: "noopener" },
    h("img", { src: source, alt: `Image ${i + 1} of the prompt`, loading: "lazy", class: "picture" })));
  const lost = all - images.length;
  return h("div", { class: "pictures" }, shown, lost > 0 ? h("span", { class: "muted" }, `${lost} ${lost === 1 ? "image was" : "images were"} not recorded`) : null);
}

// Calls and results of tools as Hermes, Qwen and others write them.
const TOOL = /<(tool_call|tool_response)>\s*([^]*?)\s*(?:<\/\1>|$)/g;

/** The text of a message, with the calls and results of tools in boxes. */
function messageParts(text) {
  const nodes = [];
  let last = 0;
  const addText = (end) => { if (text.slice(last, end).trim()) nodes.push(longText(text.slice(last, end))); };
  for (const match of text.matchAll(TOOL)) {
    addText(match.index);
    nodes.push(toolBox(match[1], match[2]));
    last = match.index + match[0].length;
  }
  addText(text.length);
  return nodes;
}

function toolBox(kind, content) {
  let call = null;
  try { call = kind === "tool_call" ? JSON.parse(content) : null; } catch { /* the model wrote no JSON: its text is shown */ }
  const title = kind === "tool_response" ? "tool result" : `tool call${typeof call?.name === "string" ? `: ${call.name}` : ""}`;
  const body = call?.arguments === undefined ? content : JSON.stringify(call.arguments, null, 2);
  return h("div", { class: "tool-call" }, h("span", { class: "mono tool-name" }, visible(title)), longText(body, { class: "mono" }));
}

/** Two answers to one prompt, chosen by their steps, with what changed. */
function stepDiff(rows, here) {
  const box = h("div", { class: "card diff" });
  const label = (row) => `${stepOf(row).join(" ")} · reward ${num(row.reward, 3)} · ${row.episode}#${row.sample}`;
  const pick = (name, index) => h("select", { "aria-label": name, onchange: draw }, rows.map((row, i) => h("option", { value: i, selected: i === index ? "" : null }, label(row))));
  const before = pick("Earlier answer", 0);
  const after = pick("Later answer", here > 0 ? here : rows.length - 1);
  const strip = h("div", { class: "step-strip" }, rows.map((row, i) => h("button", { type: "button", class: "step-dot", title: label(row), "aria-label": `Compare with ${label(row)}`, onclick: () => { after.value = i; draw(); } }, h("span", { class: "num" }, stepOf(row).join(" ")), rewardBadge(row.reward))));
  function draw() {
    const [a, b] = [rows[before.value], rows[after.value]];
    const parts = diffWords(a.completion ?? "", b.completion ?? "");
    const nodes = (function* () { for (const [kind, text] of parts) yield h(kind === "added" ? "ins" : kind === "removed" ? "del" : "span", {}, visible(text.length > 60_000 ? `${text.slice(0, 60_000)}…` : text)); })();
    replace(box, addLazily(h("div", { class: "text", dir: "auto" }), nodes, 2000));
    [...strip.children].forEach((node, i) => node.setAttribute("aria-pressed", String(i === Number(after.value))));
  }
  draw();
  return h("div", {}, strip, h("div", { class: "toolbar diff-bar" }, before, h("span", { class: "muted" }, "→"), after, h("span", { class: "muted" }, h("del", {}, "only before"), " ", h("ins", {}, "only after"))), box);
}
