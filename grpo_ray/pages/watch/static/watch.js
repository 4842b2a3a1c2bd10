"use strict";
// The page requests the state every few seconds and fetches only changed parts. All text is inserted as text nodes; the
// content security policy refuses everything that turns text into elements.

const POLL_SECONDS = 5;
const FIRST_POLL_SECONDS = 0.2;
const TABS = ["report", "rollouts", "problems", "heldout"];
const byId = (id) => document.getElementById(id);

/** Create an element. `attributes` are set as attributes; functions are event listeners. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Fetch JSON; an error response is thrown as an Error with the server's message. */
async function ask(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const response = await fetch(`api/${path}?${new URLSearchParams(given)}`, { cache: "no-store" });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

/** Fetch HTML that the server has escaped. XMLHttpRequest parses it; fetch would return text to be parsed here. */
function fetchDocument(path) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("GET", path);
    request.responseType = "document";
    request.onload = () => (request.status === 200 && request.response ? resolve(request.response) : reject(new Error(path)));
    request.onerror = () => reject(new Error(path));
    request.send();
  });
}

const number = (value, digits = 3) => (value === null || value === undefined ? "?" : String(Number(value.toPrecision(digits))));
const percent = (value) => (value === null || value === undefined ? "?" : `${Math.round(100 * value)} %`);
/** Format a mean score: a share as a percentage, any other number as it is. */
const score = (value) => (value > 1 || value < 0 ? number(value) : percent(value));
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const shortId = (id) => (id.length > 12 ? `${id.slice(0, 12)}…` : id);

function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

/** Debounce an action: run it once no call has come for some time. */
function settle(action, milliseconds = 250) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
}

/** Wrap a load so that only the newest of overlapping calls takes effect: `isCurrent` returns false in older ones. */
function newest(load) {
  let count = 0;
  return async (...given) => {
    const mine = ++count;
    await load(() => mine === count, ...given);
  };
}

// State

let state = null;
let shownReport = null;
let nextPoll = 0;

async function poll() {
  let wait = POLL_SECONDS;
  if (!document.hidden) {
    try {
      const answer = await ask("state");
      state = { ...answer, offset: Date.now() / 1000 - answer.now };
      showState();
      if (state.number === null) wait = state.problem ? POLL_SECONDS : FIRST_POLL_SECONDS;
      else await showNews();
    } catch (error) {
      showState(error);
    }
  }
  clearTimeout(nextPoll);
  nextPoll = setTimeout(poll, 1000 * wait);
}

function showState(error = null) {
  const problem = byId("problem");
  let text = state?.problem ?? "";
  if (error) text = "grpo-ray watch does not answer: it has ended, or the connection is lost.";
  if (text && state?.read_at) text += ` The page shows the state of ${new Date(1000 * state.read_at).toLocaleTimeString()}.`;
  if (problem.textContent !== text) problem.textContent = text;
  problem.hidden = !text;
  if (!state || state.number === null) return;
  document.title = `${state.name}: step ${state.step} - grpo_ray`;
  if (byId("name").textContent !== state.name) byId("name").textContent = state.name;
  byId("name").title = state.uri;
  const status = byId("status");
  status.hidden = false;
  status.className = `status ${state.status.level}`;
  if (status.textContent !== state.status.text) status.textContent = state.status.text;
  showAge();
}

function showAge() {
  if (!state || !state.read_at) return;
  const seconds = Math.max(0, Date.now() / 1000 - state.offset - state.read_at);
  const step = state.max_steps ? `step ${state.step} of ${state.max_steps}` : `step ${state.step}`;
  byId("age").textContent = `${step}, read ${seconds < 10 ? "just now" : `${duration(seconds)} ago`}`;
}

async function showNews() {
  showSources();
  if (shownReport !== state.number) {
    const number = state.number;
    const isFirst = shownReport === null;
    await showReport();
    shownReport = number;
    if (isFirst) loadTab();
  }
  if (!byId("rollouts").hidden) showNewGroups();
  showHeldoutChoices();
}

let shownSources = "";

/** Offer the sources of a mixture in the filter. */
function showSources() {
  const key = JSON.stringify(state.sources);
  byId("source-label").hidden = !state.sources.length;
  if (!state.sources.length || key === shownSources) return;
  shownSources = key;
  fillSelect(byId("filter").elements.namedItem("source"), [["", "any"], ...state.sources.map((each) => [each, each])]);
}

