// The tokens of one optimizer step: a response as coloured text, and a table that sorts and filters.

const columns = data.columns;
const total = columns.trajectory.length;
const nonfinite = new Set(data.nonfinite);
const BATCH = 200; // rows drawn at a time
const state = { sort: "share", descending: true, scope: "", filter: "all", query: "", shown: BATCH, picked: null };

const FILTERS = {
  all: () => true,
  "advantage above 0": (row) => columns.advantage[row] > 0,
  "advantage below 0": (row) => columns.advantage[row] < 0,
  "clipped or rejected": (row) => columns.state[row] !== "",
  "changed by the other method": (row) => columns.change?.[row] > "",
  "not finite": (row) => nonfinite.has(row),
};

const isShare = (name) => name.endsWith("share");
const isText = (name) => data.texts.includes(name);

function shown(name, value) {
  if (value === null) return "absent";
  if (typeof value === "string" || Number.isInteger(value)) return String(value);
  if (isShare(name)) return (100 * value).toFixed(2) + " %";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(3) : value.toPrecision(5);
}

// Line breaks and blanks of a token stay visible in a table cell.
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

const side = (row) => (columns.advantage[row] > 0 ? "up" : columns.advantage[row] < 0 ? "down" : "");

function compare(a, b) {
  const bad = nonfinite.has(b) - nonfinite.has(a); // what is not finite comes first
  if (bad) return bad;
  const [x, y] = [columns[state.sort][a], columns[state.sort][b]];
  const sign = state.descending ? -1 : 1;
  if (x === y) return a - b;
  return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x) < String(y) ? -1 : 1);
}

function chosenRows() {
  const query = state.query.toLowerCase();
  const rows = [];
  for (let row = 0; row < total; row++) {
    const here = state.scope === "" || columns.trajectory[row] === Number(state.scope);
    if (here && FILTERS[state.filter](row) && (!query || columns.token[row].toLowerCase().includes(query))) rows.push(row);
  }
  return rows.sort(compare);
}

const largestShare = () => columns.share.reduce((most, share) => (share > most ? share : most), 0);

function cell(name, row) {
  const value = columns[name][row];
  if (name === "token") return el("td", { class: "token" }, el("span", {}, visible(value)));
  const bad = ["NaN", "Infinity", "-Infinity"].includes(value) && !isText(name);
  const td = el("td", { class: [isText(name) ? "" : "number", name, bad ? "bad" : ""].join(" ") }, shown(name, value));
  if (isShare(name) && value > 0) td.style.setProperty("--part", `${(100 * value) / largest}%`);
  return td;
}

const largest = largestShare();

function drawHead() {
  const cells = data.names.map((name) =>
    el(
      "th",
      { class: isText(name) ? "" : "number", title: data.help[name], "aria-sort": name === state.sort && (state.descending ? "descending" : "ascending") },
      el("button", { type: "button", onclick: () => sortBy(name) }, name.replaceAll("_", " ")),
    ),
  );
  byId("tokens").tHead.replaceChildren(el("tr", {}, ...cells));
}

function sortBy(name) {
  state.descending = state.sort === name ? !state.descending : !isText(name) && name !== "position" && name !== "trajectory";
  state.sort = name;
  drawTable();
}

function drawTable(keep = false) {
  if (!keep) state.shown = BATCH;
  drawHead();
  const rows = chosenRows();
  const drawn = rows.slice(0, state.shown).map((row) =>
    el("tr", { class: `${side(row)} ${row === state.picked ? "picked" : ""}`, onclick: () => pick(row) }, ...data.names.map((name) => cell(name, row))),
  );
  byId("tokens").tBodies[0].replaceChildren(...drawn);
  byId("count").textContent = `${rows.length.toLocaleString("en")} of ${total.toLocaleString("en")} tokens`;
  byId("more").hidden = rows.length <= state.shown;
}

