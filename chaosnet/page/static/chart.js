// One curve over steps, with what happened in the cluster as lines across it.
import { clock, count, say, seconds, set, svg, value } from "./words.js";

const MARGIN = { left: 54, right: 14, top: 16, bottom: 22 };
const SMOOTHED = 60; // Values, from which on their means are drawn, too.
const NEAR = 5; // Pixels from a mark, up to which it is read with the curve.
const TOLD = 2; // Marks that are read at once.

export class Chart {
  constructor(box, reading) {
    Object.assign(this, { box, reading, steps: [], values: [], times: [], marks: [], unit: value, at: null });
    this.width = 0; // Until it is seen.
    new ResizeObserver(([seen]) => {
      this.width = seen.contentRect.width;
      this.height = seen.contentRect.height;
      this.draw();
    }).observe(box);
    box.addEventListener("pointermove", (event) => this.read(this.index(event.offsetX)));
    box.addEventListener("pointerleave", () => this.read(null));
    box.addEventListener("blur", () => this.read(null));
    box.addEventListener("keydown", (event) => this.step(event));
  }

  // `values`: null is one that is not finite; `marks`: { step, kind, text } of events; `unit`: a value as text.
  show(steps, values, times, marks, unit) {
    Object.assign(this, { steps, values, times, marks, unit });
    if (this.at >= values.length) this.read(null); // Older ones were thinned out.
    this.draw();
  }

