// The overlay: nodes by state, links by rate, the trees of the all-reduce, pulls of the state as flows.
import { layout } from "./layout.js";
import { count, element, lasting, layersOf, rate, say, seconds, set, short, size, some, svg } from "./words.js";

const GHOST_MS = 45000; // So long a node that is gone is still drawn.
const MOVE_MS = 550;
const FEW_LINKS = 18; // So many have their rates written on them.
const FEW_NODES = 40; // So many have two lines a link, and their names.
const NARROW = 520; // Pixels, up to which rates are left out and names are shorter.
const NAME = 14; // Characters.
const NAME_NARROW = 10;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const GLYPHS = { failed: "✕", left: "–" };

export class Graph {
  constructor(box, details, trees, legend) {
    Object.assign(this, { box, details, trees, legend });
    this.at = new Map(); // Where nodes are, from 0 to 1.
    this.nodes = new Map();
    this.links = new Map();
    this.flows = new Map();
    this.ghosts = new Map();
    this.topology = "";
    this.tree = null;
    this.chosen = null;
    this.page = null;
    this.layers = ["links", "flows", "rates", "nodes"].map((name) => svg("g", { class: name }));
    box.append(...this.layers);
    box.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => {
      this.size();
      this.place();
    }).observe(box);
    this.drawLegend();
  }

  size() {
    this.width = this.box.clientWidth || 600;
    this.height = this.box.clientHeight || 400;
    this.box.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
  }

  draw(page) {
    this.page = page;
    const drawn = this.drawnNodes(page);
    this.many = drawn.length > FEW_NODES;
    this.radius = drawn.length <= 12 ? 19 : this.many ? (drawn.length > 120 ? 6 : 8) : 12;
    this.box.classList.toggle("many", this.many);
    this.box.classList.toggle("two", drawn.length <= 2);
    if (!this.topology) this.size(); // Until now the page was hidden.
    this.drawLinks(page);
    this.drawNodes(drawn);
    this.drawFlows(drawn);
    this.drawTrees(page.trees);
    this.arrange(drawn, page.links);
    this.tell();
  }

  // Those that are here, and those that have gone while we looked.
  drawnNodes(page) {
    const now = performance.now();
    const drawn = [];
    for (const node of page.nodes) {
      const out = node.state === "failed" || node.state === "left";
      if (!out) this.ghosts.delete(node.id);
      else if (this.nodes.has(node.id) && !this.ghosts.has(node.id)) this.ghosts.set(node.id, now);
      if (!out || this.fades(node.id)) drawn.push(node);
    }
    return drawn;
  }

  // Is it one that has just gone?
  fades(id) {
    return performance.now() - (this.ghosts.get(id) ?? -GHOST_MS) < GHOST_MS;
  }

  // A new layout only if something came or went; what moves, moves at once or in half a second.
  arrange(drawn, links) {
    const names = drawn.map((node) => node.id);
    const topology = `${[...names].sort()}|${links.map(({ a, b }) => `${a} ${b}`)}|${this.many}`;
    if (topology === this.topology) {
      this.place();
      return;
    }
    this.topology = topology;
    const to = layout(names, links, this.at, this.width / this.height);
    const from = this.at;
    cancelAnimationFrame(this.moving);
    const start = performance.now();
    const move = (now) => {
      const part = still.matches || !from.size ? 1 : Math.min((now - start) / MOVE_MS, 1);
      const ease = 1 - (1 - part) ** 3;
      this.at = new Map(
        [...to].map(([name, p]) => {
          const old = from.get(name) ?? p;
          return [name, { x: old.x + (p.x - old.x) * ease, y: old.y + (p.y - old.y) * ease }];
        }),
      );
      this.place();
      if (part < 1) this.moving = requestAnimationFrame(move);
    };
    move(start);
  }

  point(name) {
    const p = this.at.get(name);
    if (!p) return null;
    const side = Math.min(70, this.width * 0.15); // Half a name.
    const top = this.radius + 16;
    const bottom = this.radius + 30;
    return { x: side + p.x * (this.width - 2 * side), y: top + p.y * (this.height - top - bottom) };
  }

  place() {
    for (const [name, drawn] of this.nodes) {
      const p = this.point(name);
      if (p) set(drawn, "transform", `translate(${p.x.toFixed(1)} ${p.y.toFixed(1)})`);
    }
    for (const drawn of this.links.values()) {
      const a = this.point(drawn.link.a);
      const b = this.point(drawn.link.b);
      if (a && b) this.placeLink(drawn, a, b);
    }
    for (const drawn of this.flows.values()) {
      const a = this.point(drawn.from);
      const b = this.point(drawn.to);
      if (a && b) line(drawn, a, b, 0, 0);
    }
  }

  // The line of what goes from a to b is beside that of what comes back; each rate is written where it arrives.
  placeLink({ there, back, hit, thereRate, backRate }, a, b) {
    const length = Math.hypot(b.x - a.x, b.y - a.y) || 1;
    const ux = (b.x - a.x) / length;
    const uy = (b.y - a.y) / length;
    const apart = back ? 2.4 : 0;
    line(there, a, b, -uy * apart, ux * apart);
    line(hit, a, b, 0, 0);
    if (back) line(back, a, b, uy * apart, -ux * apart);
    if (!thereRate) return;
    const in_ = Math.min(this.radius + 34, length * 0.32);
    const off = 9;
    put(thereRate, b.x - ux * in_ - uy * off, b.y - uy * in_ + ux * off + 4);
    put(backRate, a.x + ux * in_ + uy * off, a.y + uy * in_ - ux * off + 4);
  }

  drawLinks({ links, trees }) {
    const named = links.length <= FEW_LINKS && this.width > NARROW && !this.many;
    const two = !this.many;
    const remove = (drawn) => {
      for (const each of [drawn.group, drawn.thereRate, drawn.backRate]) each?.remove();
    };
    sync(
      this.links,
      links,
      (link) => `${link.a} ${link.b} ${named} ${two}`,
      (link) => this.makeLink(link, named, two),
      (drawn, link) => this.updateLink(drawn, link),
      remove,
    );
    const planned = trees.length ? `, ${counted(trees, "tree")}` : "";
    say(this.trees.closest(".bar").querySelector(".note"), counted(links, "link") + planned);
  }

  updateLink(drawn, link) {
    drawn.link = link;
    const inTree = this.tree == null ? link.share > 0 : link.trees.includes(this.tree);
    const share = this.tree == null ? link.share : 1;
    const look = ["link", inTree && "tree", this.tree != null && !inTree && "dim", isAt(drawn.group)];
    set(drawn.group, "class", look.filter(Boolean).join(" "));
    // One line for both directions shows the slower one.
    const slower = Math.min(link.rate || link.back, link.back || link.rate);
    const lines = drawn.back
      ? [
          [drawn.there, link.rate],
          [drawn.back, link.back],
        ]
      : [[drawn.there, slower]];
    for (const [each, mbit] of lines) {
      set(each, "stroke-width", (this.many ? 0.55 : 1) * width(mbit));
      set(each, "stroke-opacity", (inTree ? 0.4 + 0.6 * Math.min(share, 1) : 0.9).toFixed(2));
    }
    if (!drawn.thereRate) return;
    say(drawn.thereRate, link.rate ? brief(link.rate) : "");
    say(drawn.backRate, link.back ? brief(link.back) : "");
  }

  makeLink(link, named, two) {
    const drawn = { link, there: svg("line"), back: two ? svg("line") : null, hit: svg("line", { class: "hit" }) };
    drawn.group = svg("g", { class: "link" }, drawn.there, drawn.back, drawn.hit);
    drawn.group.addEventListener("pointerenter", () => this.choose({ link: drawn }));
    drawn.group.addEventListener("click", () => this.choose({ link: drawn }));
    this.layers[0].append(drawn.group);
    if (named) {
      drawn.thereRate = svg("text", { class: "rate" });
      drawn.backRate = svg("text", { class: "rate" });
      this.layers[2].append(drawn.thereRate, drawn.backRate);
    }
    return drawn;
  }

  drawNodes(nodes) {
    const group = this.layers[3];
    sync(
      this.nodes,
      nodes,
      (node) => node.id,
      (node) => this.makeNode(node, group),
      (drawn, node) => this.updateNode(drawn, node),
      (drawn) => drawn.remove(),
    );
    const all = [...this.nodes.values()];
    if (!all.some((drawn) => drawn.getAttribute("tabindex") === "0")) all[0]?.setAttribute("tabindex", "0");
  }

  updateNode(drawn, node) {
    const [ring, disc, progress, glyph, name] = drawn.children;
    const r = this.radius + (node.scheduler ? 2 : 0);
    const look = ["node", node.state, node.scheduler && "scheduler", node.late && "late", isAt(drawn)];
    set(drawn, "class", look.filter(Boolean).join(" "));
    set(drawn, "aria-label", spoken(node));
    set(disc, "r", r);
    set(ring, "r", r + 5);
    set(glyph, "font-size", Math.max(Math.round(r * 0.66), 9));
    say(glyph, r < 9 ? "" : glyphOf(node));
    set(name, "y", r + (node.scheduler || node.late ? 19 : 15));
    say(name, short(node.id, this.width > NARROW ? NAME : NAME_NARROW));
    set(progress, "d", node.pull ? arc(r + 2, node.pull.here / node.pull.bytes) : "");
  }

  makeNode(node, group) {
    const drawn = svg(
      "g",
      { class: "node", role: "button", tabindex: -1 },
      svg("circle", { class: "ring" }),
      svg("circle", { class: "disc" }),
      svg("path", { class: "progress" }),
      svg("text", { class: "glyph" }),
      svg("text", { class: "name" }),
    );
    const choose = () => this.choose({ node: node.id });
    for (const what of ["pointerenter", "focus", "click"]) drawn.addEventListener(what, choose);
    group.append(drawn);
    return drawn;
  }

  drawFlows(nodes) {
    const flows = nodes.flatMap((node) =>
      Object.entries(node.pull?.sources ?? {})
        .filter(([, told]) => told.bytes || told.rate)
        .map(([from, told]) => ({ from, to: node.id, told })),
    );
    sync(
      this.flows,
      flows,
      (flow) => `${flow.from} ${flow.to}`,
      (flow) => {
        const drawn = svg("line", { class: "flow" });
        this.layers[1].append(drawn);
        return Object.assign(drawn, { from: flow.from, to: flow.to });
      },
      (drawn, flow) =>
        set(
          drawn,
          "stroke-width",
          (this.many ? 2 : 2.5 + Math.min(Math.log10(1 + (flow.told.rate ?? 0) / 1e5), 4)).toFixed(1),
        ),
      (drawn) => drawn.remove(),
    );
  }

  drawTrees(trees) {
    if (this.tree != null && this.tree >= trees.length) this.tree = null;
    const shown = trees
      .map((tree, place) => ({ ...tree, place }))
      .sort((a, b) => b.share - a.share)
      .slice(0, 6);
    const text = JSON.stringify([shown, this.tree]);
    if (this.treesDrawn === text) return;
    this.treesDrawn = text;
    const chip = (label, place) => {
      const button = element("button", { type: "button", "aria-pressed": String(this.tree === place) }, label);
      button.addEventListener("click", () => {
        this.tree = place;
        this.draw(this.page);
        this.trees.querySelector("[aria-pressed=true]")?.focus();
      });
      return button;
    };
    const part = (tree) => `${short(tree.root, NAME_NARROW)} ${Math.round(100 * tree.share)} %`;
    const chips = shown.map((tree) => chip(part(tree), tree.place));
    this.trees.replaceChildren(...(trees.length ? [chip("all trees", null), ...chips] : []));
  }

  drawLegend() {
    const marks = [
      [dot("--accent", "--accent"), "scheduler"],
      [dot("--good", "--good"), "member"],
      [dot("--card", "--join", "2.5 2"), "joining"],
      [dot("--card", "--bad"), "lost"],
      [dash("--accent", 3), "carries gradients"],
      [dash("--link", 1.5, "4 4"), "does not"],
    ];
    for (const [mark, text] of marks) this.legend.append(element("span", {}, mark, text));
    this.legend.append(element("span", {}, "thicker is faster; rates, in Mbit/s, are written where they arrive"));
  }

  choose(what) {
    this.chosen = what;
    for (const [name, drawn] of this.nodes) {
      drawn.classList.toggle("at", what.node === name);
      if (what.node) set(drawn, "tabindex", what.node === name ? 0 : -1);
    }
    for (const drawn of this.links.values())
      drawn.group.classList.toggle(
        "at",
        what.link ? what.link === drawn : what.node === drawn.link.a || what.node === drawn.link.b,
      );
    this.tell();
  }

  // Arrow keys go round.
  step(event) {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const all = [...this.nodes.values()];
    const place = all.indexOf(document.activeElement);
    all[(place + way + all.length) % all.length]?.focus();
  }

  tell() {
    const [first, ...rest] = this.chosenParts() ?? [];
    if (!first) {
      const how = "Point at a node or link, or go from node to node with Tab and the arrow keys.";
      this.details.replaceChildren(element("span", { class: "note" }, how));
      return;
    }
    this.details.replaceChildren(element("b", {}, first), ` ${rest.join(" · ")}`);
  }

  chosenParts() {
    const { node, link } = this.chosen ?? {};
    const found = node && this.page.nodes.find((each) => each.id === node);
    if (found) return ofNode(found);
    return link && [...this.links.values()].includes(link) ? ofLink(link.link, this.page.trees) : null;
  }
}

