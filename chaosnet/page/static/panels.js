// What the page tells beside the overlay and the curves: each function draws one part.
import { $, clock, count, element, keyed, layersOf, say, seconds, set, short, size, some, value } from "./words.js";

const BARS = 12; // Nodes whose time is drawn: those that the others wait for.
const KEEPERS = 24; // Members of whom it is drawn what they keep.
const JOINS = 8;
const SOURCES = 5; // Of a join, that are named.
const EVENTS = 120;
const LONG = 8; // Characters of a tile, from which on they are smaller.
const NAME = 12; // Characters of a node's name beside a bar, or in a tile.
const GOOD = ["joined", "link-up", "waited for", "replication"];
const BAD = ["node-failure", "expelled", "link-failure", "link-refused", "declared dead", "waits for"];
const JOIN = ["scale-out"];

// `fades`: has the node of that name just gone?
export function showPanels(page, fades) {
  showHead(page);
  showSplit(page);
  showJoins(page);
  showPipelines(page);
  showKept(page);
  showTable(page, fades);
}

// --- headline ---

export function mainMetric(head) {
  const names = Object.keys(head.metrics).sort();
  return names.includes("loss") ? "loss" : names[0];
}

// A number and its unit.
const parted = (text) => (text.includes(" ") && !text.includes("min") ? text.split(" ") : [text, ""]);

// [name, number, unit, more] of each.
function tilesOf({ head, split, kept }) {
  const { counts, checkpoint } = head;
  const main = mainMetric(head);
  const others = Object.entries(head.metrics).filter(([name]) => name !== main);
  const means = others.slice(0, 2).map(([name, v]) => `${name} ${value(v)}`);
  const left = [
    head.dropped && `${count(head.dropped)} dropped`,
    head.set_aside && `${count(head.set_aside)} set aside`,
  ].filter(Boolean);
  const gone = counts.failed + counts.left;
  const sum = split ? `${seconds(split.sum_s)} of it the sum` : "median of the last 21";
  return [
    ["Step", count(head.step), "", head.view ? `view ${head.view}` : ""],
    main && [main, value(head.metrics[main]), "", means.join(", ") || "mean over the cluster"],
    ["Samples", count(head.samples_per_s), "/s", left.join(", ") || "all members together"],
    ["Step time", ...parted(seconds(head.step_s)), sum],
    [
      "Members",
      count(counts.active),
      counts.standby ? `+ ${counts.standby} joining` : "",
      gone ? `${count(gone)} gone` : "nobody lost",
    ],
    ["Scheduler", head.scheduler ? short(head.scheduler, NAME) : "being elected", "", `term ${head.term}`],
    checkpoint && ["Checkpoint", checkpoint.step ? count(checkpoint.step) : "none yet", "", ofCheckpoint(checkpoint)],
    kept ? copies(kept) : ["State", ...parted(size(head.state_bytes)), "what a joiner pulls"],
  ].filter(Boolean);
}

function ofCheckpoint({ step, time_s, writing }) {
  if (writing.length) return `${some(writing)} write${writing.length > 1 ? "" : "s"} one now`;
  return step ? `the newest, at ${clock(time_s)}` : "the first is to come";
}

function copies({ keepers }) {
  return keepers === 1
    ? ["State", "1", "copy", "of some layers"]
    : ["State", count(keepers), "copies", "of each layer, or more"];
}

function showHead(page) {
  const make = ([name]) => {
    const figure = element("dd", {}, element("span"), element("small"));
    return element("dl", { class: "tile" }, element("dt", {}, name), figure, element("p"));
  };
  const update = (tile, [, big, small, more]) => {
    const [, dd, p] = tile.children;
    say(dd.firstChild, big);
    say(dd.lastChild, small);
    set(dd, "title", `${big} ${small}`);
    set(dd, "class", big.length > LONG ? "long" : "");
    say(p, more);
  };
  keyed($("tiles"), tilesOf(page), ([name]) => name, make, update);
}

// --- where time goes ---

// Rows of nodes, and a last one that tells how many `more` there are: `said`.
function showRows(parent, rows, said, track, update) {
  const make = (row) =>
    row
      ? element("div", { class: "row" }, element("span"), track(), element("span"))
      : element("p", { class: "note" });
  const show = (shown, row) => {
    if (!row) {
      say(shown, said);
      return;
    }
    say(shown.firstChild, short(row.node, NAME));
    set(shown.firstChild, "title", row.node);
    update(shown.children[1], shown.lastChild, row);
  };
  keyed(parent, said ? [...rows, null] : rows, (row) => row?.node ?? "", make, show);
}