  draw() {
    if (this.width < 80) return;
    this.box.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const finite = this.values.filter((v) => v != null);
    if (finite.length < 2) {
      const why = this.values.length < 2 ? "A curve begins with the second value." : "Hardly any value is finite.";
      this.box.replaceChildren(svg("text", { x: 14, y: 28 }, why));
      return;
    }
    const [low, high] = this.scale(finite);
    const columns = Math.max(this.width - MARGIN.left - MARGIN.right, 50);
    const curve = (kind, values) =>
      svg("path", { class: kind, d: path(thin(this.steps, values, columns), this.x, this.y) });
    const parts = [...this.axes(low, high), ...this.marked()];
    if (finite.length > SMOOTHED) parts.push(curve("raw", this.values), curve("smooth", smooth(this.values)));
    else parts.push(curve("smooth", this.values));
    const bottom = this.height - MARGIN.bottom;
    this.cross = svg("line", { class: "cross", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    this.dot = svg("circle", { class: "dot", r: 4.5, visibility: "hidden" });
    this.box.replaceChildren(...parts, this.cross, this.dot);
    if (this.at != null) this.read(this.at);
  }

  // Where steps and values are drawn. Returns: the values at the lower and the upper end.
  scale(finite) {
    let [low, high] = bounds(finite);
    if (low === high) {
      low -= 0.5;
      high += 0.5;
    }
    const pad = (high - low) * 0.06;
    low = low >= 0 && low - pad < 0 ? 0 : low - pad;
    high += pad;
    const [first, last] = [this.steps[0], this.steps.at(-1)];
    const wide = this.width - MARGIN.left - MARGIN.right;
    const tall = this.height - MARGIN.top - MARGIN.bottom;
    this.x = (step) => MARGIN.left + ((step - first) / (last - first || 1)) * wide;
    this.y = (v) => this.height - MARGIN.bottom - ((Math.min(Math.max(v, low), high) - low) / (high - low)) * tall;
    return [low, high];
  }

  axes(low, high) {
    const parts = [];
    const levels = ticks(low, high, 4);
    const texts = labels(levels, this.unit);
    levels.forEach((v, i) => {
      const y = this.y(v);
      parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      parts.push(svg("text", { class: "level", x: MARGIN.left - 7, y: y + 4, "text-anchor": "end" }, texts[i]));
    });
    const wanted = Math.max(2, Math.min(8, Math.floor(this.width / 110)));
    for (const step of ticks(this.steps[0], this.steps.at(-1), wanted)) {
      if (step !== Math.round(step)) continue;
      parts.push(svg("text", { x: this.x(step), y: this.height - 5, "text-anchor": "middle" }, count(step)));
    }
    return parts;
  }

  marked() {
    const seen = this.marks.filter(({ step }) => step >= this.steps[0] && step <= this.steps.at(-1));
    return seen.flatMap(({ step, kind }) => {
      const x = this.x(step);
      const bottom = this.height - MARGIN.bottom;
      return [
        svg("line", { class: `event ${kind}`, x1: x, x2: x, y1: MARGIN.top - 4, y2: bottom }),
        svg("circle", { class: `event-mark ${kind}`, cx: x, cy: MARGIN.top - 6, r: 3 }),
      ];
    });
  }

  // Left and right.
  step(event) {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const last = this.values.length - 1;
    const leap = way * Math.max(1, Math.round(this.values.length / 100));
    this.read(Math.min(Math.max(this.at == null ? last : this.at + leap, 0), last));
  }

  index(x) {
    if (!this.x || !this.steps.length) return null;
    let best = 0;
    for (let low = 0, high = this.steps.length - 1; low <= high;) {
      const middle = (low + high) >> 1;
      if (this.x(this.steps[middle]) < x) {
        best = middle;
        low = middle + 1;
      } else high = middle - 1;
    }
    return best + 1 < this.steps.length && this.x(this.steps[best + 1]) - x < x - this.x(this.steps[best])
      ? best + 1
      : best;
  }

  read(index) {
    this.at = index;
    const v = index == null ? null : this.values[index];
    if (this.cross) {
      const seen = v == null ? "hidden" : "visible";
      set(this.cross, "visibility", seen);
      set(this.dot, "visibility", seen);
      if (v != null) this.point(this.x(this.steps[index]), this.y(v));
    }
    const isNone = index == null || !this.steps.length;
    say(this.reading, isNone ? "" : `step ${count(this.steps[index])}, ${this.told(index)}`);
  }

  point(x, y) {
    for (const name of ["x1", "x2"]) set(this.cross, name, x);
    set(this.dot, "cx", x);
    set(this.dot, "cy", y);
  }

  told(index) {
    const v = this.values[index];
    const x = this.x?.(this.steps[index]);
    const near = this.marks.filter(({ step }) => Math.abs(this.x?.(step) - x) <= NEAR).slice(-TOLD);
    const read = `${clock(this.times[index])}: ${v == null ? "not finite" : this.unit(v)}`;
    return [read, ...near.map(({ text }) => text)].join(" · ");
  }
}

// Of what lies between the first and the last percent, so that one wild value does not flatten all others.
function bounds(finite) {
  const sorted = Float64Array.from(finite).sort();
  const end = sorted.length - 1;
  const low = sorted[Math.floor(end * 0.01)];
  const high = sorted[Math.ceil(end * 0.99)];
  const span = high - low || 1;
  return [Math.max(sorted[0], low - span), Math.min(sorted[end], high + span)];
}

// Means of as many values to the left as to the right, so that the line does not lag behind.
function smooth(values) {
  const reach = Math.min(Math.ceil(values.length / 60), 40);
  const sums = [0];
  const counts = [0];
  values.forEach((v, i) => {
    sums.push(sums[i] + (v ?? 0));
    counts.push(counts[i] + (v != null));
  });
  return values.map((v, i) => {
    const side = Math.min(reach, i, values.length - 1 - i);
    const from = i - side;
    const to = i + side + 1;
    return v == null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

// Of levels: as short as they can be told apart.
function labels(levels, unit) {
  const short = levels.map((v) => withoutNoughts(unit(v)));
  if (new Set(short).size === levels.length) return short;
  return levels.map((v) => (unit === seconds ? `${v} s` : String(v)));
}

const withoutNoughts = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

// At most the least and the largest of each column of pixels.
function thin(steps, values, columns) {
  if (steps.length <= 2 * columns) return steps.map((step, i) => [step, values[i]]);
  const found = [];
  const each = steps.length / columns;
  for (let column = 0; column < columns; column++) {
    let least = null,
      most = null;
    for (let i = Math.floor(column * each); i < Math.min((column + 1) * each, steps.length); i++) {
      if (values[i] == null) continue;
      if (least == null || values[i] < values[least]) least = i;
      if (most == null || values[i] > values[most]) most = i;
    }
    for (const i of least === most ? [least] : [Math.min(least, most), Math.max(least, most)])
      if (i != null) found.push([steps[i], values[i]]);
  }
  return found;
}

function path(points, x, y) {
  let d = "",
    down = false;
  for (const [step, v] of points) {
    if (v == null) {
      down = false;
      continue;
    }
    d += `${down ? "L" : "M"}${x(step).toFixed(1)} ${y(v).toFixed(1)}`;
    down = true;
  }
  return d;
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((each) => each * power >= raw) * power;
  const found = [];
  for (let v = Math.ceil(low / unit) * unit; v <= high + unit * 1e-6; v += unit)
    found.push(Number(v.toPrecision(12)));
  return found;
}