// Report

/** Replace the parts of the report that have changed; unfolded parts stay unfolded, and nothing scrolls. */
async function showReport() {
  const parts = [...(await fetchDocument("contents")).body.children];
  const shown = byId("report");
  const old = [...shown.children];
  const unfolded = new Set([...shown.querySelectorAll("details[open]")].map(keyOfDetails));
  const focused = document.activeElement?.matches("#report summary") ? keyOfDetails(document.activeElement.parentElement) : null;
  parts.forEach((part, index) => {
    for (const details of part.matches("details") ? [part] : part.querySelectorAll("details")) {
      details.open = unfolded.has(keyOfDetails(details));
      if (details.dataset.source) fillDetails(details, old[index]);
    }
    if (!old[index]) shown.append(part);
    else if (!old[index].isEqualNode(part)) old[index].replaceWith(part);
  });
  old.slice(parts.length).forEach((part) => part.remove());
  if (focused !== null && document.activeElement === document.body) {
    [...shown.querySelectorAll("details")].find((each) => keyOfDetails(each) === focused)?.querySelector("summary").focus({ preventScroll: true });
  }
}

/** Identify an unfolding part by its summary without the numbers, since they change. */
const keyOfDetails = (details) => details.querySelector("summary").textContent.replace(/\d+/g, "");

/** Fetch the contents of an unfolding part when it is open; until then, keep what was shown. */
function fillDetails(details, shown) {
  const before = shown?.dataset?.source === details.dataset.source ? shown.querySelector(".grid-charts") : null;
  if (before) details.append(before.cloneNode(true));
  const fill = newest(async (isCurrent) => {
    if (!details.open) return;
    const fetched = (await fetchDocument(details.dataset.source)).body.firstElementChild;
    if (!isCurrent()) return;
    details.querySelector(".grid-charts")?.remove();
    if (fetched) details.append(fetched);
  });
  details.addEventListener("toggle", () => fill().catch(() => {}));
  fill().catch(() => {});
}

// Lists and tabs

/** Move the focus through a list with the arrow keys. */
function useArrowKeys(list, keys = ["ArrowUp", "ArrowDown"]) {
  list.addEventListener("keydown", (event) => {
    const distance = { [keys[0]]: -1, [keys[1]]: 1 }[event.key];
    const buttons = [...list.querySelectorAll("button")];
    const next = buttons[buttons.indexOf(document.activeElement) + distance];
    if (!distance || !next) return;
    event.preventDefault();
    next.focus();
    if (next.getAttribute("role") === "tab") next.click();
  });
}

function markChosen(list, button) {
  for (const each of list.querySelectorAll("[aria-current]")) each.removeAttribute("aria-current");
  button?.setAttribute("aria-current", "true");
}

function chooseTab(name) {
  for (const tab of TABS) {
    const isChosen = tab === name;
    byId(tab).hidden = !isChosen;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(isChosen));
    byId(`tab-${tab}`).tabIndex = isChosen ? 0 : -1;
  }
  loadTab();
  keepAddress();
}

/** Fill the chosen tab, once the run folder has been read. */
function loadTab() {
  const load = { rollouts: loadGroups, problems: loadProblems, heldout: showHeldoutChoices }[currentTab()];
  if (state?.number && load) load();
}

const currentTab = () => TABS.find((tab) => !byId(tab).hidden);

/** Keep tab and filter in the address, so that a reload or a copied address shows the same view. */
function keepAddress() {
  const tab = currentTab();
  const words = tab === "rollouts" ? new URLSearchParams(filterValues()) : new URLSearchParams();
  for (const [name, value] of [...words]) if (value === "" || (name === "texts" && value === "1")) words.delete(name);
  history.replaceState(null, "", `#${tab}${[...words].length ? `?${words}` : ""}`);
}

function readAddress() {
  const [tab, query] = location.hash.slice(1).split("?");
  for (const [name, value] of new URLSearchParams(query ?? "")) {
    const field = byId("filter").elements.namedItem(name);
    if (name === "source") fillSelect(field, [["", "any"], [value, value]], value); // before the page knows the sources
    if (field?.type === "checkbox") field.checked = value === "1";
    else if (field && "value" in field) field.value = value;
  }
  chooseTab(TABS.includes(tab) ? tab : "report");
}