const counted = (items, noun) => `${count(items.length)} ${noun}${items.length === 1 ? "" : "s"}`;
const isAt = (drawn) => drawn.classList.contains("at") && "at";
const loaded = ({ here, bytes }) => Math.floor((100 * here) / bytes);

function roleOf(node) {
  if (node.scheduler) return "scheduler";
  return { standby: "joining", active: "member", failed: "lost" }[node.state] ?? node.state;
}

function glyphOf(node) {
  if (node.pull) return `${loaded(node.pull)}%`;
  return GLYPHS[node.state] ?? (node.scheduler ? "★" : "");
}

function dot(fill, stroke, dashes = "none") {
  const style = `fill:var(${fill});stroke:var(${stroke});stroke-width:2;stroke-dasharray:${dashes}`;
  return svg("svg", { width: 14, height: 14 }, svg("circle", { cx: 7, cy: 7, r: 5, style }));
}

function dash(colour, wide, dashes = "none") {
  const style = `stroke:var(${colour});stroke-width:${wide};stroke-dasharray:${dashes}`;
  return svg("svg", { width: 24, height: 8 }, svg("path", { d: "M0 4H24", style }));
}

function ofNode(node) {
  const parts = [node.id, roleOf(node)];
  if (node.report_age_s != null && node.state === "active") {
    parts.push(`step ${count(node.step)}`, `${count(node.samples_per_s)} samples/s`);
    parts.push(`waited ${seconds(node.sync_s)} for the sum`, `CPU ${Math.round(node.cpu_pct)} %`);
    parts.push(size(node.memory_bytes));
  }
  if (node.keeps) parts.push(`keeps the state of ${layersOf(node.keeps)}`);
  if (node.idle_s) parts.push(`its script has not called update() for ${lasting(node.idle_s)}`);
  if (node.pull) parts.push(`has ${size(node.pull.here)} of ${size(node.pull.bytes)}`);
  if (node.neighbors.length) parts.push(`links to ${some(node.neighbors, 8)}`);
  return [...parts, ...node.addresses.slice(0, 1)];
}

