// Hover and arrow keys on the curves: draw a line at the nearest step, and show each run's value.
// The geometry is the same as in curves.py. Names of runs are only ever inserted as text.
"use strict";
const { names, colors, samplesPerStep, curves, box } = JSON.parse(
  document.getElementById("data").textContent,
);
const SVG = "http://www.w3.org/2000/svg";

function place(svg, x, y) {
  const { right, low, high, log } = svg.dataset;
  const scaled = log === "1" ? Math.log10 : Number;
  const share = (scaled(y) - scaled(low)) / (scaled(high) - scaled(low));
  return [
    box.left + (x / right) * (box.right - box.left),
    box.bottom - share * (box.bottom - box.top),
  ];
}

// All points of a chart: run, step, value, place along the axis, and coordinates.
function pointsOf(svg) {
  const bySamples = svg.dataset.axis === "samples seen";
  const points = [];
  curves[svg.dataset.curve].forEach((values, run) => {
    for (const [step, value] of values) {
      const along = bySamples ? step * samplesPerStep[run] : step;
      const [x, y] = place(svg, along, value);
      points.push({ run, step, value, along, x, y });
    }
  });
  return points.sort((a, b) => a.along - b.along);
}

function element(name, attributes, parent) {
  const child = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  parent.append(child);
}

function line(name, value, parent, color) {
  const row = document.createElement("div"), text = document.createElement("span");
  if (color) row.style.borderLeft = `4px solid ${color}`;
  text.textContent = value; // a long name may wrap, the value does not
  row.append(name, text);
  parent.append(row);
}

// The point of each run nearest to x, unless the run's curve begins later or has ended.
function nearest(points, x) {
  const closest = [], first = [], last = [];
  for (const point of points) {
    const known = closest[point.run];
    if (!known || Math.abs(point.x - x) <= Math.abs(known.x - x)) closest[point.run] = point;
    first[point.run] ??= point.x;
    last[point.run] = point.x;
  }
  return closest.filter(({ run }) => first[run] - 8 <= x && x <= last[run] + 8);
}

function shown(value) {
  return Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 });
}

// Show the values at x. `along` is the number of steps or samples there.
function show(svg, points, { x, along }) {
  const guide = svg.querySelector(".guide"), tip = svg.parentElement.querySelector(".tip");
  guide.replaceChildren();
  tip.replaceChildren();
  const left = (x / box.width) * 100;
  element("path", { d: `M${x} ${box.top}V${box.bottom}` }, guide);
  line(`${svg.dataset.axis} `, shown(along), tip);
  for (const point of nearest(points, x)) {
    const color = colors[point.run];
    element("circle", { cx: point.x, cy: point.y, r: 5, stroke: color }, guide);
    const which = names.length > 1 ? `${names[point.run]}: ` : "";
    const where = point.step === along ? "" : ` (step ${shown(point.step)})`;
    line(which, shown(point.value) + where, tip, color);
  }
  tip.hidden = false;
  tip.style.left = left < 50 ? `${left + 2}%` : "auto";
  tip.style.right = left < 50 ? "auto" : `${102 - left}%`;
  tip.style.maxWidth = `${Math.max(left, 100 - left) - 2}%`; // not wider than a phone
}

for (const svg of document.querySelectorAll("svg.chart")) {
  const points = pointsOf(svg), tip = svg.parentElement.querySelector(".tip");
  const places = points.filter((point, index) => index < 1 || point.along > points[index - 1].along);
  let at = -1;

  const go = (index) => {
    at = Math.max(0, Math.min(places.length - 1, index));
    show(svg, points, places[at]);
  };
  const leave = () => {
    svg.querySelector(".guide").replaceChildren();
    tip.hidden = true;
  };
  const move = (event) => {
    const frame = svg.getBoundingClientRect();
    const x = ((event.clientX - frame.left) / frame.width) * box.width;
    let best = 0;
    places.forEach((place, index) => {
      if (Math.abs(place.x - x) < Math.abs(places[best].x - x)) best = index;
    });
    go(best);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("focus", () => at < 0 && go(places.length - 1));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      event.preventDefault();
      go(at + by);
    }
    if (event.key === "Escape") leave();
  });
}