// Rollouts

let page = null; // response with the latest page of groups
let colouring = "none";

function filterValues() {
  const fields = byId("filter").elements;
  const values = {};
  for (const name of ["text", "outcome", "order", "first", "last", "low", "high", "problem", "source"]) {
    values[name] = fields.namedItem(name).value.trim();
  }
  values.texts = fields.namedItem("texts").checked ? "1" : "0";
  return values;
}

/** Restrict the filter during a search, which lists groups by step only, and only groups with texts. */
function adaptFilter() {
  const fields = byId("filter").elements;
  const searches = fields.namedItem("text").value.trim() !== "";
  for (const option of fields.namedItem("order").options) {
    option.disabled = searches && ["highest", "lowest"].includes(option.value);
    if (option.disabled && option.selected) fields.namedItem("order").value = "newest";
  }
  fields.namedItem("texts").disabled = searches;
}

const loadGroups = newest(async (isCurrent, isMore = false) => {
  adaptFilter();
  keepAddress();
  const filter = filterValues();
  const list = byId("groups");
  try {
    const following = isMore && page ? { skip: page.next, until: page.until } : {};
    const answer = await ask("groups", { ...filter, ...following });
    if (!isCurrent()) return;
    if (!isMore) list.replaceChildren();
    page = answer;
    for (const group of answer.groups) list.append(make("li", {}, groupButton(group, filter.text)));
    const shown = list.children.length;
    byId("group-count").textContent = filter.text
      ? `${shown} found in ${answer.searched.toLocaleString("en")} of ${plural(answer.total, "group")}`
      : `${plural(answer.total, "group")}${filter.texts === "1" ? " with texts" : ""}`;
    const more = byId("more-groups");
    more.hidden = answer.next === null;
    more.textContent = filter.text ? "search on" : "more";
    byId("new-groups").hidden = true;
    // A search returns after a second with its results so far: continue until at least 20 groups are shown.
    if (filter.text && answer.next !== null && shown < 20) await loadGroups(true);
  } catch (error) {
    if (isCurrent()) byId("group-count").textContent = error.message;
  }
});

function groupButton(group, text) {
  const button = make(
    "button",
    { type: "button", click: () => { markChosen(byId("groups"), button); showGroup(group); } },
    make("span", { class: "step" }, `step ${group.step}`),
    make("code", { class: "note" }, shortId(group.problem)),
    ...(group.source ? [make("span", { class: "note" }, group.source)] : []),
    make("span", { class: "value", title: "mean reward" }, number(group.reward)),
    verdictDots(group.correct),
  );
  if (group.prompt) button.append(make("span", { class: "excerpt prompt-line", dir: "auto" }, group.prompt));
  if (group.excerpt) button.append(markMatches(make("span", { class: "excerpt", dir: "auto" }), group.excerpt, text));
  if (!group.trained) button.append(make("span", { class: "excerpt" }, "discarded, not trained on"));
  return button;
}

function verdictDots(verdicts) {
  const right = verdicts.filter((each) => each === 1).length;
  const dots = make("span", { class: "dots", role: "img", "aria-label": `${right} of ${verdicts.length} right` });
  for (const each of verdicts.slice(0, 32)) dots.append(make("i", { class: { 1: "yes", 0: "no" }[each] ?? "unknown" }));
  return dots;
}

/** Append a text to an element, with the occurrences of `text` marked. */
function markMatches(element, value, text) {
  const lower = value.toLowerCase();
  const searched = (text ?? "").toLowerCase();
  let begin = 0;
  // A letter whose lower case has another length would shift all positions.
  while (searched && lower.length === value.length) {
    const at = lower.indexOf(searched, begin);
    if (at < 0) break;
    element.append(value.slice(begin, at), make("mark", {}, value.slice(at, at + searched.length)));
    begin = at + searched.length;
  }
  element.append(value.slice(begin));
  return element;
}

function showNewGroups() {
  const newer = (state.last_group_step ?? 0) - (page?.until ?? 0);
  const isNewestFirst = byId("filter").elements.namedItem("order").value === "newest";
  if (page && page.total === 0 && state.groups) loadGroups();
  else if (page && newer > 0 && isNewestFirst) {
    byId("new-groups").textContent = `show the groups of ${plural(newer, "new step")}`;
    byId("new-groups").hidden = false;
  }
}