function whoWaits({ slowest, costs_s, rows }, waiting) {
  if (waiting) return `All wait for ${some(waiting.whom)} now.`;
  if (slowest) return `${slowest} comes last: the others wait ${seconds(costs_s)} of each step for it.`;
  return rows.length > 1 ? "No node keeps the others waiting." : "One node: nobody to wait for.";
}

function showSplit({ split, nodes, head }) {
  $("split").hidden = !split;
  if (!split) return;
  say($("split-note"), `${seconds(split.step_s)} a step`);
  say($("split-said"), whoWaits(split, head.waiting));
  const slowest = new Map(split.rows.slice(0, BARS).map((row) => [row.node, row]));
  // In the order of the table: else rows would change places with every step.
  const rows = nodes.filter(({ id }) => slowest.has(id)).map(({ id }) => slowest.get(id));
  const more = split.rows.length - rows.length;
  const said = more > 0 ? `and ${count(more)} more, which do their part sooner` : "";
  const parts = ["own", "sum", "wait"];
  const track = () =>
    element("div", { class: "stack", role: "img" }, ...parts.map((part) => element("i", { class: part })));
  showRows($("split-rows"), rows, said, track, (stack, last, { own_s, sum_s, wait_s }) => {
    say(last, seconds(own_s));
    const told = `own work ${seconds(own_s)}, the sum ${seconds(sum_s)}, waiting ${seconds(wait_s)}`;
    set(stack, "aria-label", told);
    const whole = Math.max(own_s + sum_s + wait_s, 1e-9); // Of the step in which it waited.
    [own_s, sum_s, wait_s].forEach((s, i) => {
      stack.children[i].style.width = `${((100 * s) / whole).toFixed(1)}%`;
    });
  });
}

// --- joins ---

function showJoins({ nodes }) {
  const joins = nodes.filter((node) => node.state === "standby" || node.pull);
  $("joins").hidden = !joins.length;
  const make = () => element("div", {}, element("b"), element("div", { class: "stack" }), element("p"));
  keyed(
    $("joins-rows"),
    joins.slice(0, JOINS),
    (node) => node.id,
    make,
    (shown, { id, pull }) => {
      const [name, stack, text] = shown.children;
      say(name, id);
      stack.hidden = !pull;
      say(text, pull ? ofPull(pull) : "has asked to be let in");
      if (!pull) return;
      const part = () => element("i", { class: "pulled" });
      keyed(
        stack,
        sourcesOf(pull),
        ([from]) => from,
        part,
        (shownPart, [from, told]) => {
          shownPart.style.width = `${(100 * told.bytes) / pull.bytes}%`;
          set(shownPart, "title", from);
        },
      );
    },
  );
}

// Who has sent most first.
function sourcesOf(pull) {
  const sources = Object.entries(pull.sources).filter(([, told]) => told.bytes);
  return sources.sort((a, b) => b[1].bytes - a[1].bytes);
}

function ofPull(pull) {
  const left = pull.left_s != null ? `, ${seconds(pull.left_s)} left` : "";
  const sources = sourcesOf(pull)
    .slice(0, SOURCES)
    .map(([from, told]) => `${from} ${size(told.bytes)}${told.rate ? ` at ${size(told.rate)}/s` : ""}`);
  const from = sources.length ? `; from ${sources.join(", ")}` : "";
  return `${size(pull.here)} of ${size(pull.bytes)}${left}${from}`;
}

// --- events ---

export function kindOf(kind) {
  if (BAD.includes(kind)) return "bad";
  if (GOOD.includes(kind)) return "good";
  return JOIN.includes(kind) ? "join" : "";
}

export function showEvents(events) {
  const most = events.length > EVENTS ? `the last ${EVENTS} of ` : "";
  say($("story-note"), most + count(events.length));
  const make = (event) => {
    const when = `${clock(event.time_s)} · step ${count(event.step)}`;
    const parts = [
      element("span", { class: "mark" }),
      element("span", { class: "what" }, event.text),
      element("time", {}, when),
    ];
    return element("li", { class: kindOf(event.kind) }, ...parts);
  };
  const key = (event) => `${event.time_s} ${event.kind} ${event.node} ${event.detail}`;
  keyed($("events"), events.slice(-EVENTS).reverse(), key, make, () => {});
}

// --- pipelines ---

function paceOf({ predicted_s: predicted, micro_batches_per_s: micro, head: { step_s: took } }) {
  const taken = took ? `, ${seconds(took)} taken (${(took / predicted).toFixed(2)} times)` : "";
  const parts = [
    predicted && `${seconds(predicted)} a step predicted${taken}`,
    micro && `${count(micro)} micro-batches/s`,
  ];
  return parts.filter(Boolean).join(" · ") || "who computes which layers";
}

