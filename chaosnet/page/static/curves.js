// What is remembered of the steps, and the curve of it that is chosen.
import { Chart } from "./chart.js";
import { kindOf, mainMetric } from "./panels.js";
import { $, count, element, say, seconds, set, value } from "./words.js";

const POINTS = 6000;
const MARKS = 60;
const MARKED = ["joined", "node-failure", "expelled", "declared dead", "left"];
const STEP_TIME = "step time";
const SAMPLES = "samples a step";

const chart = new Chart($("chart"), $("reading"));
let past; // By columns, as the server tells it (model.py); metrics by name.
let chosen = "";
let again = () => {}; // Draws once more.

export function forget() {
  past = { step: [], time_s: [], seconds: [], samples: [], metrics: new Map() };
}
forget();

export function append(told) {
  const before = past.step.length;
  for (const name of ["step", "time_s", "seconds", "samples"]) past[name].push(...told[name]);
  const metrics = new Map(Object.entries(told.metrics));
  for (const name of metrics.keys()) {
    if (!past.metrics.has(name)) past.metrics.set(name, Array(before).fill(false));
  }
  for (const [name, column] of past.metrics) column.push(...(metrics.get(name) ?? told.step.map(() => false)));
  if (past.step.length > POINTS) thinOut();
}

// Of what is older, half at most, evenly over the steps (as picture.py): a run of weeks keeps its curve.
function thinOut() {
  const newest = past.step.length - POINTS / 4;
  const apart = (2 * (past.step[newest - 1] - past.step[0])) / newest;
  let last = -Infinity;
  const kept = past.step.map((step, i) => {
    if (i < newest && step - last < apart) return false;
    last = step;
    return true;
  });
  const thinned = (column) => column.filter((_, i) => kept[i]);
  for (const name of ["step", "time_s", "seconds", "samples"]) past[name] = thinned(past[name]);
  for (const [name, column] of past.metrics) past.metrics.set(name, thinned(column));
}

// `head`: of the page, which names the metrics of the last step.
export function showCurves(head, events) {
  again = () => showCurves(head, events);
  const metrics = [...past.metrics.keys()].sort();
  const names = [...metrics, STEP_TIME, SAMPLES];
  const main = mainMetric(head);
  if (!names.includes(chosen)) chosen = metrics.includes(main) ? main : names[0];
  showChoice(names);
  say($("curve-title"), `${chosen} over steps`);
  const [column, unit] = chosenColumn();
  const told = (each) => each.filter((_, i) => column[i] !== false);
  const marks = events
    .filter((event) => MARKED.includes(event.kind))
    .slice(-MARKS)
    .map((event) => ({ step: event.step, kind: kindOf(event.kind), text: event.text }));
  chart.show(told(past.step), told(column), told(past.time_s), marks, unit);
}

// With `false` where a step has no such value.
function chosenColumn() {
  if (chosen === STEP_TIME) return [past.seconds.map((s) => s ?? false), seconds];
  return chosen === SAMPLES ? [past.samples, count] : [past.metrics.get(chosen), value];
}

function showChoice(names) {
  const text = names.join("\n");
  if ($("names").dataset.names !== text) {
    $("names").dataset.names = text;
    const buttons = names.map((name) => {
      const button = element("button", { type: "button" }, name);
      button.addEventListener("click", () => {
        chosen = name;
        again();
      });
      return button;
    });
    $("names").replaceChildren(...buttons);
  }
  for (const button of $("names").children) set(button, "aria-pressed", button.textContent === chosen);
}
