// Line charts drawn as SVG.

const PALETTE = 7;
const SMOOTH_ABOVE = 60; // series with more points also get a running mean

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function format(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e9) return (value / 1e9).toFixed(2) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (Number.isInteger(value)) return String(value);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.001) return value.toFixed(3);
  return value.toExponential(1);
}

// Tick labels of one axis share their number of decimals.
function tickLabels(values) {
  const step = values.length > 1 ? values[1] - values[0] : 1;
  const largest = Math.max(...values.map(Math.abs));
  if (largest >= 1e4 || (largest > 0 && largest < 1e-3)) return values.map(format);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return values.map((value) => value.toFixed(decimals));
}

const color = (index) => `var(--c${index % PALETTE})`;
const isNumber = (value) => typeof value === "number";

// Multiples of 1, 2 or 5 times a power of ten that cover [low, high].
function ticks(low, high, most) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function verticalRange(values, unit, wholeShare) {
  if (wholeShare) return [0, 1];
  if (!values.length) return [0, 1];
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (low >= 0 && (low < 0.6 * high || unit === "share")) low = 0;
  if (high === low) [low, high] = low === 0 ? [0, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * high)];
  const room = (high - low) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

function runningMean(points, width) {
  return points.map((point, i) => {
    const near = points.slice(Math.max(0, i - width), i + width + 1);
    return [point[0], near.reduce((sum, [, y]) => sum + y, 0) / near.length];
  });
}

// One figure. names: metrics drawn together. xs: horizontal positions, one per logged step.
function chart(title, names, xs, axis) {
  const width = 310, height = 168, left = 42, right = 10, top = 8, bottom = 24;
  const unit = data.definitions[names[0]].unit;
  const series = names.map((name, index) => {
    const values = data.metrics[name];
    const points = [], odd = [];
    values.forEach((value, i) => {
      if (isNumber(value)) points.push([xs[i], value]);
      else if (value !== null) odd.push(xs[i]);
    });
    return { name, index, values, points, odd };
  });
  const wholeShare = title === "Held-out accuracy" || title === "Pass rate" || title === "Accuracy by source";
  const [low, high] = verticalRange(series.flatMap((s) => s.points.map(([, y]) => y)), unit, wholeShare);
  const known = xs.filter(isNumber);
  const first = Math.min(...known), last = Math.max(...known, first + (axis === "step" ? 1 : 0.1));
  const px = (x) => left + ((x - first) / (last - first)) * (width - left - right);
  const py = (y) => height - bottom - ((y - low) / (high - low)) * (height - top - bottom);

  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  horizontalGrid(picture, low, high, py, left, width - right);
  const across = ticks(first, last, 5).filter((x) => axis !== "step" || Number.isInteger(x));
  tickLabels(across).forEach((text, i) => picture.append(svg("text", { x: px(across[i]), y: height - 7, "text-anchor": "middle" }, text)));
  for (const s of series) drawSeries(picture, s, px, py, top);

  const caption = el("figcaption", {}, el("span", { class: "title" }, title + " ", el("span", { class: "unit" }, unit && `(${unit})`)));
  for (const s of series) {
    const mark = el("i", { style: `background: ${color(s.index)}` });
    caption.append(el("span", { class: "series", title: data.definitions[s.name].description, "data-metric": s.name }, mark, s.name));
  }
  const figure = el("figure", { "data-chart": title }, caption, picture);
  follow(figure, picture, series, xs, axis, { px, width, height, top, bottom });
  return figure;
}

function horizontalGrid(picture, low, high, py, left, right) {
  const levels = ticks(low, high, 5);
  tickLabels(levels).forEach((text, i) => {
    const y = py(levels[i]);
    picture.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }), svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text));
  });
}

function drawSeries(picture, s, px, py, top) {
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)},${py(y).toFixed(1)}`).join("");
  const line = (points, width, opacity) =>
    svg("path", { d: path(points), fill: "none", style: `stroke: ${color(s.index)}`, "stroke-width": width, opacity, "stroke-linejoin": "round" });
  const smooth = s.points.length > SMOOTH_ABOVE && !s.name.startsWith("eval/");
  if (s.points.length > 1) picture.append(line(s.points, smooth ? 1 : 1.8, smooth ? 0.35 : 1));
  if (smooth) picture.append(line(runningMean(s.points, Math.ceil(s.points.length / 60)), 2, 1));
  if (s.points.length === 1 || (s.name.startsWith("eval/") && s.points.length <= SMOOTH_ABOVE)) {
    for (const [x, y] of s.points) picture.append(svg("circle", { cx: px(x), cy: py(y), r: 2.8, style: `fill: ${color(s.index)}` }));
  }
  for (const x of s.odd) {
    const cross = `M${px(x) - 3.5},${top - 3.5}l7,7m0,-7l-7,7`;
    picture.append(svg("path", { class: "not-finite", d: cross, fill: "none" }, svg("title", {}, `${s.name} is not finite`)));
  }
}

// The values under the pointer, in a small box.
function follow(figure, picture, series, xs, axis, { px, width, height, top, bottom }) {
  const tip = el("div", { class: "tip", hidden: true });
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(cursor);
  figure.append(tip);
  const present = xs.map((x, i) => i).filter((i) => isNumber(xs[i]) && series.some((s) => s.values[i] !== null));
  const hide = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("pointermove", (event) => {
    if (!present.length) return;
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const best = present.reduce((a, b) => (Math.abs(px(xs[b]) - at) < Math.abs(px(xs[a]) - at) ? b : a));
    const where = axis === "step" ? `step ${data.steps[best]}` : `${format(xs[best])} min, step ${data.steps[best]}`;
    tip.replaceChildren(el("div", {}, where), ...series.filter((s) => s.values[best] !== null).map((s) => {
      const mark = el("span", { class: "swatch", style: `background: ${color(s.index)}` });
      return el("div", {}, mark, `${s.name}  ${format(s.values[best])}`);
    }));
    const x = px(xs[best]);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    tip.hidden = false;
    const onLeft = x > width / 2;
    const pixels = (x / width) * box.width + 14;
    tip.style.left = onLeft ? "auto" : `${pixels + 14}px`;
    tip.style.right = onLeft ? `${box.width - pixels + 28 + 14}px` : "auto";
    tip.style.top = "58px";
  });
}
