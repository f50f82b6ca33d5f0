// What may be changed from the page, if its address has the token that `chaosnet dashboard --allow-actions` prints.
import { element, keyed, set } from "./words.js";

const $ = (id) => document.getElementById(id);
const token = new URLSearchParams(location.hash.slice(1)).get("token"); // What is after "#" is sent to nobody.
let busy = false;

export const allowed = (page) => Boolean(page.may_act && token);

export function showActions(page) {
  $("change").hidden = !allowed(page);
  if ($("change").hidden) return;
  const names = page.nodes.filter((node) => node.state === "active").map((node) => node.id);
  for (const select of document.querySelectorAll("#change select"))
    keyed(
      select,
      names,
      (name) => name,
      (name) => element("option", { value: name }, name),
      () => {},
    );
  const { a, b } = $("linking").elements;
  if (a.value === b.value && names.length > 1 && !b.dataset.chosen) b.selectedIndex = 1;
}

// One after the other: what it does to the cluster is seen before the next.
async function act(action, question, told) {
  if (busy || (question && !confirm(question))) return;
  busy = true;
  enable();
  tell("asking the cluster …", true);
  try {
    const answer = await fetch("actions", {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
      body: JSON.stringify(action),
    });
    const said = await answer.text();
    const { ok, text } = said.startsWith("{")
      ? JSON.parse(said)
      : { ok: false, text: `It could not be asked: HTTP ${answer.status} ${said}` };
    tell(ok ? told(text) : text, ok);
  } catch (error) {
    tell(`The process that serves this page does not answer: ${error.message}`, false);
  }
  busy = false;
  enable();
}

function enable() {
  for (const button of document.querySelectorAll("#change button")) button.disabled = busy;
}

function tell(text, ok) {
  set($("answer"), "class", ok ? "said" : "said bad");
  $("answer").replaceChildren(text);
}

$("linking").elements.b.addEventListener("change", (event) => {
  event.target.dataset.chosen = "yes";
});
const plain = (text) => text;
$("leaving").addEventListener("submit", (event) => {
  event.preventDefault();
  const node = event.target.elements.node.value;
  act({ type: "leave", node }, `Have ${node} leave? It finishes its step; the others go on.`, plain);
});
$("linking").addEventListener("submit", (event) => {
  event.preventDefault();
  const { a, b } = event.target.elements;
  const connect = event.submitter?.value !== "close";
  act(
    { type: "link", a: a.value, b: b.value, connect },
    connect ? "" : `Close the link ${a.value} - ${b.value}?`,
    plain,
  );
});
$("inviting").addEventListener("submit", (event) => {
  event.preventDefault();
  act({ type: "invite" }, "", (text) => element("code", {}, text));
});
