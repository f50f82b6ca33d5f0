// One curve over steps, with what happened in the cluster as lines across it.
import { clock, count, set, svg, value } from "./words.js";

const MARGIN = { left: 54, right: 14, top: 16, bottom: 22 };

export class Chart {
  constructor(box, reading) {
    Object.assign(this, { box, reading, steps: [], values: [], times: [], marks: [], unit: value, at: null });
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("pointermove", (event) => this.read(this.index(event.offsetX)));
    box.addEventListener("pointerleave", () => this.read(null));
    box.addEventListener("blur", () => this.read(null));
    box.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!way) return;
      event.preventDefault();
      const leap = Math.max(1, Math.round(this.values.length / 100));
      this.read(
        Math.min(Math.max((this.at ?? this.values.length - 1 - way * leap) + way * leap, 0), this.values.length - 1),
      );
    });
  }

  // `marks`: { step, kind } of events; `unit`: a value as text.
  show(steps, values, times, marks, unit) {
    Object.assign(this, { steps, values, times, marks, unit });
    this.draw();
  }

  draw() {
    const width = this.box.clientWidth,
      height = this.box.clientHeight;
    this.box.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const finite = this.values.filter((v) => v != null);
    if (finite.length < 2 || width < 80) {
      this.box.replaceChildren(
        svg("text", { x: 14, y: 28 }, finite.length < 2 ? "No values yet: trainer.mean(loss) brings them." : ""),
      );
      return;
    }
    const [first, last] = [this.steps[0], this.steps[this.steps.length - 1]];
    let [low, high] = bounds(finite);
    if (low === high) {
      low -= 0.5;
      high += 0.5;
    }
    const pad = (high - low) * 0.06;
    low = low >= 0 && low - pad < 0 ? 0 : low - pad;
    high += pad;
    this.x = (step) => MARGIN.left + ((step - first) / (last - first || 1)) * (width - MARGIN.left - MARGIN.right);
    this.y = (v) =>
      height -
      MARGIN.bottom -
      ((Math.min(Math.max(v, low), high) - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
    const parts = [];
    for (const v of ticks(low, high, 4))
      parts.push(
        svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: this.y(v), y2: this.y(v) }),
        svg("text", { x: MARGIN.left - 7, y: this.y(v) + 4, "text-anchor": "end" }, tick(this.unit(v))),
      );
    for (const step of ticks(first, last, Math.max(2, Math.min(8, Math.floor(width / 110)))))
      if (step === Math.round(step))
        parts.push(svg("text", { x: this.x(step), y: height - 5, "text-anchor": "middle" }, count(step)));
    for (const { step, kind } of this.marks)
      if (step >= first && step <= last)
        parts.push(
          svg("line", {
            class: `event ${kind}`,
            x1: this.x(step),
            x2: this.x(step),
            y1: MARGIN.top - 4,
            y2: height - MARGIN.bottom,
          }),
          svg("circle", { class: `event-mark ${kind}`, cx: this.x(step), cy: MARGIN.top - 6, r: 3 }),
        );
    const columns = Math.max(width - MARGIN.left - MARGIN.right, 50),
      soft = finite.length > 60;
    parts.push(
      svg("path", {
        class: soft ? "raw" : "smooth",
        d: path(thin(this.steps, this.values, columns), this.x, this.y),
      }),
    );
    if (soft)
      parts.push(
        svg("path", { class: "smooth", d: path(thin(this.steps, smooth(this.values), columns), this.x, this.y) }),
      );
    this.cross = svg("line", { class: "cross", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    this.dot = svg("circle", { class: "dot", r: 4.5, visibility: "hidden" });
    this.box.replaceChildren(...parts, this.cross, this.dot);
    if (this.at != null) this.read(this.at);
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
    const v = index == null ? null : this.values[index],
      seen = v != null && this.cross ? "visible" : "hidden";
    if (this.cross) {
      set(this.cross, "visibility", seen);
      set(this.dot, "visibility", seen);
    }
    if (seen === "visible") {
      const x = this.x(this.steps[index]);
      set(this.cross, "x1", x);
      set(this.cross, "x2", x);
      set(this.dot, "cx", x);
      set(this.dot, "cy", this.y(v));
    }
    this.reading.textContent =
      index == null || !this.steps.length
        ? ""
        : `step ${count(this.steps[index])}, ${clock(this.times[index])}: ${v == null ? "not finite" : this.unit(v)}`;
  }
}

// Of what lies between the first and the last percent, so that one wild value does not flatten all others.
function bounds(finite) {
  const sorted = Float64Array.from(finite).sort(),
    end = sorted.length - 1;
  const low = sorted[Math.floor(end * 0.01)],
    high = sorted[Math.ceil(end * 0.99)],
    span = high - low || 1;
  return [Math.max(sorted[0], low - span), Math.min(sorted[end], high + span)];
}

// Means of as many values to the left as to the right, so that the line does not lag behind.
function smooth(values) {
  const reach = Math.min(Math.ceil(values.length / 60), 40),
    sums = [0],
    counts = [0];
  values.forEach((v, i) => {
    sums.push(sums[i] + (v ?? 0));
    counts.push(counts[i] + (v != null));
  });
  return values.map((v, i) => {
    const side = Math.min(reach, i, values.length - 1 - i),
      from = i - side,
      to = i + side + 1;
    return v == null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

// Without the noughts at its end.
const tick = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

// At most the least and the largest of each column of pixels.
function thin(steps, values, columns) {
  if (steps.length <= 2 * columns) return steps.map((step, i) => [step, values[i]]);
  const found = [],
    each = steps.length / columns;
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
  const raw = (high - low) / wanted || 1,
    power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((each) => each * power >= raw) * power,
    found = [];
  for (let v = Math.ceil(low / unit) * unit; v <= high + unit * 1e-6; v += unit)
    found.push(Number(v.toPrecision(12)));
  return found;
}
