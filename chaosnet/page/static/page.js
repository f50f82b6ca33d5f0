// Hears of the cluster from this page's server, and has it drawn. If the server goes, looks for another one.
import { allowed, showActions } from "./actions.js";
import { append, forget, showCurves } from "./curves.js";
import { Graph } from "./graph.js";
import { showEvents, showPanels } from "./panels.js";
import { $, clock, count, element, keyed, lasting, say, set, some } from "./words.js";

const SILENCE = 15; // The server tells something every few seconds: after so many it is gone, or the network is.
const RECONNECT_MS = 2000;
const MOVE_AFTER_MS = 1500;
const HEALTH_MS = 2500; // Another member's page answers within that.

const graph = new Graph($("graph"), $("details"), $("trees"), $("legend"));
let stream = null;
let page = null; // The newest of all that the server tells each time.
let events = [];
let heardAt = null;
let lostAt = null; // Since when the server is gone; null: it is not.
let quiet = 0; // Seconds without news, by ticks: none pass while this machine sleeps.
let moved = false;

// --- the server ---

function connect() {
  stream?.close();
  const mine = new EventSource("events");
  stream = mine;
  stream.onmessage = (message) => {
    heardAt = Date.now();
    lostAt = null;
    quiet = 0;
    take(JSON.parse(message.data));
  };
  stream.onerror = () => {
    lostAt ??= Date.now();
    showLive();
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => stream === mine && connect(), RECONNECT_MS);
    if (Date.now() - lostAt > MOVE_AFTER_MS) move();
  };
}

// The server is gone: is there a member of this cluster that serves the page, too?
async function move() {
  if (moved || !page?.head || page.source) return;
  for (const node of page.nodes) {
    if (!node.page || node.state !== "active" || node.page === location.origin) continue;
    try {
      const answer = await fetch(`${node.page}/health`, {
        cache: "no-store",
        signal: AbortSignal.timeout(HEALTH_MS),
      });
      if ((await answer.text()).trim() !== `chaosnet ${page.head.cluster}` || lostAt == null) continue;
      moved = true;
      location.replace(node.page);
      return;
    } catch {
      // Not there, or not for us: the next.
    }
  }
  showNotices();
}

function take(news) {
  if (news.anew) {
    forget();
    events = [];
  }
  if (news.curves) append(news.curves);
  if (news.events) events = news.events;
  page = news;
  showLive();
  showNotices();
  if (page.head) draw(Boolean(news.events || news.anew));
}

function draw(eventsToo) {
  const began = performance.now();
  $("main").hidden = false;
  document.title = `step ${count(page.head.step)} · chaosnet`;
  say($("cluster"), page.head.cluster ? `cluster ${page.head.cluster.slice(0, 12)}` : "");
  showPanels(page, (name) => graph.fades(name));
  showActions(page);
  showRights();
  graph.draw(page);
  if (eventsToo) showEvents(events);
  showCurves(page.head, events);
  globalThis.chaosnetDrawMs = performance.now() - began; // For tests.
}

function showRights() {
  const readOnly = page.may_act ? "Read-only: the token is missing in the address." : "Read-only.";
  say($("rights"), allowed(page) ? "This page can change the cluster." : readOnly);
}

// --- is it live, and what is wrong? ---

const silentFor = () => page.silent_for_s + (Date.now() - heardAt) / 1000;

function liveness() {
  if (lostAt != null) return ["bad", `page's server gone since ${clock(lostAt / 1000)}`];
  if (page?.silent_for_s != null) return ["bad", `no answer for ${lasting(silentFor())}`];
  if (page?.source) return ["", `as of ${clock(page.told_s)}`];
  return page?.head ? ["good", "live"] : ["", "connecting"];
}

function showLive() {
  const [kind, text] = liveness();
  set($("live"), "class", `live ${kind}`);
  say($("live").lastElementChild, text);
}

// [kind, text, what to type] of what has become of those who are asked.
function silence() {
  if (lostAt != null) {
    const gone = `The process that served this page has not answered since ${clock(lostAt / 1000)}`;
    if (page?.source) return ["bad", `${gone}.`];
    const survivor = page?.nodes?.find(
      (node) => node.state === "active" && node.addresses.length && node.page !== location.origin,
    );
    const look = `chaosnet dashboard ${survivor?.addresses[0] ?? "ADDRESS"}`;
    return ["bad", `${gone}; it is asked again and again. The cluster may well go on: look at it with `, look];
  }
  if (page?.silent_for_s == null) return null;
  const from = page.told_s ? `What is shown is from ${clock(page.told_s)}. ` : "";
  const since = clock(Date.now() / 1000 - silentFor());
  return ["bad", `${from}The cluster has not answered since ${since}; it is asked again and again. ${page.trouble}`];
}

// [kind, text] of what the cluster tells of itself.
function troubles({ parked, waiting, strangers, cut }) {
  const found = [];
  if (parked) found.push(["bad", `Training waits: ${parked}`]);
  if (waiting) {
    const soFar = `${lasting(waiting.seconds)} so far: ${waiting.why}`;
    found.push(["", `The step waits for ${some(waiting.whom)}, ${soFar}.`]);
  }
  const refused = Object.entries(strangers).map(([why, times]) => `${count(times)} ${why}`);
  if (refused.length) found.push(["", `Strangers refused: ${refused.join(", ")}.`]);
  if (cut) found.push(["", `Too much for one message: ${count(cut)} rows are missing here.`]);
  return found;
}

function showNotices() {
  const finished = page?.source && ["", `A finished run, from ${page.source}: nothing here is live.`];
  const found = [silence(), finished, ...(page?.head ? troubles(page.head) : [])].filter(Boolean);
  const update = (shown, [kind, text, typed = ""]) => {
    set(shown, "class", `notice ${kind}`);
    if (shown.dataset.text === text + typed) return;
    shown.dataset.text = text + typed;
    shown.replaceChildren(text, typed && element("code", {}, typed));
  };
  keyed(
    $("notices"),
    found,
    ([kind, text]) => kind + text.slice(0, 24),
    () => element("p"),
    update,
  );
}

$("gone").addEventListener("change", () => page?.head && draw(false));
setInterval(() => {
  if (heardAt != null && !page.source) quiet += 1;
  if (quiet > SILENCE) {
    quiet = 0;
    lostAt ??= heardAt;
    move().then(() => moved || connect());
  }
  if (lostAt != null || page?.silent_for_s != null) {
    showLive();
    showNotices();
  }
}, 1000);
connect();