function ofLink(link, trees) {
  const way = (mbit, age_s, source) =>
    age_s == null ? "not measured" : `${rate(mbit)} (${lasting(age_s)} ago, ${source})`;
  const parts = [`${link.a} – ${link.b}`];
  parts.push(`${link.a} → ${link.b} ${way(link.rate, link.age_s, link.source)}`);
  parts.push(`${link.b} → ${link.a} ${way(link.back, link.back_age_s, link.back_source)}`);
  if (link.rtt_ms) parts.push(`round trip ${link.rtt_ms.toFixed(2)} ms`);
  const share = `carries ${Math.round(100 * link.share)} % of the gradients`;
  const over = `${link.trees.length} of ${trees.length} trees`;
  return [...parts, link.trees.length ? `${share} (${over})` : "carries no gradients now"];
}

function spoken(node) {
  const parts = [node.id, roleOf(node)];
  if (node.late) parts.push("the others wait for it");
  if (node.pull) parts.push(`${loaded(node.pull)} percent loaded`);
  return parts.join(", ");
}

const width = (mbit) => (mbit ? Math.min(1 + 1.1 * Math.log10(1 + mbit / 4), 4.6) : 1.2).toFixed(2);

function brief(mbit) {
  if (mbit >= 10000) return `${Math.round(mbit / 1000)}k`;
  return mbit >= 10 ? String(Math.round(mbit)) : mbit.toFixed(1);
}

