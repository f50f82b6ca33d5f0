// Hears of the cluster from this page's server, and draws it. If the server goes, looks for another one.
import { Chart } from "./chart.js";
import { allowed, showActions } from "./actions.js";
import { Graph } from "./graph.js";
import { clock, count, element, keyed, seconds, set, short, size, value } from "./words.js";

const $ = (id) => document.getElementById(id);
const BARS = 12; // Nodes whose time is drawn; those that the others wait for come first.
const KEEPERS = 24; // Members of whom it is drawn what they keep.
const POINTS = 6000;
const EVENTS = 120;
const GOOD = ["joined", "link-up", "waited for", "replication"];
const BAD = ["node-failure", "expelled", "link-failure", "unreachable", "declared dead", "waits for"];
const JOIN = ["scale-out"];

const graph = new Graph($("graph"), $("details"), $("trees"), $("legend"));
const chart = new Chart($("chart"), $("reading"));
const past = { step: [], time_s: [], seconds: [], samples: [], metrics: {} };
const SILENCE_MS = 15000; // The server tells something every few seconds: after that it is gone, or the network is.
let stream = null,
  page = null,
  events = [],
  chosen = "",
  heardAt = null,
  triedAt = 0,
  lostAt = null,
  moved = false;

// --- the server ---

function connect() {
  stream?.close();
  const mine = (stream = new EventSource("events"));
  stream.onmessage = (message) => {
    heardAt = Date.now();
    lostAt = null;
    take(JSON.parse(message.data));
  };
  stream.onerror = () => {
    lostAt ??= Date.now();
    showLive();
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => stream === mine && connect(), 2000);
    if (Date.now() - lostAt > 1500) move();
  };
}

// The server is gone: is there a member of this cluster that serves the page, too?
async function move() {
  if (moved || !page?.head || page.source) return;
  for (const node of page.nodes) {
    if (!node.page || node.state !== "active" || node.page === location.origin) continue;
    try {
      const answer = await fetch(`${node.page}/health`, { cache: "no-store", signal: AbortSignal.timeout(2500) });
      if ((await answer.text()).trim() !== `chaosnet ${page.head.cluster}` || lostAt == null) continue;
      moved = true;
      location.replace(node.page);
      return;
    } catch {
      /* Not there, or not for us: the next. */
    }
  }
  showNotices();
}

function take(news) {
  if (news.anew) for (const name of ["step", "time_s", "seconds", "samples"]) past[name] = [];
  if (news.anew) {
    past.metrics = {};
    events = [];
  }
  if (news.curves) append(news.curves);
  if (news.events) events = news.events;
  page = news;
  showLive();
  showNotices();
  if (!page.head) return;
  $("main").hidden = false;
  const began = performance.now();
  showHead();
  showSplit();
  showJoins();
  showPipelines();
  showKept();
  showTable();
  showActions(page);
  set(
    $("rights"),
    "text",
    allowed(page)
      ? "This page can change the cluster."
      : page.may_act
        ? "Read-only: the token is missing in the address."
        : "Read-only.",
  );
  graph.draw(page);
  if (news.events || news.anew) showEvents();
  showCurves();
  globalThis.chaosnetDrawMs = performance.now() - began; // For tests.
}

function append(curves) {
  for (const name of Object.keys(curves.metrics)) past.metrics[name] ??= past.step.map(() => null);
  for (const name of ["step", "time_s", "seconds", "samples"]) past[name].push(...curves[name]);
  for (const [name, column] of Object.entries(past.metrics))
    column.push(...(curves.metrics[name] ?? curves.step.map(() => null)));
  if (past.step.length <= POINTS) return;
  const newest = past.step.length - POINTS / 4; // Of what is older, every other step: a long run keeps its beginning.
  const thinned = (column) => column.filter((_, i) => i >= newest || i % 2 === 0);
  for (const name of ["step", "time_s", "seconds", "samples"]) past[name] = thinned(past[name]);
  for (const name of Object.keys(past.metrics)) past.metrics[name] = thinned(past.metrics[name]);
}

// --- headline ---