const showGroup = newest(async (isCurrent, group) => {
  const detail = byId("group");
  if (!group.has_texts) {
    detail.replaceChildren(groupHead(group), make("p", { class: "empty" }, "The texts of this group were not recorded: of each step only one or two groups have them."), rewardTable(group));
    return;
  }
  try {
    const found = await ask("group", { step: group.step, epoch: group.epoch, problem: group.problem });
    if (!isCurrent()) return;
    const text = filterValues().text;
    const prompt = markMatches(make("pre", { class: "prompt", dir: "auto" }), found.prompt, text);
    detail.replaceChildren(make("div", { class: "card" }, groupHead(found), prompt));
    const answers = make("div", { class: "completions" });
    const hasTokens = found.completions.some((each) => each.tokens);
    const hasResults = found.completions.some((each) => each.tokens?.result?.includes(true));
    const isGraded = found.completions.some((each) => each.correct !== null);
    const draw = () => answers.replaceChildren(...found.completions.map((each, index) => completionCard(each, index, text, isGraded)));
    if (hasTokens) detail.append(colourTools(draw, hasResults));
    else detail.append(make("p", { class: "note" }, "No tokens were recorded of this group."));
    draw();
    detail.append(answers);
    if (matchMedia("(max-width: 760px)").matches) detail.scrollIntoView({ block: "start" });
    detail.focus({ preventScroll: true });
  } catch (error) {
    if (isCurrent()) detail.replaceChildren(make("p", { class: "problem" }, error.message));
  }
});

function groupHead(group) {
  const parts = [make("b", {}, `step ${group.step}`), make("span", { class: "note" }, `epoch ${group.epoch + 1}`)];
  parts.push(make("button", { type: "button", class: "link", title: "all groups of this problem", click: () => showProblem(group.problem) }, `problem ${group.problem}`));
  if (group.source) parts.push(make("span", { class: "note", dir: "auto" }, group.source));
  if (group.sample === "signal") parts.push(make("span", { class: "note" }, "first group of the step whose rewards differ"));
  if (group.sample === "first") parts.push(make("span", { class: "note" }, "first group of the step"));
  parts.push(backToList(byId("rollouts")));
  return make("p", { class: "head" }, ...parts);
}

/** Make a button, on narrow screens only, that returns from the details to the list above them. */
function backToList(view) {
  const back = () => {
    view.querySelector(".rows").scrollIntoView({ block: "center" });
    (view.querySelector("[aria-current=true]") ?? view).focus({ preventScroll: true });
  };
  return make("button", { type: "button", class: "link narrow", click: back }, "back to the list");
}

function rewardTable(group) {
  const rows = group.rewards.map((reward, index) => make("tr", {}, make("td", {}, String(index + 1)), make("td", { class: "n" }, number(reward)), make("td", {}, verdict(group.correct[index])), make("td", { class: "n" }, number(group.lengths[index], 6)), make("td", {}, group.truncated[index] ? "truncated" : "")));
  const head = make("tr", {}, ...["completion", "reward", "verdict", "tokens", ""].map((name) => make("th", {}, name)));
  return make("div", { class: "card scroll" }, make("table", {}, head, ...rows));
}

const verdict = (correct) => ({ 1: "correct", 0: "wrong", true: "correct", false: "wrong" })[correct] ?? "no verdict";

function completionCard(completion, index, text, isGraded) {
  const name = verdict(completion.correct), reward = `reward ${number(completion.reward)}`;
  const head = make("p", { class: "head" }, make("b", {}, isGraded ? name : reward));
  if (isGraded) head.append(make("span", { class: "note" }, reward));
  head.append(make("span", { class: "note" }, `${completion.length ?? "?"} tokens`));
  if (completion.advantage !== null) head.append(make("span", { class: "note" }, `advantage ${completion.advantage > 0 ? "+" : ""}${number(completion.advantage)}`));
  if (completion.truncated) head.append(make("span", { class: "tag" }, "truncated"));
  const card = make("div", { class: `card answer ${name}` }, head);
  if (completion.conversation) card.append(conversationFacts(completion.conversation));
  if (colouring === "none" || !completion.tokens) card.append(...completionText(completion, text));
  else card.append(...tokenView(completion, index));
  return card;
}

