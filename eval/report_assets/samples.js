// The sample browser: what the model was asked, what it wrote and what it was paid.

const FILTERS = {
  all: () => true,
  passed: (record) => paid(record) >= threshold(),
  failed: (record) => isNumber(paid(record)) && paid(record) < threshold(),
  errors: (record) => record.error !== null || record.reward === null,
  truncated: (record) => record.finish_reason === "length",
};
const LONGEST_LIST = 500;

const threshold = () => (isNumber(data.pass_threshold) ? data.pass_threshold : 0.5);
const paid = (record) => (typeof record.reward === "string" ? Number(record.reward) : record.reward);

const fixed = (value) => (isNumber(value) ? value.toFixed(2) : format(value));

const browser = { heldout: false, step: null, filter: "all", order: "as sampled", query: "", selected: null };

function entries(heldout) {
  return data.samples.filter((entry) => entry.heldout === heldout);
}

function currentEntry() {
  return data.samples.find((entry) => entry.heldout === browser.heldout && entry.step === browser.step);
}

function visibleRecords() {
  const query = browser.query.toLowerCase();
  const found = currentEntry().records.filter(
    (record) => FILTERS[browser.filter](record) && (!query || `${record.prompt}\n${record.response}`.toLowerCase().includes(query)),
  );
  const sign = { "lowest reward": 1, "highest reward": -1 }[browser.order];
  if (sign) found.sort((a, b) => sign * ((paid(a) ?? -Infinity) - (paid(b) ?? -Infinity)));
  if (browser.order === "longest") found.sort((a, b) => b.tokens - a.tokens);
  return found;
}

function startBrowser() {
  const root = document.getElementById("browser");
  if (!data.samples.length) {
    root.append(el("p", { class: "empty" }, "No samples were written yet."));
    return;
  }
  browser.heldout = entries(false).length === 0;
  browser.step = entries(browser.heldout).at(-1).step;
  root.append(
    el("div", { class: "controls", id: "sample-controls" }),
    el("div", { class: "split" }, el("div", { class: "list", id: "sample-list", role: "listbox", "aria-label": "responses" }), el("div", { class: "detail-pane", id: "sample" })),
  );
  drawControls();
  drawList();
}

function drawControls() {
  const steps = entries(browser.heldout).map((entry) => entry.step);
  const kinds = [false, true].filter((heldout) => entries(heldout).length);
  const kind = select("sample-kind", kinds.map((heldout) => [String(heldout), heldout ? "held-out" : "training"]), String(browser.heldout), (value) => {
    browser.heldout = value === "true";
    browser.step = entries(browser.heldout).at(-1).step;
    drawControls();
    drawList();
  });
  const search = el("input", { type: "search", id: "sample-query", placeholder: "text in prompt or response", value: browser.query });
  search.addEventListener("input", () => {
    browser.query = search.value;
    drawList();
  });
  const move = (label, by) => el("button", { type: "button", "aria-label": label, disabled: steps[steps.indexOf(browser.step) + by] === undefined, onclick: () => moveStep(by) }, by < 0 ? "‹" : "›");
  document.getElementById("sample-controls").replaceChildren(
    kind, "step", move("previous step", -1),
    select("sample-step", steps.map((step) => [String(step), String(step)]), String(browser.step), (value) => showStep(Number(value))),
    move("next step", 1),
    select("sample-filter", Object.keys(FILTERS).map((name) => [name, name]), browser.filter, (value) => {
      browser.filter = value;
      drawList();
    }),
    select("sample-order", ["as sampled", "lowest reward", "highest reward", "longest"].map((name) => [name, name]), browser.order, (value) => {
      browser.order = value;
      drawList();
    }),
    search, el("span", { id: "sample-count" }),
  );
}

function select(id, options, chosen, change) {
  const node = el("select", { id, "aria-label": id.replace("sample-", "") });
  for (const [value, text] of options) node.append(el("option", { value, selected: value === chosen }, text));
  node.addEventListener("change", () => change(node.value));
  return node;
}