function showLive() {
  const live = $("live"),
    silent = page?.silent_for_s;
  const [kind, text] =
    lostAt != null
      ? ["bad", `page's server gone since ${clock(lostAt / 1000)}`]
      : silent != null
        ? ["bad", `no answer for ${seconds(silent + sinceHeard())}`]
        : page?.source
          ? ["", `as of ${clock(page.told_s)}`]
          : page?.head
            ? ["good", "live"]
            : ["", "connecting"];
  set(live, "class", `live ${kind}`);
  set(live.lastElementChild, "text", text);
}

function showNotices() {
  const found = [],
    head = page?.head;
  const survivor = page?.nodes?.find((node) => node.state === "active" && node.addresses.length && !sameHost(node));
  if (lostAt != null && page?.source)
    found.push(["bad", `The process that served this page does not answer since ${clock(lostAt / 1000)}.`, ""]);
  else if (lostAt != null)
    found.push([
      "bad",
      `The process that served this page does not answer since ${clock(lostAt / 1000)}; it is asked again and again. The cluster may well go on: look at it with `,
      survivor || head ? `chaosnet dashboard ${survivor?.addresses[0] ?? "ADDRESS"}` : "",
    ]);
  else if (page?.silent_for_s != null)
    found.push([
      "bad",
      `${page.told_s ? "What is shown is from " + clock(page.told_s) + ". " : ""}The cluster does not answer since ${clock(heardAt / 1000 - page.silent_for_s)}; it is asked again and again. ${page.trouble}`,
    ]);
  if (page?.source) found.push(["", `A finished run, from ${page.source}: nothing here is live.`]);
  if (head?.parked) found.push(["bad", `Training waits: ${head.parked}`]);
  if (head?.waiting)
    found.push([
      "",
      `The step waits for ${head.waiting.whom.join(", ")}, ${seconds(head.waiting.seconds)} so far: ${head.waiting.why}.`,
    ]);
  if (head && Object.keys(head.strangers).length)
    found.push([
      "",
      `Strangers refused: ${Object.entries(head.strangers)
        .map(([why, n]) => `${count(n)} ${why}`)
        .join(", ")}.`,
    ]);
  if (head?.cut) found.push(["", `Too much for one message: ${count(head.cut)} rows are missing here.`]);
  keyed(
    $("notices"),
    found,
    ([kind, text]) => kind + text.slice(0, 24),
    () => element("p"),
    (shown, [kind, text, code]) => {
      set(shown, "class", `notice ${kind}`);
      if (shown.dataset.text !== text + code) {
        shown.dataset.text = text + code;
        shown.replaceChildren(text, code ? element("code", {}, code) : "");
      }
    },
  );
}

const sinceHeard = () => (Date.now() - heardAt) / 1000;
const sameHost = (node) => node.page && node.page === location.origin;

function showHead() {
  const { head } = page,
    { counts } = head,
    main = mainMetric();
  const others = Object.entries(head.metrics)
    .filter(([name]) => name !== main)
    .slice(0, 2);
  set($("cluster"), "text", head.cluster ? `cluster ${head.cluster.slice(0, 12)}` : "");
  document.title = `step ${count(head.step)} · chaosnet`;
  const gone = counts.failed + counts.left;
  const tiles = [
    ["Step", count(head.step), "", head.view ? `view ${head.view}` : ""],
    main && [
      main,
      value(head.metrics[main]),
      "",
      others.map(([name, v]) => `${name} ${value(v)}`).join(", ") || "mean over the cluster",
    ],
    [
      "Samples",
      count(head.samples_per_s),
      "/s",
      [head.dropped && `${count(head.dropped)} dropped`, head.set_aside && `${count(head.set_aside)} set aside`]
        .filter(Boolean)
        .join(", ") || "all members together",
    ],
    [
      "Step time",
      ...split(seconds(head.step_s)),
      page.split ? `${seconds(page.split.sum_s)} of it the sum` : "median of the last 21",
    ],
    [
      "Members",
      count(counts.active),
      counts.standby ? `+ ${counts.standby} joining` : "",
      gone ? `${count(gone)} gone` : "nobody lost",
    ],
    ["Scheduler", head.scheduler ? short(head.scheduler, 16) : "being elected", "", `term ${head.term}`],
    head.checkpoint && [
      "Checkpoint",
      head.checkpoint.step ? count(head.checkpoint.step) : "none yet",
      "",
      head.checkpoint.writing.length
        ? `${head.checkpoint.writing.slice(0, 3).join(", ")}${head.checkpoint.writing.length > 3 ? ", …" : ""} write${head.checkpoint.writing.length > 1 ? "" : "s"} one now`
        : head.checkpoint.step
          ? `the newest, at ${clock(head.checkpoint.time_s)}`
          : "the first is to come",
    ],
    page.kept
      ? [
          "State",
          count(page.kept.keepers),
          page.kept.keepers === 1 ? "copy" : "copies",
          page.kept.keepers === 1 ? "of some layers" : "of each layer, or more",
        ]
      : ["State", ...split(size(head.state_bytes)), "what a joiner pulls"],
  ].filter(Boolean);
  keyed(
    $("tiles"),
    tiles,
    ([name]) => name,
    ([name]) =>
      element(
        "dl",
        { class: "tile" },
        element("dt", {}, name),
        element("dd", {}, element("span"), element("small")),
        element("p"),
      ),
    (tile, [, big, small, more]) => {
      const [, dd, p] = tile.children;
      set(dd.firstChild, "text", big);
      set(dd.lastChild, "text", small);
      set(dd, "title", `${big} ${small}`);
      set(p, "text", more);
    },
  );
}