// Conversations

function conversationFacts(conversation) {
  const errors = conversation.errors ? make("span", { class: "error" }, conversation.errors) : null;
  return make("p", { class: "turns" }, make("span", {}, conversation.facts), errors, make("span", {}, `ended: ${conversation.ended}`));
}

/** Show a completion: its messages as blocks, or its text if it has none. */
function completionText(completion, text) {
  const messages = completion.conversation?.messages;
  return messages ? messages.map((each) => messageBlock(each, text)) : [markMatches(make("pre", { dir: "auto" }), completion.text, text)];
}

/** Show a message. A long call or result is folded, unless it contains the searched text. */
function messageBlock(message, text) {
  const block = make("div", { class: `message ${message.kind}${message.final ? " final" : ""}` });
  const title = [make("b", {}, message.title)];
  if (message.name) title.push(" ", markMatches(make("code", {}), message.name, text));
  const content = markMatches(make("pre", { dir: "auto" }), message.text, text);
  if (message.preview) {
    const summary = make("summary", {}, ...title, " ", make("span", { class: "note" }, message.preview));
    block.append(make("details", { open: content.querySelector("mark") !== null }, summary, content));
  } else {
    block.append(make("p", { class: "role" }, ...title));
    if (message.kind !== "gap") block.append(content);
  }
  return block;
}

// Tokens. Each value has the class of a colour; the scales list the bounds.

const bucket = (value, bounds) => bounds.filter((bound) => value >= bound).length;
const COLOURINGS = {
  none: { label: "nothing", scale: [] },
  logprob: {
    label: "log-probability of the engine",
    scale: [["", "likely"], ["l1", "below -0.1"], ["l2", "-0.7"], ["l3", "-2"], ["l4", "-4 nats"]],
    colour: (tokens, at) => (tokens.engine[at] === null ? "unread" : ["", "l1", "l2", "l3", "l4"][bucket(-tokens.engine[at], [0.1, 0.7, 2, 4])]),
  },
  ratio: {
    label: "importance ratio, learner to engine",
    scale: [["d3", "0.5"], ["d2", "0.8"], ["d1", "0.95"], ["", "1"], ["u1", "1.05"], ["u2", "1.25"], ["u3", "2"]],
    colour: (tokens, at) => {
      const ratio = tokens.ratio?.[at] ?? null;
      if (ratio === null) return "unread";
      return ratio < 1 ? ["", "d1", "d2", "d3"][bucket(1 / ratio, [1 / 0.95, 1 / 0.8, 2])] : ["", "u1", "u2", "u3"][bucket(ratio, [1.05, 1.25, 2])];
    },
  },
  masked: {
    label: "mask of the loss",
    scale: [["", "has a gradient"], ["masked", "masked or clipped"]],
    colour: (tokens, at) => (tokens.masked[at] ? "masked" : ""),
  },
  advantage: {
    label: "advantage",
    scale: [["m3", "-1.5"], ["m2", "-0.5"], ["m1", "below 0"], ["", "0"], ["p1", "above 0"], ["p2", "0.5"], ["p3", "1.5"]],
    colour: (tokens, at, advantage) => {
      if (tokens.masked[at]) return "masked";
      if (!advantage) return "";
      return (advantage < 0 ? ["m1", "m2", "m3"] : ["p1", "p2", "p3"])[bucket(Math.abs(advantage), [0.5, 1.5])];
    },
  },
};

/** Tokens of results have no numbers of the policy, so they look the same under every colouring. */
const RESULT = ["result", "result of a tool, not generated by the policy"];
const isResult = (tokens, at) => tokens.result?.[at] ?? false;

function colourTools(draw, hasResults) {
  const scale = make("span", { class: "scale" });
  const choose = make("select", { id: "colouring", change: () => { colouring = choose.value; draw(); drawScale(); } });
  for (const [name, each] of Object.entries(COLOURINGS)) choose.append(make("option", { value: name, selected: name === colouring }, each.label));
  const legend = () => (hasResults && colouring !== "none" ? [...COLOURINGS[colouring].scale, RESULT] : COLOURINGS[colouring].scale);
  const drawScale = () => scale.replaceChildren(...legend().map(([name, label]) => make("span", {}, make("i", { class: name }), label)));
  drawScale();
  return make("div", { class: "card tools" }, make("label", {}, "Colour tokens by ", choose), scale);
}

