// The page itself: headline, curves, time, numbers, configuration.

const present = (name) => (data.metrics[name] ?? []).filter(isNumber);
const phaseColor = (phase) => (phase === "start-up" ? "var(--line)" : phase === "other" ? "var(--quiet)" : color(data.phases.indexOf(phase)));

function duration(seconds) {
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${s} s` : `${seconds < 10 ? seconds.toFixed(1) : s} s`;
}

function heading() {
  byId("name").textContent = data.name;
  const last = data.steps.at(-1);
  const running = data.total_steps !== null && (last === undefined || last < data.total_steps);
  const progress = data.total_steps === null ? "" : running ? `step ${last ?? 0} of ${data.total_steps}` : `all ${data.total_steps} steps done`;
  byId("subtitle").textContent = [data.method, data.model, progress, `written ${data.written}`].filter(Boolean).join("  ·  ");
  byId("omitted").textContent = data.omitted.join(" ");
  byId("footer").textContent = "Made by python -m eval.report from metrics.jsonl, samples/, config.yaml and environment.json. Hover over a name for its definition.";
  if (running) reloading();
}

function reloading() {
  byId("reload-label").hidden = false;
  const box = byId("reload");
  box.checked = location.hash === "#reload";
  setInterval(() => box.checked && location.reload(), 30000);
  box.addEventListener("change", () => history.replaceState(null, "", box.checked ? "#reload" : "#"));
}

function warningList() {
  if (!data.warnings.length) return;
  byId("warnings").hidden = false;
  byId("warnings").append(el("strong", {}, "Look at this first"), el("ul", {}, ...data.warnings.map((text) => el("li", {}, text))));
}

function tile(label, value, detail, description) {
  return el("div", { class: "tile", title: description }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "detail" }, detail));
}

function change(label, name) {
  const values = present(name);
  if (!values.length) return null;
  const [first, last] = [values[0], values.at(-1)];
  const description = data.definitions[name].description;
  if (values.length === 1) return tile(label, first.toFixed(3), "measured once", description);
  const best = Math.max(...values);
  return tile(label, `${first.toFixed(3)} → ${last.toFixed(3)}`, `${last >= first ? "+" : "−"}${Math.abs(last - first).toFixed(3)}, best ${best.toFixed(3)}`, description);
}

function headline() {
  const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
  const greedy = "eval/greedy_accuracy" in data.metrics;
  const clock = present("time/since_start_seconds").at(-1);
  const stepSeconds = (data.metrics["time/step_seconds"] ?? []).filter((value, i) => isNumber(value) && data.steps[i] > 0);
  const total = data.phases.reduce((sum, phase) => sum + data.seconds[phase], 0);
  byId("headline").append(...[
    greedy ? change("Held-out greedy accuracy", "eval/greedy_accuracy") : change("Held-out accuracy", "eval/accuracy"),
    change("Reward", "reward/mean"),
    clock === undefined ? null : tile("Wall-clock", duration(clock), "start-up" in data.seconds ? `start-up ${duration(data.seconds["start-up"])}` : "", data.definitions["time/since_start_seconds"].description),
    stepSeconds.length ? tile("Step", duration(mean(stepSeconds)), `mean of ${stepSeconds.length}`, data.definitions["time/step_seconds"].description) : null,
    total > 0 ? tile("In no named phase", `${((100 * data.seconds.other) / total).toFixed(1)} %`, "of the time after start-up", "Wall-clock that no phase claims, work between steps included.") : null,
  ].filter(Boolean));
  if (!data.steps.length) byId("headline").append(el("p", { class: "empty" }, "No step is done yet."));
}

function curves(axis) {
  const root = byId("charts");
  root.replaceChildren();
  const xs = axis === "step" ? data.steps : (data.metrics["time/since_start_seconds"] ?? []).map((v) => (isNumber(v) ? v / 60 : null));
  if (!xs.some(isNumber)) {
    root.append(el("p", { class: "empty" }, "No step is done yet."));
    return;
  }
  const groups = new Map();
  for (const [name, { chart: title }] of Object.entries(data.definitions)) {
    if (!name.startsWith("time/") || name === "time/other_share") groups.set(title, [...(groups.get(title) ?? []), name]);
  }
  const grid = (titles) => el("div", { class: "charts" }, ...titles.map((title) => chart(title, groups.get(title), xs, axis)));
  const named = new Set(data.sections.flatMap((section) => section.charts));
  for (const section of data.sections) {
    const titles = section.charts.filter((title) => groups.has(title));
    if (titles.length) root.append(el("h3", {}, section.title), grid(titles));
  }
  const rest = [...groups.keys()].filter((title) => !named.has(title));
  if (rest.length) root.append(el("details", {}, el("summary", {}, `${rest.length} more charts`), grid(rest)));
}

function times() {
  const root = byId("phases");
  const phases = Object.entries(data.seconds).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) {
    root.append(el("p", { class: "empty" }, "No time was logged yet."));
    return;
  }
  const swatch = (phase) => el("span", { class: "swatch", style: `background: ${phaseColor(phase)}` });
  const share = (seconds) => `${((100 * seconds) / total).toFixed(1)} %`;
  const bar = el("div", { class: "shares" }, ...phases.map(([phase, seconds]) =>
    el("div", { style: `width: ${(100 * seconds) / total}%; background: ${phaseColor(phase)}`, title: `${phase}: ${duration(seconds)}, ${share(seconds)}` }),
  ));
  const slowest = (phase) => {
    const values = data.metrics[`time/${phase}_seconds`] ?? [];
    const best = values.reduce((a, v, i) => (isNumber(v) && (a === null || v > values[a]) ? i : a), null);
    return best === null ? "–" : `${format(values[best])} s at step ${data.steps[best]}`;
  };
  const rows = phases.map(([phase, seconds]) => el("tr", { title: data.definitions[`time/${phase}_seconds`]?.description ?? "Until the first step began." },
    el("td", {}, swatch(phase), phase), el("td", { class: "number" }, duration(seconds)), el("td", { class: "number" }, share(seconds)), el("td", { class: "number" }, slowest(phase))));
  const head = el("tr", {}, el("th", {}, "phase"), el("th", { class: "number" }, "seconds"), el("th", { class: "number" }, "share"), el("th", { class: "number" }, "slowest"));
  root.append(bar, el("div", { class: "columns" }, el("table", { id: "phase-table" }, el("thead", {}, head), el("tbody", {}, ...rows)), stepBars()));
}

// Seconds of each step, stacked by phase; many steps are drawn as the mean of neighbours.
function stepBars() {
  const width = 560, height = 200, left = 40, bottom = 22, top = 6, most = 140;
  const count = data.steps.length, per = Math.ceil(count / most);
  const bars = [];
  for (let start = 0; start < count; start += per) {
    const range = [...Array(Math.min(per, count - start)).keys()].map((i) => start + i);
    bars.push({ step: data.steps[start], parts: data.phases.map((phase) => range.reduce((sum, i) => {
      const value = (data.metrics[`time/${phase}_seconds`] ?? [])[i];
      return sum + (isNumber(value) ? Math.max(0, value) : 0);
    }, 0) / range.length) });
  }
  const highest = Math.max(...bars.map((bar) => bar.parts.reduce((a, b) => a + b, 0))) || 1;
  const py = (y) => height - bottom - (y / highest) * (height - top - bottom);
  const slot = (width - left) / bars.length;
  const named = new Set(ticks(data.steps[0], data.steps.at(-1), 8));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "seconds per step" });
  horizontalGrid(picture, 0, highest, py, left, width);
  bars.forEach((bar, i) => {
    let base = 0;
    bar.parts.forEach((seconds, p) => {
      if (seconds <= 0) return;
      const text = `step ${bar.step}: ${data.phases[p]} ${format(seconds)} s`;
      const wide = Math.min(slot * 0.86, 26);
      picture.append(svg("rect", { x: left + i * slot + (slot - wide) / 2, width: wide, y: py(base + seconds), height: py(base) - py(base + seconds), style: `fill: ${phaseColor(data.phases[p])}` }, svg("title", {}, text)));
      base += seconds;
    });
    if (per > 1 ? i % 20 === 0 : named.has(bar.step)) picture.append(svg("text", { x: left + (i + 0.5) * slot, y: height - 6, "text-anchor": "middle" }, String(bar.step)));
  });
  const title = el("span", { class: "title" }, "Seconds per step ", el("span", { class: "unit" }, per > 1 ? `(mean of ${per} steps a bar)` : "(s)"));
  return el("figure", { "data-chart": "Seconds per step" }, el("figcaption", { style: "min-height: 0" }, title), picture);
}

function numbers() {
  const head = el("tr", {}, el("th", {}, "metric"), el("th", {}, "unit"), ...["first", "last", "least", "most"].map((name) => el("th", { class: "number" }, name)), el("th", {}, "definition"));
  const rows = Object.entries(data.definitions).map(([name, { unit, description }]) => {
    const values = present(name);
    const least = values.reduce((a, b) => Math.min(a, b), Infinity), most = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const cells = [values[0], values.at(-1), ...(values.length ? [least, most] : [null, null])];
    return el("tr", {}, el("td", {}, el("code", {}, name)), el("td", {}, unit), ...cells.map((value) => el("td", { class: "number" }, format(value))), el("td", {}, description));
  });
  byId("table").append(el("details", { open: data.steps.length <= 2 }, el("summary", {}, "every metric with its definition"), el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
}

heading();
warningList();
headline();
curves("step");
for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
    curves(button.dataset.axis);
  });
}
if (!present("time/since_start_seconds").length) document.querySelector('[data-axis="minutes"]').disabled = true;
times();
startBrowser();
numbers();
byId("config").textContent = data.config;
byId("environment").textContent = JSON.stringify(data.environment, null, 2);