const split = (text) => (text.includes(" ") && !text.includes("min") ? text.split(" ") : [text, ""]);

function mainMetric() {
  const names = Object.keys(page.head.metrics).sort();
  return names.includes("loss") ? "loss" : names[0];
}

// --- where time goes ---

function showSplit() {
  const found = page.split;
  $("split").hidden = !found;
  if (!found) return;
  const most = Math.max(found.step_s, 1e-9),
    more = found.rows.length - BARS,
    waiting = page.head.waiting;
  set($("split-note"), "text", `${seconds(found.step_s)} a step`);
  set(
    $("split-said"),
    "text",
    waiting
      ? `All wait for ${waiting.whom.join(", ")} now.`
      : found.slowest
        ? `${found.slowest} comes last: the others wait ${seconds(found.costs_s)} of each step for it.`
        : found.rows.length > 1
          ? "No node keeps the others waiting."
          : "One node: nobody to wait for.",
  );
  const rows = found.rows.slice(0, BARS);
  keyed(
    $("split-rows"),
    more > 0 ? [...rows, null] : rows,
    (row) => row?.node ?? "",
    (row) =>
      row
        ? element(
            "div",
            { class: "row" },
            element("span"),
            element(
              "div",
              { class: "stack", role: "img" },
              element("i", { class: "own" }),
              element("i", { class: "sum" }),
              element("i", { class: "wait" }),
            ),
            element("span"),
          )
        : element("p", { class: "note" }),
    (shown, row) => {
      if (!row) {
        set(shown, "text", `and ${count(more)} more, which do their part sooner`);
        return;
      }
      const [name, stack, last] = shown.children;
      set(name, "text", row.node);
      set(name, "title", row.node);
      set(last, "text", seconds(row.own_s));
      set(
        stack,
        "aria-label",
        `own work ${seconds(row.own_s)}, the sum ${seconds(row.sum_s)}, waiting ${seconds(row.wait_s)}`,
      );
      [row.own_s, row.sum_s, row.wait_s].forEach((s, i) => {
        stack.children[i].style.width = `${Math.min((100 * s) / most, 100).toFixed(1)}%`;
      });
    },
  );
}

// --- joins ---

function showJoins() {
  const joins = page.nodes.filter((node) => node.state === "standby" || node.pull);
  $("joins").hidden = !joins.length;
  keyed(
    $("joins-rows"),
    joins.slice(0, 8),
    (node) => node.id,
    () => element("div", { class: "join" }, element("b"), element("div", { class: "stack" }), element("p")),
    (shown, node) => {
      const [name, stack, text] = shown.children,
        { pull } = node;
      set(name, "text", node.id);
      stack.hidden = !pull;
      if (!pull) {
        set(text, "text", "has asked to be let in");
        return;
      }
      const sources = Object.entries(pull.sources)
        .filter(([, told]) => told.bytes)
        .sort((a, b) => b[1].bytes - a[1].bytes);
      keyed(
        stack,
        sources,
        ([from]) => from,
        () => element("i", { class: "pulled" }),
        (part, [from, told]) => {
          part.style.width = `${(100 * told.bytes) / pull.bytes}%`;
          set(part, "title", from);
        },
      );
      set(
        text,
        "text",
        `${size(pull.here)} of ${size(pull.bytes)}${pull.left_s != null ? `, ${seconds(pull.left_s)} left` : ""}${sources.length ? "; from " : ""}${sources
          .slice(0, 5)
          .map(([from, told]) => `${from} ${size(told.bytes)}${told.rate ? ` at ${size(told.rate)}/s` : ""}`)
          .join(", ")}`,
      );
    },
  );
}

