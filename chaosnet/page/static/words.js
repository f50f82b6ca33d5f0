// Numbers and elements, for people. Text from the cluster goes into text nodes only, never into markup.

export function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 1000 || unit === "TB")
      return `${bytes >= 10 || unit === "B" ? Math.round(bytes) : bytes.toFixed(1)} ${unit}`;
    bytes /= 1000;
  }
}

export function rate(mbit) {
  if (!mbit) return "–";
  if (mbit >= 1000) return `${(mbit / 1000).toFixed(mbit >= 10000 ? 0 : 1)} Gbit/s`;
  return `${mbit >= 10 ? Math.round(mbit) : mbit.toFixed(1)} Mbit/s`;
}

export function seconds(s) {
  if (s == null) return "–";
  if (s < 0.0995) return `${(s * 1e3).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 60) return `${s.toFixed(s < 9.95 ? 2 : 1)} s`;
  s = Math.round(s);
  if (s >= 3600) s = 60 * Math.round(s / 60);
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${(s % 3600) / 60} min`;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (n) => whole.format(n);

// Where tenths of a second say nothing.
export const lasting = (s) => (s < 60 ? `${Math.round(s)} s` : seconds(s));

// Of "0-2, 5".
export const layersOf = (told) => `${/^\d+$/.test(told) ? "layer" : "layers"} ${told}`;

export function value(v) {
  if (v == null) return "not finite";
  const a = Math.abs(v);
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) return v.toExponential(2);
  return v.toFixed(a >= 1000 ? 0 : a >= 100 ? 1 : a >= 10 ? 2 : a >= 1 ? 3 : 4);
}

// The time; with the day, if that is not today.
export function clock(s) {
  const at = new Date(s * 1000);
  const now = new Date();
  const time = at.toLocaleTimeString("en-GB");
  if (at.toDateString() === now.toDateString()) return time;
  const year = at.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short", year })} ${time}`;
}

export const short = (name, most = 14) =>
  name.length <= most ? name : `${name.slice(0, most - 6)}…${name.slice(-5)}`;

// Names, of which there may be many: the first `most`, and how many more.
export function some(names, most = 3) {
  const more = names.length - most;
  return names.slice(0, most).join(", ") + (more > 0 ? ` and ${count(more)} more` : "");
}

export const $ = (id) => document.getElementById(id);

// An element with attributes and children; `svg` makes one of SVG.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, v] of Object.entries(attributes)) {
    if (name === "style")
      made.style.cssText = v; // As an attribute the page's policy forbids it.
    else if (v != null && v !== false) made.setAttribute(name, v === true ? "" : v);
  }
  made.append(...children.filter((child) => child != null && child !== false));
  return made;
}

// Sets an attribute if it is another than before: what does not change costs no layout.
export function set(target, name, v) {
  const text = String(v);
  if (target.getAttribute(name) !== text) target.setAttribute(name, text);
}

// The same for its text.
export function say(target, text) {
  if (target.textContent !== String(text)) target.textContent = text;
}

// Children of `parent`, one for each item, by key: those that stay are kept.
// Of items with equal keys the later are new.
export function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const kept = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = old.get(name);
    if (child) old.delete(name);
    else {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    kept.add(child);
    update(child, item);
  }
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
}
