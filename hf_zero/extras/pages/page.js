"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#3b6fd4", "#e0803a", "#2f9e77", "#8a5cd0", "#d1495b", "#2a9db5", "#b08900", "#7a869a", "#c44fa0",
  "#5a8f29", "#9b6a4c", "#4b5fa8"];
const FIXED = { "parameters": 0, "param": 0, "weights": 0, "gathered": 5, "gathered parameters": 5, "gather": 5,
  "gradients": 1, "unreduced gradients": 4, "master": 2, "optimizer": 3, "exp_avg": 3, "exp_avg_sq": 8, "activations": 4, "forward": 0,
  "backward": 3, "step": 7, "reduce": 1, "update": 2, "layer": 0, "root": 3, "persistent": 2, "header": 7, "planned": 7,
  "measured": 0 };
const WIDTH = 1100;

function element(name, attributes, parent, text) {
  const made = document.createElement(name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function shape(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function part(parent, x, y, width, height, color, hint, more) {
  const made = shape("rect", { class: "part", x, y, width: Math.max(width, 0.6), height, rx: Math.min(2, width / 3),
    fill: color, ...more }, parent);
  shape("title", {}, made, hint);
  return made;
}

function digits(value) { return String(Number(value.toPrecision(3))); }

function bytes(value) {
  let count = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(count) < 999.5) return (unit === "B" ? Math.round(count) : digits(count)) + " " + unit;
    count /= 1000;
  }
  return digits(count) + " TB";
}

function show(value, unit) {
  if (value === null) return "-";
  if (unit === "bytes") return bytes(value);
  if (unit === "count") return value.toLocaleString("en-US");
  if (unit === "ms") return digits(value) + " ms";
  return String(value);
}

// The colours of names: a name that pages often have keeps its colour, if no other one of this picture has it already.
function palette(names) {
  const found = {}, used = new Set();
  const take = (name, at) => { used.add(at); found[name] = COLORS[at]; };
  for (const name of names) if (name in FIXED && !used.has(FIXED[name])) take(name, FIXED[name]);
  let next = 0;
  for (const name of names) {
    if (name in found) continue;
    while (used.has(next % COLORS.length) && used.size < COLORS.length) next++;
    take(name, next++ % COLORS.length);
  }
  return Object.fromEntries(names.map(name => [name, found[name]]));
}

function legend(parent, colors) {
  const list = element("ul", { class: "legend" }, parent);
  for (const name in colors) {
    const item = element("li", {}, list);
    element("i", { style: "background:" + colors[name] }, item);
    item.append(name);
  }
}

function canvas(parent, height) {
  return shape("svg", { viewBox: "0 0 " + WIDTH + " " + height, role: "img" }, parent);
}

// Round steps of an axis up to `most`: about six of them.
function ticks(most) {
  const raw = most / 6, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(one => one * power).find(one => one >= raw);
  const found = [];
  for (let at = 0; at <= most * 1.0001; at += step) found.push(at);
  return found;
}

function axis(svg, left, width, top, bottom, most, unit) {
  if (!(most > 0)) return;
  for (const at of ticks(most)) {
    const x = left + at / most * width;
    shape("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom }, svg);
    shape("text", { class: "soft", x, y: bottom + 14, "text-anchor": "middle" }, svg, show(at, unit));
  }
}

const DRAW = {
  table(parent, section) {
    const made = element("table", {}, element("div", { class: "scroll" }, parent));
    const head = element("tr", {}, element("thead", {}, made)), body = element("tbody", {}, made);
    const side = unit => unit === "text" ? "" : "figure";
    for (const [name, unit] of section.columns) element("th", { class: side(unit) }, head, name);
    for (const row of section.rows) {
      const line = element("tr", {}, body);
      row.forEach((value, at) => {
        const unit = section.columns[at][1];
        element("td", { class: side(unit), title: String(value) }, line, show(value, unit));
      });
    }
  },

  pairs(parent, section) {
    const colors = palette(["planned", "measured"]), left = 240, width = WIDTH - left - 80;
    const most = Math.max(...section.rows.flatMap(row => [row.planned || 0, row.measured]), 1);
    const height = section.rows.length * 36, svg = canvas(parent, height + 22);
    axis(svg, left, width, 0, height, most, "bytes");
    section.rows.forEach((row, at) => {
      const y = at * 36 + 3;
      shape("text", { x: left - 10, y: y + 19, "text-anchor": "end" }, svg, row.name);
      ["planned", "measured"].forEach((which, line) => {
        const value = row[which], wide = (value || 0) / most * width;
        part(svg, left, y + line * 14, wide, 12, colors[which], row.name + ", " + which + ": " + show(value, "bytes"),
          { "data-bytes": value, "data-kind": which, "data-row": row.name });
        shape("text", { class: "soft", x: left + wide + 6, y: y + line * 14 + 10 }, svg, show(value, "bytes"));
      });
    });
    legend(parent, colors);
  },

  area(parent, section) {
    const left = 70, width = WIDTH - left - 20, height = 200, times = section.at_ms, svg = canvas(parent, height + 22);
    const colors = palette(section.series.map(one => one.name));
    const sums = times.map((_, at) => section.series.reduce((sum, one) => sum + one.values[at], 0));
    const most = Math.max(...sums, 1) * 1.05, end = Math.max(section.ms, 1e-6);
    const across = ms => left + ms / end * width, up = value => height - value / most * height;
    axis(svg, left, width, 0, height, end, "ms");
    for (const at of ticks(most)) {
      shape("line", { class: "grid", x1: left, x2: left + width, y1: up(at), y2: up(at) }, svg);
      shape("text", { class: "soft", x: left - 8, y: up(at) + 4, "text-anchor": "end" }, svg, bytes(at));
    }
    let below = times.map(() => 0);
    for (const one of section.series) {
      const above = below.map((value, at) => value + one.values[at]);
      // As steps: a sample holds until the next one.
      const upper = [], lower = [];
      times.forEach((ms, at) => {
        const until = at + 1 < times.length ? times[at + 1] : end;
        upper.push(across(ms) + "," + up(above[at]), across(until) + "," + up(above[at]));
        lower.push(across(ms) + "," + up(below[at]), across(until) + "," + up(below[at]));
      });
      const drawn = shape("polygon", { class: "part", points: [...upper, ...lower.reverse()].join(" "),
        fill: colors[one.name], "data-series": one.name, "data-peak": Math.max(...one.values, 0) }, svg);
      shape("title", {}, drawn, one.name + ": at most " + bytes(Math.max(...one.values, 0)));
      below = above;
    }
    legend(parent, colors);
  },

  strip(parent, section) {
    const total = section.units.reduce((sum, one) => sum + one.numel, 0) || 1, svg = canvas(parent, 58);
    const colors = palette([...new Set(section.units.map(one => one.kind))]);
    let x = 0;
    for (const unit of section.units) {
      const wide = unit.numel / total * WIDTH;
      part(svg, x, 4, Math.max(wide - 1, 0.6), 46, colors[unit.kind],
        unit.name + " (" + unit.kind + "): " + show(unit.numel, "count") + " elements", { "data-numel": unit.numel });
      const name = unit.name.split(".").slice(-2).join(".");
      if (wide > 7 * name.length + 8) {
        shape("text", { class: "on", x: x + wide / 2, y: 31, "text-anchor": "middle" }, svg, name);
      }
      x += wide;
    }
    legend(parent, colors);
  },

  timeline(parent, section, top) {
    const place = element("div", {}, parent);
    const draw = number => { place.textContent = ""; timeline(place, section, section.ranks[number]); };
    if (section.ranks.length > 1) {
      const choice = element("select", { "aria-label": "rank" }, top);
      section.ranks.forEach((one, at) => element("option", { value: at }, choice, "rank " + one.rank));
      choice.addEventListener("change", () => draw(Number(choice.value)));
    }
    draw(0);
  },
};

// Spans that overlap in a lane stand in rows under each other.
function rowsOf(spans) {
  const ends = [];
  return spans.map(span => {
    let row = ends.findIndex(end => end <= span.start_ms + 1e-9);
    if (row < 0) row = ends.length;
    ends[row] = span.start_ms + span.ms;
    return row;
  });
}

function timeline(parent, section, of) {
  const left = 130, width = WIDTH - left - 20, colors = palette(section.lanes), end = Math.max(of.ms, 1e-6);
  const lanes = section.lanes.map(name => ({ name, spans: of.spans.filter(span => span.lane === name) }))
    .filter(lane => lane.spans.length);
  let height = 0;
  for (const lane of lanes) {
    lane.rows = rowsOf(lane.spans);
    lane.top = height;
    lane.each = Math.max(...lane.rows) > 2 ? 9 : 18;
    height += (Math.max(...lane.rows) + 1) * lane.each + 8;
  }
  const svg = canvas(parent, height + 22);
  for (const lane of lanes) {
    const high = (Math.max(...lane.rows) + 1) * lane.each + 2;
    shape("rect", { class: "ground", x: left, y: lane.top, width, height: high, rx: 3 }, svg);
    shape("text", { x: left - 10, y: lane.top + Math.min(high / 2 + 4, 14), "text-anchor": "end" }, svg, lane.name);
  }
  axis(svg, left, width, 0, height, end, "ms");
  for (const lane of lanes) {
    lane.spans.forEach((span, at) => {
      const x = left + span.start_ms / end * width, wide = span.ms / end * width;
      const y = lane.top + 1 + lane.rows[at] * lane.each, hint = span.name + ": " + show(span.ms, "ms") + " from " +
        show(span.start_ms, "ms") + (span.nbytes ? ", " + bytes(span.nbytes) : "");
      part(svg, x, y, wide, lane.each - 1, colors[lane.name], hint,
        { "data-lane": lane.name, "data-ms": span.ms, "data-bytes": span.nbytes });
      if (lane.each > 10 && wide > 7 * span.name.length + 6) {
        shape("text", { class: "on", x: x + 5, y: y + 13 }, svg, span.name);
      }
    });
  }
}

const main = document.querySelector("main");
element("h1", {}, main, DATA.title);
const facts = element("ul", { class: "facts" }, main);
for (const [name, value] of DATA.facts) {
  const item = element("li", {}, facts);
  element("b", {}, item, name);
  item.append(value);
}
for (const section of DATA.sections) {
  const made = element("section", { "data-kind": section.kind }, main);
  const top = element("div", { class: "top" }, made);
  element("h2", {}, top, section.title);
  element("p", { class: "note" }, made, section.note || "");
  DRAW[section.kind](made, section, top);
}