/** Show the tokens of a completion; the arrow keys, or a click, choose one, and its numbers are shown below. */
function tokenView(completion, index) {
  const { tokens } = completion;
  const line = make("p", { class: "note token-line", role: "status" }, tokens.learner ? "" : "The learner did not read this completion: it has no gradient.");
  const view = make("pre", { class: "tokens", dir: "auto", tabindex: "0", role: "group", "aria-label": `tokens of completion ${index + 1}; arrow keys choose one` });
  const spans = tokens.texts.map((text, at) => make("span", { class: isResult(tokens, at) ? "result" : COLOURINGS[colouring].colour(tokens, at, completion.advantage) }, text));
  spans.forEach((span, at) => {
    if (tokens.omitted && at === tokens.head) view.append(gapNote(tokens.omitted));
    view.append(span);
  });
  if (tokens.omitted && tokens.head >= spans.length) view.append(gapNote(tokens.omitted));
  let chosen = -1;
  const choose = (at) => {
    if (at < 0 || at >= spans.length) return;
    spans[chosen]?.classList.remove("here");
    chosen = at;
    spans[at].classList.add("here");
    const place = tokens.omitted && at >= tokens.head ? at + tokens.omitted : at;
    const parts = [`token ${place + 1}: ${JSON.stringify(tokens.texts[at])}`];
    if (isResult(tokens, at)) {
      line.textContent = [...parts, "part of a result: not generated by the policy, no gradient"].join(", ");
      return;
    }
    parts.push(`engine ${number(tokens.engine[at])}`);
    if (tokens.learner) parts.push(`learner ${number(tokens.learner[at])}`, `ratio ${number(tokens.ratio[at])}`);
    if (tokens.masked[at]) parts.push("masked");
    line.textContent = parts.join(", ");
  };
  view.addEventListener("click", (event) => choose(spans.indexOf(event.target)));
  view.addEventListener("keydown", (event) => {
    const distance = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!distance) return;
    event.preventDefault();
    choose(chosen + distance);
  });
  return [view, line];
}

const gapNote = (count) => make("span", { class: "gap" }, `${plural(count, "token")} not recorded`);

// Problems

let nextProblem = null;

const loadProblems = newest(async (isCurrent, isMore = false) => {
  const fields = byId("problem-filter").elements;
  const body = byId("problem-table").tBodies[0];
  try {
    const answer = await ask("problems", { order: fields.namedItem("order").value, problem: fields.namedItem("problem").value.trim(), skip: isMore ? nextProblem : null });
    if (!isCurrent()) return;
    if (!isMore) body.replaceChildren();
    for (const each of answer.problems) body.append(problemRow(each));
    byId("problem-count").textContent = `${plural(answer.total, "problem")} with verdicts`;
    nextProblem = answer.next;
    byId("more-problems").hidden = answer.next === null;
  } catch (error) {
    if (isCurrent()) byId("problem-count").textContent = error.message;
  }
});

function problemRow(problem) {
  const cell = (...children) => make("td", { class: "n" }, ...children);
  const rate = (value, step) => make("span", { title: `step ${step}` }, `${percent(value)} `, rateBar(value));
  return make("tr", {}, make("td", {}, make("button", { type: "button", class: "link", click: () => showProblem(problem.problem) }, make("code", {}, problem.problem))), cell(String(problem.groups)), cell(rate(problem.first_rate, problem.first_step)), cell(rate(problem.last_rate, problem.last_step)), cell(percent(problem.rate)), make("td", { class: "note", dir: "auto" }, problem.prompt ?? ""));
}

function rateBar(value) {
  const bar = makeSvg("svg", { viewBox: "0 0 90 10", "aria-hidden": "true" }, makeSvg("rect", { x: 0, y: 0, height: 10, width: 90 * value }));
  return make("span", { class: "rate" }, bar);
}

/** Show all groups of a problem, also those without texts. */
function showProblem(problem) {
  const form = byId("filter");
  form.reset();
  form.elements.namedItem("problem").value = problem;
  form.elements.namedItem("texts").checked = false;
  chooseTab("rollouts");
  byId("tab-rollouts").focus();
}