// A click on a token shows its response and marks it in both places.
function pick(row) {
  state.picked = row;
  byId("response").value = columns.trajectory[row];
  drawText();
  drawTable(true);
  const scroll = { block: "nearest" };
  document.querySelector("#text .picked")?.scrollIntoView(scroll);
  document.querySelector("#tokens .picked")?.scrollIntoView(scroll);
}

function drawText() {
  const trajectory = Number(byId("response").value);
  const rows = [];
  for (let row = 0; row < total; row++) if (columns.trajectory[row] === trajectory) rows.push(row);
  rows.sort((a, b) => columns.position[a] - columns.position[b]);
  const spans = rows.map((row) => {
    const span = el("span", { title: `${columns.position[row]}: share ${shown("share", columns.share[row])}, ratio ${shown("ratio", columns.ratio[row])}, weight ${shown("weight", columns.weight[row])}`, onclick: () => pick(row) }, columns.token[row]);
    const strength = largest > 0 && columns.share[row] > 0 ? 8 + 62 * Math.sqrt(columns.share[row] / largest) : 0;
    if (strength && side(row)) span.style.background = `color-mix(in srgb, var(--${side(row)}) ${strength.toFixed(0)}%, transparent)`;
    if (columns.state[row]) span.classList.add("silent");
    if (nonfinite.has(row)) span.classList.add("nonfinite");
    if (row === state.picked) span.classList.add("picked");
    return span;
  });
  byId("text").replaceChildren(el("div", { class: "prompt" }, data.prompts[trajectory]), ...spans);
  const sum = rows.reduce((all, row) => all + (typeof columns.share[row] === "number" ? columns.share[row] : 0), 0);
  const silent = rows.filter((row) => columns.state[row]).length;
  const first = rows[0];
  byId("summary").textContent = `reward ${shown("reward", columns.reward[first])} · advantage of its first token ${shown("advantage", columns.advantage[first])} · ${rows.length} tokens, ${silent} clipped or rejected · share ${shown("share", sum)}`;
}

function startSelects() {
  const shares = new Map();
  columns.trajectory.forEach((t, row) => shares.set(t, (shares.get(t) ?? 0) + (Number(columns.share[row]) || (nonfinite.has(row) ? 2 : 0))));
  const byShare = [...shares.keys()].sort((a, b) => shares.get(b) - shares.get(a));
  byId("response").append(...byShare.map((t) => el("option", { value: t }, String(t))));
  const inOrder = [...shares.keys()].sort((a, b) => a - b);
  byId("scope").append(el("option", { value: "" }, "all responses"), ...inOrder.map((t) => el("option", { value: t }, `response ${t}`)));
  const names = Object.keys(FILTERS).filter((name) => columns.change || !name.startsWith("changed"));
  byId("filter").append(...names.map((name) => el("option", { value: name }, name)));
}

function start() {
  byId("title").textContent = data.title;
  byId("facts").textContent = data.facts;
  byId("findings").append(...data.findings.map((finding) => el("li", { class: finding.tone }, finding.text)));
  byId("metrics").tBodies[0].append(
    ...data.metrics.map((m) =>
      el("tr", {}, el("td", {}, m.name), el("td", { class: "number" }, String(m.live ?? "absent")), el("td", { class: "number" }, String(m.rerun ?? "absent")), el("td", { class: m.equal ? "good-text" : "bad-text" }, m.equal ? "bit-equal" : "differs")),
    ),
  );
  startSelects();
  const choose = (id, key) => byId(id).addEventListener("input", (event) => ((state[key] = event.target.value), drawTable()));
  choose("scope", "scope");
  choose("filter", "filter");
  choose("query", "query");
  byId("response").addEventListener("input", () => ((state.picked = null), drawText(), drawTable()));
  byId("more").addEventListener("click", () => ((state.shown += BATCH), drawTable(true)));
  drawText();
  drawTable();
}

start();
