// Draw the lanes of a timeline, zoom, pan and describe a bar. All times are in ms.
"use strict";

const byId = (id) => document.getElementById(id);
const { lanes, bars, steps, whole, colors } = JSON.parse(byId("data").textContent);
const svg = byId("lanes");
const ZOOM = 2, PAN = 0.25; // of the buttons: factor, share of the visible time
const LONGEST = whole[1] - whole[0], SHORTEST = Math.min(0.02, LONGEST); // visible time
const ROW = 30, HEADER = 44, GAP = 16, GUTTER = 200, NARROW = 640; // pixels

const view = { start: whole[0], end: whole[1] };
let place = { left: 0, right: 1 }; // the lanes, in pixels
let chosen = null; // the bar that is described
let planned = 0; // the animation frame in which to draw, or 0

bars.forEach((bar, index) => Object.assign(bar, { index, middle: (bar.start_ms + bar.end_ms) / 2 }));
const [back, front, labels] = ["g", "g", "g"].map((name) => add(svg, name));

function add(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text) element.textContent = text; // never HTML, because it comes from a trace
  return parent.appendChild(element);
}

// The visible time
const span = () => view.end - view.start;
const msPerPixel = () => span() / (place.right - place.left);
const toPixel = (ms) => place.left + (ms - view.start) / msPerPixel();
const toMs = (pixel) => view.start + (pixel - place.left) * msPerPixel();

function show(start, end) {
  const length = Math.min(Math.max(end - start, SHORTEST), LONGEST);
  view.start = Math.min(Math.max(start, whole[0]), whole[1] - length);
  view.end = view.start + length;
  const [from, to, visible] = [view.start, view.end, length].map((ms) => ms.toFixed(3));
  byId("range").textContent = `${from} – ${to} ms (${visible} ms)`;
  const isAt = (edge, ms) => Math.abs(edge - ms) < 1e-6;
  const step = steps.find(({ span }) => isAt(span[0], view.start) && isAt(span[1], view.end));
  byId("step").value = isAt(length, LONGEST) ? "whole" : step ? step.step : "part";
  planned ||= requestAnimationFrame(draw);
}

function zoom(factor, middle = (view.start + view.end) / 2) {
  const length = Math.min(Math.max(span() / factor, SHORTEST), LONGEST);
  const start = middle - ((middle - view.start) / span()) * length; // keep the middle in place
  show(start, start + length);
}
const pan = (ms) => show(view.start + ms, view.end + ms);

// Drawing. Only what is visible is drawn, and only the first of several bars in one pixel.
function draw() {
  planned = 0;
  const width = Math.max(svg.clientWidth, 100), isNarrow = width < NARROW; // 0 while hidden
  place = { left: isNarrow ? 6 : GUTTER, right: width - 2 };
  back.replaceChildren();
  labels.replaceChildren();
  let top = HEADER;
  for (const lane of lanes) {
    top += (lane.is_first ? GAP : 2) + (isNarrow ? 16 : 0);
    lane.top = top;
    top += lane.rows * ROW;
  }
  svg.setAttribute("height", top + 6);
  for (const lane of lanes) drawLane(lane, isNarrow);
  drawAxis(top, isNarrow);
  drawBars();
}

function drawLane(lane, isNarrow) {
  const y = lane.top, height = lane.rows * ROW, width = place.right - place.left;
  const kind = lane.is_slow ? "slow-lane" : "lane";
  add(back, "rect", { x: place.left, y, width, height, class: kind });
  const at = isNarrow ? { x: 2, y: y - 4 } : { x: GUTTER - 8, y: y + 19, "text-anchor": "end" };
  add(labels, "text", { ...at, class: lane.is_slow ? "slow" : "" }, lane.label);
  const edges = lane.edges.filter((ms) => ms >= view.start && ms <= view.end);
  const lines = new Set(edges.map((ms) => `M${toPixel(ms).toFixed(0)} ${y - 2}v${height + 4}`));
  add(back, "path", { d: [...lines].join(""), class: "edge" });
}