// --- events ---

function kindOf(kind) {
  return BAD.includes(kind) ? "bad" : GOOD.includes(kind) ? "good" : JOIN.includes(kind) ? "join" : "";
}

function showEvents() {
  set(
    $("story-note"),
    "text",
    events.length > EVENTS ? `the last ${EVENTS} of ${count(events.length)}` : `${count(events.length)}`,
  );
  keyed(
    $("events"),
    events.slice(-EVENTS).reverse(),
    (event) => `${event.time_s} ${event.kind} ${event.node} ${event.detail}`,
    (event) =>
      element(
        "li",
        { class: kindOf(event.kind) },
        element("span", { class: "mark" }),
        element("span", {}, event.text),
        element("time", {}, `${clock(event.time_s)} · step ${count(event.step)}`),
      ),
    () => {},
  );
}

// --- curves ---

function showCurves() {
  const names = [...Object.keys(past.metrics).sort(), "step time", "samples a step"];
  if (!names.includes(chosen)) chosen = Object.keys(past.metrics).includes(mainMetric()) ? mainMetric() : names[0];
  if ($("names").dataset.names !== names.join("\n")) {
    $("names").dataset.names = names.join("\n");
    $("names").replaceChildren(
      ...names.map((name) => {
        const button = element("button", { type: "button" }, name);
        button.addEventListener("click", () => {
          chosen = name;
          showCurves();
        });
        return button;
      }),
    );
  }
  for (const button of $("names").children) set(button, "aria-pressed", button.textContent === chosen);
  set($("curve-title"), "text", `${chosen} over steps`);
  const values =
    chosen === "step time" ? past.seconds : chosen === "samples a step" ? past.samples : past.metrics[chosen];
  const marks = events
    .filter((event) => ["joined", "node-failure", "expelled", "declared dead", "left"].includes(event.kind))
    .slice(-60)
    .map((event) => ({ step: event.step, kind: kindOf(event.kind) || "bad" }));
  chart.show(
    past.step,
    values,
    past.time_s,
    marks,
    chosen === "step time" ? seconds : chosen === "samples a step" ? count : value,
  );
}

// --- pipelines ---

function showPipelines() {
  const {
    predicted_s: predicted,
    micro_batches_per_s: micro,
    head: { step_s: took },
  } = page;
  $("pipelines").hidden = !page.pipelines.length;
  set(
    $("pipelines-pace"),
    "text",
    [
      predicted &&
        `${seconds(predicted)} a step predicted${took ? `, ${seconds(took)} taken (${(took / predicted).toFixed(2)} times)` : ""}`,
      micro && `${count(micro)} micro-batches/s`,
    ]
      .filter(Boolean)
      .join(" · ") || "who computes which layers",
  );
  keyed(
    $("pipelines-rows"),
    page.pipelines,
    (line) => JSON.stringify(line),
    (line) =>
      element(
        "div",
        { class: "pipe" },
        ...line.stages.map((stage) =>
          element(
            "div",
            { class: `stage${stage.gone ? " gone" : ""}` },
            element("b", {}, stage.node),
            element(
              "span",
              {},
              stage.gone
                ? "gone"
                : stage.first === stage.last
                  ? `layer ${stage.first}`
                  : `layers ${stage.first} to ${stage.last}`,
            ),
          ),
        ),
        element(
          "span",
          { class: "micro" },
          line.micro_batches != null ? `${line.micro_batches} micro-batches a step` : "",
        ),
      ),
    () => {},
  );
}