function line(drawn, a, b, dx, dy) {
  set(drawn, "x1", (a.x + dx).toFixed(1));
  set(drawn, "y1", (a.y + dy).toFixed(1));
  set(drawn, "x2", (b.x + dx).toFixed(1));
  set(drawn, "y2", (b.y + dy).toFixed(1));
}

function put(drawn, x, y) {
  set(drawn, "x", x.toFixed(1));
  set(drawn, "y", y.toFixed(1));
}

function arc(r, part) {
  const turn = 2 * Math.PI * Math.min(Math.max(part, 0.001), 0.9999);
  const to = `${(r * Math.sin(turn)).toFixed(2)} ${(-r * Math.cos(turn)).toFixed(2)}`;
  return `M0 ${-r}A${r} ${r} 0 ${turn > Math.PI ? 1 : 0} 1 ${to}`;
}

// As `keyed`, for what is drawn on several layers.
function sync(drawn, items, key, make, update, remove) {
  const stays = new Set();
  for (const item of items) {
    const name = key(item);
    stays.add(name);
    if (!drawn.has(name)) drawn.set(name, make(item));
    update(drawn.get(name), item);
  }
  for (const [name, each] of drawn)
    if (!stays.has(name)) {
      remove(each);
      drawn.delete(name);
    }
}