function drawAxis(bottom, isNarrow) {
  const rough = 64 * msPerPixel(); // a tick every 64 to 128 pixels
  const ten = 10 ** Math.floor(Math.log10(rough));
  const size = ten * [1, 2, 2.5, 5, 10].find((factor) => factor * ten >= rough);
  const digits = (String(+size.toPrecision(2)).split(".")[1] ?? "").length;
  for (let tick = Math.ceil(view.start / size - 1e-9); tick * size <= view.end; tick++) {
    const x = toPixel(tick * size), text = (tick * size).toFixed(digits), half = 4 * text.length;
    add(back, "line", { x1: x, x2: x, y1: HEADER - 4, y2: bottom, class: "rule" });
    const at = { x, y: HEADER - 8, class: "tick", "text-anchor": "middle" };
    if (x - half >= 0 && x + half <= place.right) add(labels, "text", at, text);
  }
  const [x, y] = isNarrow ? [place.right, HEADER + GAP + 12] : [GUTTER - 40, HEADER - 8];
  add(labels, "text", { x, y, class: "unit", "text-anchor": "end" }, "ms");
  let free = place.left; // where there is room for the next label of a step
  for (const step of steps) {
    const start = Math.max(toPixel(step.span[0]), free);
    const end = Math.min(toPixel(step.span[1]), place.right);
    if (end - start < 50) continue;
    const at = { x: (start + end) / 2, y: 16, "text-anchor": "middle", "font-weight": 600 };
    add(labels, "text", at, `step ${step.step}`);
    free = at.x + 30;
  }
}

function drawBars() {
  const filled = new Map(); // the pixel up to which each row of a lane is drawn
  let next = null; // the bar that Tab and Enter focus
  for (const bar of bars) {
    const x = Math.max(toPixel(bar.start_ms), place.left);
    const end = Math.min(Math.max(toPixel(bar.end_ms), x + 1), place.right);
    const row = `${bar.lane} ${bar.row}`;
    const isCovered = bar !== chosen && end < (filled.get(row) ?? -1) + 1;
    if (isCovered || bar.end_ms < view.start || bar.start_ms > view.end) {
      if (bar.element && bar.element === document.activeElement) svg.focus();
      bar.element?.remove();
      continue;
    }
    filled.set(row, end);
    if (!next || bar === chosen) next = bar;
    drawBar(bar, x, end - x, lanes[bar.lane].top + bar.row * ROW + 2);
  }
  front.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
  next?.element.setAttribute("tabindex", 0);
}

function drawBar(bar, x, width, y) {
  if (!bar.element) {
    const label = Object.entries(describe(bar)).flat().join(" ");
    const fixed = { role: "img", "aria-label": label, "data-bar": bar.index, tabindex: -1 };
    bar.element = add(front, "rect", { ...fixed, height: ROW - 4, fill: colors[bar.phase] });
  }
  const gap = width > 4 ? 0.5 : 0; // separates neighbors of the same color
  const at = { x: x + gap, y, width: width - 2 * gap };
  for (const key in at) bar.element.setAttribute(key, at[key].toFixed(2));
  bar.element.classList.toggle("chosen", bar === chosen);
  if (!bar.element.isConnected) front.append(bar.element);
  const long = `${bar.name} ${(bar.end_ms - bar.start_ms).toFixed(2)} ms`;
  const text = [long, bar.name].find((label) => label.length * 8 + 8 < width);
  const fill = ["forward", "collective"].includes(bar.phase) ? "#fff" : "#000"; // on a dark color
  const middle = { x: x + width / 2, y: y + 18, "text-anchor": "middle", fill };
  if (text) add(labels, "text", middle, text);
}

// The description of a bar
function describe(bar) {
  const parts = { rank: bar.rank, phase: bar.phase };
  if (bar.name !== bar.phase) parts.name = bar.name;
  parts.start = `${bar.start_ms.toFixed(3)} ms`;
  parts.duration = `${(bar.end_ms - bar.start_ms).toFixed(3)} ms`;
  if (bar.bytes_sent !== null) parts.bytes = bar.bytes_sent.toLocaleString("en-GB");
  parts.share = `${(100 * bar.share).toFixed(1)} % of step ${bar.step}`;
  return parts;
}

function choose(bar) {
  chosen?.element?.classList.remove("chosen");
  bar.element?.classList.add("chosen");
  chosen = bar;
  byId("detail").replaceChildren(...Object.entries(describe(bar)).map(([name, value]) => {
    const part = document.createElement("span"), bold = document.createElement("b");
    part.append(`${name} `, bold);
    return Object.assign(bold, { id: `bar-${name}`, textContent: value }).parentElement;
  }));
}