// Each member a bar over all layers, with a block where it keeps them: gaps and single copies are seen at once.
function showKept() {
  const { kept } = page;
  $("kept").hidden = !kept;
  if (!kept) return;
  set($("kept-said"), "text", kept.said);
  set($("kept-said"), "class", kept.keepers > 1 ? "note" : "note warn");
  const rows = kept.rows.slice(0, KEEPERS),
    more = kept.rows.length - rows.length;
  keyed(
    $("kept-rows"),
    more > 0 ? [...rows, null] : rows,
    (row) => row?.node ?? "",
    (row) =>
      row
        ? element(
            "div",
            { class: "row" },
            element("span"),
            element("div", { class: "layers", role: "img" }),
            element("span"),
          )
        : element("p", { class: "note" }),
    (shown, row) => {
      if (!row) {
        set(shown, "text", `and ${count(more)} more`);
        return;
      }
      const [name, track, last] = shown.children,
        text = row.ranges.map(([a, b]) => (a === b ? a : `${a} to ${b}`)).join(", ");
      set(name, "text", row.node);
      set(name, "title", row.node);
      set(last, "text", text);
      set(track, "aria-label", `keeps layers ${text}`);
      keyed(
        track,
        row.ranges,
        ([a]) => String(a),
        () => element("i"),
        (block, [a, b]) => {
          block.style.left = `${(100 * a) / kept.layers}%`;
          block.style.width = `${(100 * (b - a + 1)) / kept.layers}%`;
        },
      );
    },
  );
}

// --- nodes ---

const COLUMNS = [
  ["node", 0, (n) => n.id],
  ["state", 0, null],
  ["step", 1, (n) => (n.step != null && n.state === "active" ? count(n.step) : "–")],
  ["samples/s", 1, (n) => (n.samples_per_s != null && n.state === "active" ? count(n.samples_per_s) : "–")],
  ["waited for the sum", 1, (n) => (n.sync_s != null && n.state === "active" ? seconds(n.sync_s) : "–")],
  ["CPU", 1, (n) => (n.cpu_pct != null ? `${Math.round(n.cpu_pct)} %` : "–")],
  ["memory", 1, (n) => (n.memory_bytes ? size(n.memory_bytes) : "–")],
  ["sent", 1, (n) => (n.sent_bytes != null ? size(n.sent_bytes) : "–")],
  ["received", 1, (n) => (n.received_bytes != null ? size(n.received_bytes) : "–")],
  ["battery", 1, (n) => (n.battery_pct != null ? `${Math.round(n.battery_pct)} %` : "–")],
  ["links", 1, (n) => count(n.neighbors.length)],
  ["since step", 1, (n) => count(n.joined_step)],
  ["address", 0, (n) => n.addresses.join(", ") || "dials only"],
];

function showTable() {
  const battery = page.nodes.some((node) => node.battery_pct != null),
    columns = COLUMNS.filter(([name]) => name !== "battery" || battery);
  const text = columns.map(([name]) => name).join();
  if ($("heads").dataset.text !== text) {
    $("heads").dataset.text = text;
    $("heads").replaceChildren(
      ...columns.map(([name, number]) => element("th", { scope: "col", class: number ? "n" : "" }, name)),
    );
    $("rows").replaceChildren();
  }
  const out = (node) => node.state === "failed" || node.state === "left";
  const recent = page.nodes.filter((node) => !out(node) || $("gone").checked || graph.fades(node.id));
  keyed(
    $("rows"),
    recent,
    (node) => node.id,
    () => element("tr", {}, ...columns.map(([, number]) => element("td", { class: number ? "n" : "" }))),
    (row, node) => {
      set(row, "class", out(node) ? "out" : "");
      columns.forEach(([, , tell], i) => {
        if (tell) {
          set(row.children[i], "text", tell(node));
          return;
        }
        if (!row.children[i].firstChild) row.children[i].append(element("span"));
        const state = node.scheduler ? "scheduler" : node.state;
        set(row.children[i].firstChild, "class", `state ${state}`);
        set(
          row.children[i].firstChild,
          "text",
          node.late ? "waited for" : ({ active: "member", standby: "joining", failed: "lost" }[state] ?? state),
        );
      });
    },
  );
  set(
    $("told"),
    "text",
    page.source ? "" : `Told by ${page.head.told_by}${page.told_s ? `, ${clock(page.told_s)}` : ""}.`,
  );
}

$("gone").addEventListener("change", () => page?.head && showTable());
setInterval(() => {
  if (heardAt != null && !page.source && Date.now() - Math.max(heardAt, triedAt) > SILENCE_MS) {
    lostAt ??= heardAt;
    triedAt = Date.now();
    move().then(() => moved || connect());
  }
  if (lostAt != null || page?.silent_for_s != null) {
    showLive();
    showNotices();
  }
}, 1000);
connect();