function stageOf({ node, first, last, gone }) {
  const layers = first === last ? `layer ${first}` : `layers ${first} to ${last}`;
  const parts = [element("b", {}, node), element("span", {}, gone ? "gone" : layers)];
  return element("div", { class: `stage${gone ? " gone" : ""}` }, ...parts);
}

function showPipelines(page) {
  $("pipelines").hidden = !page.pipelines.length;
  say($("pipelines-pace"), paceOf(page));
  const make = ({ stages, micro_batches: micro }) => {
    const said = micro != null ? `${micro} micro-batches a step` : "";
    return element("div", { class: "pipe" }, ...stages.map(stageOf), element("span", { class: "micro" }, said));
  };
  keyed(
    $("pipelines-rows"),
    page.pipelines,
    (line) => JSON.stringify(line),
    make,
    () => {},
  );
}

// Each member a bar over all layers, with a block where it keeps them: gaps and single copies are seen at once.
function showKept({ kept }) {
  $("kept").hidden = !kept;
  if (!kept) return;
  say($("kept-said"), kept.said);
  set($("kept-said"), "class", kept.keepers > 1 ? "note" : "note warn");
  const more = kept.rows.length - KEEPERS;
  const said = more > 0 ? `and ${count(more)} more` : "";
  const track = () => element("div", { class: "layers", role: "img" });
  showRows($("kept-rows"), kept.rows.slice(0, KEEPERS), said, track, (bar, last, { ranges }) => {
    const text = ranges.map(([a, b]) => (a === b ? a : `${a} to ${b}`)).join(", ");
    say(last, text);
    set(bar, "aria-label", `keeps ${layersOf(text)}`);
    keyed(
      bar,
      ranges,
      ([a]) => String(a),
      () => element("i"),
      (block, [a, b]) => {
        block.style.left = `${(100 * a) / kept.layers}%`;
        block.style.width = `${(100 * (b - a + 1)) / kept.layers}%`;
      },
    );
  });
}

// --- nodes ---

const isOut = (node) => node.state === "failed" || node.state === "left";
const told = (field, text) => (node) => (node[field] == null ? "–" : text(node[field]));
const ofMember = (field, text) => (node) => (node.state === "active" ? told(field, text)(node) : "–");
const percent = (v) => `${Math.round(v)} %`;

// [title, is it a number?, text of a node]
const COLUMNS = [
  ["node", false, (node) => node.id],
  ["state", false, stateOf],
  ["step", true, ofMember("step", count)],
  ["samples/s", true, ofMember("samples_per_s", count)],
  ["waited for the sum", true, ofMember("sync_s", seconds)],
  ["CPU", true, told("cpu_pct", percent)],
  ["memory", true, told("memory_bytes", size)],
  ["sent", true, told("sent_bytes", size)],
  ["received", true, told("received_bytes", size)],
  ["battery", true, told("battery_pct", percent)],
  ["links", true, (node) => count(node.neighbors.length)],
  ["since step", true, (node) => count(node.joined_step)],
  ["address", false, (node) => node.addresses.join(", ") || "dials only"],
];

function stateOf(node) {
  if (node.late) return "waited for";
  if (node.scheduler) return "scheduler";
  return { active: "member", standby: "joining", failed: "lost" }[node.state] ?? node.state;
}

function showTable(page, fades) {
  const battery = page.nodes.some((node) => node.battery_pct != null);
  const columns = COLUMNS.filter(([title]) => title !== "battery" || battery);
  showTitles(columns);
  const rows = page.nodes.filter((node) => !isOut(node) || $("gone").checked || fades(node.id));
  const make = () => {
    const cells = columns.map(([title, number]) => {
      const cell = element("td", { class: number ? "n" : "" });
      if (title === "state") cell.append(element("span"));
      return cell;
    });
    return element("tr", {}, ...cells);
  };
  keyed(
    $("rows"),
    rows,
    (node) => node.id,
    make,
    (row, node) => {
      set(row, "class", isOut(node) ? "out" : "");
      columns.forEach(([, , text], i) => say(row.children[i].firstElementChild ?? row.children[i], text(node)));
      set(row.querySelector("span"), "class", `state ${node.scheduler ? "scheduler" : node.state}`);
    },
  );
  const when = page.told_s ? `, ${clock(page.told_s)}` : "";
  say($("told"), page.source ? "" : `Told by ${page.head.told_by}${when}.`);
}

function showTitles(columns) {
  const text = columns.map(([title]) => title).join();
  if ($("heads").dataset.text === text) return;
  $("heads").dataset.text = text;
  const cells = columns.map(([title, number]) => element("th", { scope: "col", class: number ? "n" : "" }, title));
  $("heads").replaceChildren(...cells);
  $("rows").replaceChildren();
}