function visit(bar) {
  if (!bar) return;
  const isCut = bar.start_ms < view.start || bar.end_ms > view.end;
  if (isCut) pan(bar.middle - (view.start + view.end) / 2);
  choose(bar);
  draw();
  bar.element.focus();
}

const inLane = (lane) => bars.filter((bar) => bar.lane === lane);
const beside = (bar, by) => inLane(bar.lane).find((other) => other.index === bar.index + by);
function across(bar, by) { // the bar nearest in time, in the next lane that has bars
  let lane = bar.lane + by;
  while (lanes[lane] && inLane(lane).length === 0) lane += by;
  const distance = (other) => Math.abs(other.middle - bar.middle);
  return inLane(lane).sort((a, b) => distance(a) - distance(b))[0];
}

// Buttons, keys, wheel and pointers
const actions = { // of the buttons, by id
  in: (middle) => zoom(ZOOM, middle),
  out: (middle) => zoom(1 / ZOOM, middle),
  whole: () => show(...whole),
  earlier: () => pan(-PAN * span()),
  later: () => pan(PAN * span()),
};
const KEYS = { "+": "in", "=": "in", "-": "out", 0: "whole" };
Object.assign(KEYS, { ArrowLeft: "earlier", ArrowRight: "later" });
for (const id in actions) byId(id).addEventListener("click", () => actions[id]());
byId("step").addEventListener("change", (event) => {
  const step = steps.find(({ step }) => String(step) === event.target.value);
  show(...(step ? step.span : whole));
});
new ResizeObserver(() => show(view.start, view.end)).observe(svg); // also draws now
const barOf = (event) => bars[event.target.dataset.bar];
for (const name of ["pointerover", "focusin"]) svg.addEventListener(name, (event) => {
  if (barOf(event) && !svg.classList.contains("dragged")) choose(barOf(event));
});

svg.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const bar = barOf(event);
  const moves = bar ? {
    ArrowLeft: () => visit(beside(bar, -1)), ArrowRight: () => visit(beside(bar, 1)),
    ArrowUp: () => visit(across(bar, -1)), ArrowDown: () => visit(across(bar, 1)),
    Escape: () => svg.focus(),
  } : { Enter: () => svg.querySelector('[tabindex="0"]')?.focus() };
  const act = moves[event.key] ?? actions[KEYS[event.key]];
  if (!act) return;
  event.preventDefault();
  act(bar?.middle);
});

const placeOf = (event) =>
  ({ x: event.clientX - svg.getBoundingClientRect().left, y: event.clientY });
svg.addEventListener("wheel", (event) => {
  const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (!isSideways && event.deltaY > 0 && span() > LONGEST - 1e-6) return; // let the page scroll
  event.preventDefault();
  const speed = event.ctrlKey ? 0.01 : 0.002; // a pinch on a touchpad sets ctrlKey
  if (isSideways) pan((event.deltaX || event.deltaY) * msPerPixel());
  else zoom(Math.exp(-event.deltaY * speed), toMs(placeOf(event).x));
}, { passive: false });

const fingers = new Map(); // last position of each pointer that is down
svg.addEventListener("pointerdown", (event) => {
  if (event.button === 0) fingers.set(event.pointerId, placeOf(event));
});
svg.addEventListener("pointermove", (event) => {
  if (event.buttons === 0) fingers.delete(event.pointerId); // released outside the window
  const before = fingers.get(event.pointerId), now = placeOf(event);
  const isDragged = svg.classList.contains("dragged");
  if (!before || (!isDragged && Math.hypot(now.x - before.x, now.y - before.y) < 4)) return;
  svg.classList.add("dragged");
  svg.setPointerCapture(event.pointerId); // the bar below it may disappear
  const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
  const distance = ({ x, y }) => Math.max(Math.hypot(x - other.x, y - other.y), 8);
  if (other) zoom(distance(now) / distance(before), toMs(other.x)); // the other finger stays put
  else pan((before.x - now.x) * msPerPixel());
  fingers.set(event.pointerId, now);
});
for (const name of ["pointerup", "pointercancel"]) svg.addEventListener(name, (event) => {
  fingers.delete(event.pointerId);
  if (fingers.size === 0) svg.classList.remove("dragged");
});