// Held-out

const KINDS = { solved: "newly solved", lost: "newly lost", right: "solved at both", wrong: "solved at neither" };
let kind = "solved";
let heldoutShown = "";
let nextHeldout = null;

function showHeldoutChoices() {
  const sets = state?.heldout ?? [];
  byId("no-heldout").hidden = sets.length > 0;
  byId("heldout-view").hidden = sets.length === 0;
  const key = JSON.stringify(sets);
  if (!sets.length || byId("heldout").hidden || key === heldoutShown) return;
  heldoutShown = key;
  const fields = byId("heldout-filter").elements;
  fillSelect(fields.namedItem("set"), sets.map((each) => [each.key, each.label || "held-out"]));
  byId("heldout-set-label").hidden = sets.length === 1;
  showSteps();
}

/** Replace the options of a selection; the chosen option stays chosen if it still exists. */
function fillSelect(select, options, chosen = null) {
  const before = select.value || chosen;
  select.replaceChildren(...options.map(([value, label]) => make("option", { value }, label)));
  if (options.some(([value]) => value === before)) select.value = before;
}

/** Offer the measurements of the chosen set; the second one follows the newest unless another is chosen. */
function showSteps() {
  const fields = byId("heldout-filter").elements;
  const after = fields.namedItem("after");
  const isNewest = after.selectedIndex === after.options.length - 1;
  const set = state.heldout.find((each) => each.key === fields.namedItem("set").value) ?? state.heldout[0];
  const options = set.measurements.map((each) => [String(each.step), `${each.step ? `step ${each.step}` : "initial policy"}: ${number(each.accuracy)}`]);
  fillSelect(fields.namedItem("before"), options, options[0][0]);
  fillSelect(after, options);
  if (isNewest) after.selectedIndex = options.length - 1;
  fillSelect(fields.namedItem("third"), [["", "nothing"], ...options]);
  byId("heldout-note").textContent = set.omitted ? `${plural(set.omitted, "measurement")} on other problems or with another sampling left out.` : "";
  loadChanges();
}

const loadChanges = newest(async (isCurrent, isMore = false) => {
  const fields = byId("heldout-filter").elements;
  const values = { set: fields.namedItem("set").value, before: fields.namedItem("before").value, after: fields.namedItem("after").value };
  const list = byId("heldout-problems");
  try {
    const answer = await ask("changes", { ...values, kind, skip: isMore ? nextHeldout : null });
    if (!isCurrent()) return;
    byId("kinds").replaceChildren(...Object.entries(KINDS).map(([name, label]) => make("button", { type: "button", "aria-pressed": String(name === kind), click: () => { kind = name; loadChanges(); } }, make("b", {}, String(answer.counts[name])), ` ${label}`)));
    if (!isMore) list.replaceChildren();
    for (const each of answer.problems) list.append(make("li", {}, heldoutButton(each, list)));
    if (!list.children.length) list.append(make("li", { class: "empty" }, `No problem is ${KINDS[kind]}.`));
    nextHeldout = answer.next;
    byId("more-heldout").hidden = answer.next === null;
  } catch (error) {
    if (isCurrent()) list.replaceChildren(make("li", { class: "problem" }, error.message));
  }
});

function heldoutButton(problem, list) {
  const button = make("button", { type: "button", click: () => { markChosen(list, button); showHeldoutProblem(problem.problem); } }, make("code", {}, shortId(problem.problem)), make("span", {}), make("span", { class: "value" }, `${score(problem.before)} → ${score(problem.after)}`));
  if (problem.prompt) button.append(make("span", { class: "excerpt prompt-line", dir: "auto" }, problem.prompt));
  return button;
}