function showStep(step) {
  browser.step = step;
  drawControls();
  drawList();
}

function moveStep(by) {
  const steps = entries(browser.heldout).map((entry) => entry.step);
  const step = steps[steps.indexOf(browser.step) + by];
  if (step !== undefined) showStep(step);
}

function drawList() {
  const entry = currentEntry();
  const records = visibleRecords();
  const list = document.getElementById("sample-list");
  list.replaceChildren(...records.slice(0, LONGEST_LIST).map((record) =>
    el("button", { class: "row", type: "button", role: "option", onclick: () => show(record) }, paidLabel(record), el("span", {}, record.response.trim().slice(0, 200) || "(empty)")),
  ));
  const cut = entry.records.length < entry.of ? `, ${entry.of} written` : "";
  const long = records.length > LONGEST_LIST ? `, ${LONGEST_LIST} listed` : "";
  document.getElementById("sample-count").textContent = `${records.length} of ${entry.records.length} responses${cut}${long}`;
  list.scrollTop = 0;
  show(records[0] ?? null);
}

function paidLabel(record) {
  if (record.error !== null || record.reward === null) return el("span", { class: "paid bad" }, "error");
  return el("span", { class: `paid ${FILTERS.passed(record) ? "good" : ""}` }, fixed(record.reward));
}

function show(record) {
  browser.selected = record;
  const shown = visibleRecords().slice(0, LONGEST_LIST);
  [...document.getElementById("sample-list").children].forEach((row, i) => {
    const chosen = shown[i] === record;
    row.setAttribute("aria-selected", String(chosen));
    if (chosen) row.scrollIntoView({ block: "nearest", container: "nearest" });
  });
  const pane = document.getElementById("sample");
  pane.scrollTop = 0;
  if (record === null) {
    pane.replaceChildren(el("p", { class: "empty" }, "No response matches."));
    return;
  }
  const facts = [["reward", fixed(record.reward)], ...Object.entries(record.parts).map(([name, value]) => [name, fixed(value)])];
  if (record.advantage !== null) facts.push(["advantage", fixed(record.advantage)]);
  facts.push(["finish", record.finish_reason || "unknown"], ["tokens", String(record.tokens)], ["prompt tokens", String(record.prompt_tokens)]);
  const { versions } = record; // runs of tokens: [version, tokens]
  if (versions.length === 1) facts.push(["policy version", String(versions[0][0])]);
  if (versions.length > 1) facts.push(["policy versions", versions.map(([version, tokens]) => `${version} (${tokens} tokens)`).join(", ")]);
  facts.push(["prompt id", record.prompt_id], ["group", `${record.group} / ${record.sample}`]);
  pane.replaceChildren(
    el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    ...(record.error === null ? [] : [el("h3", { class: "bad" }, "Scoring failed"), el("pre", { id: "sample-error" }, record.error)]),
    el("h3", {}, "Prompt"), el("pre", { id: "sample-prompt" }, record.prompt),
    el("h3", {}, "Response"), el("pre", { id: "sample-response" }, record.response || "(empty)"),
    el("h3", {}, "Expected answer"), el("pre", {}, record.answer === null ? "(none)" : String(record.answer)),
    ...siblings(record),
  );
}

function siblings(record) {
  const group = currentEntry().records.filter((other) => other.group === record.group);
  if (group.length < 2) return [];
  const buttons = group.map((other) =>
    el("button", { type: "button", title: other.response.slice(0, 300), "aria-current": String(other === record), onclick: () => show(other) }, paidLabel(other)),
  );
  return [el("h3", {}, `Its group of ${group.length}`), el("div", { class: "siblings" }, ...buttons)];
}

function moveSample(by) {
  const records = visibleRecords().slice(0, LONGEST_LIST);
  const next = records[records.indexOf(browser.selected) + by];
  if (next) show(next);
}

document.addEventListener("keydown", (event) => {
  if (!data.samples.length || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const action = { j: () => moveSample(1), k: () => moveSample(-1), "]": () => moveStep(1), "[": () => moveStep(-1) }[event.key];
  if (action) action();
});