const showHeldoutProblem = newest(async (isCurrent, problem) => {
  const fields = byId("heldout-filter").elements;
  const steps = ["before", "after", "third"].map((name) => fields.namedItem(name).value).filter((value) => value !== "");
  const detail = byId("heldout-problem");
  try {
    const ordered = [...new Set(steps)].sort((a, b) => a - b);
    const found = await ask("heldout-problem", { set: fields.namedItem("set").value, problem, steps: ordered.join(",") });
    if (!isCurrent()) return;
    const card = make("div", { class: "card" }, make("p", { class: "head" }, make("b", {}, `problem ${found.problem}`), backToList(byId("heldout"))));
    if (found.prompt) card.append(make("pre", { class: "prompt", dir: "auto" }, found.prompt));
    if (found.solution) card.append(make("p", {}, make("span", { class: "note" }, "solution "), make("code", { dir: "auto" }, found.solution)));
    card.append(historyChart(found.history));
    const columns = found.columns.map((each) => make("div", {}, make("h3", {}, each.step ? `step ${each.step}` : "initial policy"), ...each.completions.map((completion) => heldoutCard(completion))));
    detail.replaceChildren(card, make("div", { class: "side", tabindex: "0", role: "group", "aria-label": "completions side by side" }, ...columns));
    if (matchMedia("(max-width: 760px)").matches) detail.scrollIntoView({ block: "start" });
    detail.focus({ preventScroll: true });
  } catch (error) {
    if (isCurrent()) detail.replaceChildren(make("p", { class: "problem" }, error.message));
  }
});

function heldoutCard(completion) {
  const name = verdict(completion.correct);
  const head = make("p", { class: "head" }, make("b", {}, name), make("span", { class: "note" }, `${completion.length ?? "?"} tokens`));
  if (completion.truncated) head.append(make("span", { class: "tag" }, "truncated"));
  const text = completion.text === null ? [make("p", { class: "note" }, "text not recorded")] : completionText(completion, "");
  const facts = completion.conversation ? [conversationFacts(completion.conversation)] : [];
  return make("div", { class: `card answer ${name}` }, head, ...facts, ...text);
}

/** Draw the mean score of the completions, the share of correct ones if that is the score, at each checkpoint. */
function historyChart(points) {
  const known = points.filter((each) => each.accuracy !== null);
  const last = Math.max(1, ...known.map((each) => each.step));
  const low = Math.min(0, ...known.map((each) => each.accuracy)), high = Math.max(1, ...known.map((each) => each.accuracy));
  const place = (each) => [6 + (408 * each.step) / last, 40 - (34 * (each.accuracy - low)) / (high - low)];
  const path = known.map((each, index) => `${index ? "L" : "M"}${place(each).map((value) => value.toFixed(1)).join(" ")}`).join("");
  const label = `mean score of the completions: ${known.map((each) => `step ${each.step} ${score(each.accuracy)}`).slice(0, 50).join(", ")}`;
  const svg = makeSvg("svg", { viewBox: "0 0 420 46", class: "history", role: "img", "aria-label": label }, makeSvg("path", { d: path || "M0 0" }));
  for (const each of known) {
    const dot = makeSvg("circle", { cx: place(each)[0], cy: place(each)[1], r: 2.4 }, makeSvg("title", {}));
    dot.firstChild.textContent = `step ${each.step}: ${score(each.accuracy)}`;
    svg.append(dot);
  }
  return svg;
}

// Start

for (const tab of TABS) byId(`tab-${tab}`).addEventListener("click", () => chooseTab(tab));
useArrowKeys(document.querySelector(".tabs"), ["ArrowLeft", "ArrowRight"]);
useArrowKeys(byId("groups"));
useArrowKeys(byId("heldout-problems"));
byId("filter").addEventListener("input", settle(() => loadGroups()));
byId("filter").addEventListener("submit", (event) => { event.preventDefault(); loadGroups(); });
byId("filter").addEventListener("reset", () => setTimeout(() => loadGroups()));
byId("more-groups").addEventListener("click", () => loadGroups(true));
byId("new-groups").addEventListener("click", () => loadGroups());
byId("problem-filter").addEventListener("input", settle(() => loadProblems()));
byId("problem-filter").addEventListener("submit", (event) => event.preventDefault());
byId("more-problems").addEventListener("click", () => loadProblems(true));
byId("heldout-filter").addEventListener("change", (event) => {
  if (event.target.name === "set") showSteps();
  else loadChanges();
  const chosen = byId("heldout-problems").querySelector("[aria-current=true]");
  if (event.target.name === "third" && chosen) chosen.click();
});
byId("heldout-filter").addEventListener("submit", (event) => event.preventDefault());
byId("more-heldout").addEventListener("click", () => loadChanges(true));
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
window.addEventListener("hashchange", readAddress);
setInterval(showAge, 1000);
readAddress();
poll();
