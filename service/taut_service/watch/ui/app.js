import { bound, course, element, interval, inUnits, percent, table } from "./draw.js";
import { answers } from "./tokens.js";

const EVERY_MS = 2000;
const find = (id) => document.getElementById(id);
let key = "";
let asked = null;
let state = null;

async function call(method, path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  if (answer.status === 401 || answer.status === 403) find("key-form").hidden = false;
  if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `status ${answer.status}`);
  return answer;
}

const ask = async (method, path, body) => (await call(method, path, body)).json();

// Calls tell with every event of a stream.
async function follow(path, body, signal, tell) {
  const answer = await call("POST", path, body, signal);
  let rest = "";
  for await (const text of answer.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) tell(JSON.parse(event.slice("data: ".length)));
  }
}

function say(text, bad = false) {
  const message = find("message");
  if (message.textContent !== text) message.textContent = text;
  message.className = bad ? "bad" : "";
}

async function refresh() {
  try {
    state = await ask("GET", "/admin/state");
    find("key-form").hidden = true;
    showModels();
    if (state.guarded) await refreshRollouts();
    if (find("message").className === "bad") say("");
  } catch (error) {
    say(error.message, true);
  }
}

async function refreshRollouts() {
  const found = await ask("GET", "/admin/rollout");
  const all = found.rollouts.flatMap(({ model, evidence }) => evidence.map((of) => ({ model, of })));
  await Promise.all(all.map(async ({ model, of }) => {
    const asked = new URLSearchParams({ model, variant: of.variant });
    of.course = await ask("GET", `/admin/rollout/agreement?${asked}`);
  }));
  showRollouts(found);
}

// A median and what one in twenty exceeds.
function spread(of) {
  const text = (s) => (s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);
  return of === null ? "–" : `${text(of.p50)}, ${text(of.p95)}`;
}

function showLatencies() {
  const rows = [];
  for (const [model, told] of Object.entries(state.models)) {
    for (const [variant, { latency }] of Object.entries(told.variants)) {
      if (!latency.answers) continue;
      const spreads = [latency.first_token, latency.per_token, latency.whole].map(spread);
      rows.push([model, variant, ...spreads, String(latency.answers)]);
    }
  }
  const heads = ["Model", "Variant", "First token", "Between tokens", "Whole answer", "Answers"];
  const caption = "Latency of the newest answers: median, and what one in twenty exceeds";
  find("latencies").replaceChildren(...(rows.length ? [table(caption, heads, rows)] : []));
}

function showModels() {
  const draining = state.draining ? ", draining" : "";
  find("summary").textContent =
    `Generation ${state.generation}, ${state.live} requests under way${draining}`;
  const rows = [];
  for (const [model, told] of Object.entries(state.models)) {
    const whole = Object.values(told.variants).reduce((sum, v) => sum + v.weight, 0);
    for (const [variant, of] of Object.entries(told.variants)) {
      const share = whole ? percent(of.weight / whole) : "–";
      for (const worker of of.workers) {
        const kind = worker.state === "ready" && !worker.draining ? "good" : "bad";
        const text = worker.draining ? `${worker.state}, drained` : worker.state;
        const shown = element("span", { class: kind, title: worker.detail }, text);
        rows.push([model, variant, share, worker.name, shown, String(worker.outstanding)]);
      }
    }
  }
  const heads = ["Model", "Variant", "Share", "Worker", "State", "Requests"];
  find("models").replaceChildren(table("Every worker", heads, rows));
  showLatencies();
  choose();
}

function showRollouts(found) {
  find("rollouts-section").hidden = false;
  if (!found.journal_up) say("The journal of rollouts is lost: nothing is decided", true);
  const focused = document.activeElement?.id;
  find("rollouts").replaceChildren(...found.rollouts.map((rollout) => drawRollout(rollout, found)));
  if (focused) find(focused)?.focus();
}

function drawRollout(rollout, found) {
  const part = element("article", {}, element("h3", {}, rollout.model));
  const share = rollout.percent === null ? "" : ` at ${rollout.percent} %`;
  const what = rollout.candidate === null
    ? `No rollout. Baseline: ${rollout.baseline}.`
    : `${rollout.candidate} is ${rollout.phase.replace("_", " ")}${share}: ${rollout.why}.`;
  part.append(element("p", { class: rollout.phase === "rolled_back" ? "bad" : "" }, what));
  if (rollout.phase === "running" && rollout.next) {
    part.append(element("p", {}, `Waits: ${rollout.next}.`));
  }
  if (found.steps.length) part.append(buttons(rollout));
  for (const evidence of rollout.evidence) part.append(drawEvidence(evidence));
  return part;
}

function buttons(rollout) {
  const all = element("p");
  const add = (verb, path, body) => {
    const id = `${path}-${rollout.model}-${body.candidate ?? ""}`;
    const onclick = () => confirmed(`${verb}: ${rollout.model}?`, path, body);
    all.append(element("button", { id, type: "button", onclick }, verb));
  };
  const on = { model: rollout.model };
  if (rollout.phase === "running") add("Hold", "hold", on);
  if (["running", "held", "complete"].includes(rollout.phase)) add("Roll back", "rollback", on);
  if (rollout.phase === "held") add("Go on", "start", { ...on, candidate: rollout.candidate });
  if (["none", "rolled_back", "manual", "complete"].includes(rollout.phase)) {
    for (const { variant } of rollout.evidence) {
      add(`Start ${variant}`, "start", { ...on, candidate: variant });
    }
  }
  return all;
}

function confirmed(text, path, body) {
  const dialog = find("confirm");
  find("confirm-text").textContent = text;
  find("why").value = "";
  find("why").parentElement.querySelector("label[for=why]").hidden = path === "start";
  find("why").hidden = path === "start";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      const sent = path === "start" ? body : { ...body, why: find("why").value };
      const moved = await ask("POST", `/admin/rollout/${path}`, sent);
      await refresh();
      say(`${moved.model}: ${moved.candidate} is ${moved.phase} at ${moved.percent} %`);
    } catch (error) {
      say(error.message, true);
    }
  };
  dialog.returnValue = "no";
  dialog.showModal();
}

function drawEvidence(evidence) {
  const kind = { PASS: "good", FAIL: "bad" }[evidence.verdict] ?? "";
  const title = element("h4", {}, `${evidence.variant}: `,
    element("span", { class: kind }, evidence.verdict), ` – ${evidence.why}`);
  const part = element("div", {}, title);
  if (evidence.agreement !== null) part.append(...drawAgreement(evidence));
  const rows = Object.entries(evidence.measures).filter(([, told]) => told.bound !== null)
    .map(([name, told]) => [name, inUnits(told)])
    .map(([name, told]) => [
      name, interval(name, told),
      `${told.mean.toFixed(4)} in [${told.low.toFixed(4)}, ${told.high.toFixed(4)}]${told.unit}`,
      bound(told.bound) + told.unit, String(told.answers),
    ]);
  if (rows.length) {
    const heads = ["Measure", "", "Beyond the baseline's noise", "At most", "Answers"];
    part.append(table(`Measures of ${evidence.variant}`, heads, rows));
  }
  return part;
}

function drawAgreement(evidence) {
  const told = evidence.measures.disagreement_of_variant;
  const text = `Agreement ${percent(evidence.agreement)} `
    + `(${percent(Math.max(0, 1 - told.high))} to ${percent(Math.min(1, 1 - told.low))}) `
    + `over ${evidence.tokens} tokens `;
  const parts = [element("p", { class: "agreement" }, text)];
  if (evidence.course.length > 1) parts.push(course(evidence.variant, evidence.course));
  return parts;
}

function options(select, names, wanted) {
  const shown = [...select.options].map((option) => option.value);
  if (shown.length === names.length && shown.every((name, i) => name === names[i])) return;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(wanted)) select.value = wanted;
}

function choose() {
  options(find("model"), Object.keys(state.models));
  const variants = Object.keys(state.models[find("model").value]?.variants ?? {});
  options(find("left"), variants, variants[0]);
  options(find("right"), variants, variants[1] ?? variants[0]);
}

async function play(event) {
  event.preventDefault();
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  const variants = [find("left").value, find("right").value];
  const heard = variants.map((variant) => ({ variant, tokens: [], error: "", last: false }));
  const draw = answers(find("answers"), variants);
  draw(heard);
  try {
    await follow("/admin/playground/stream", {
      model: find("model").value,
      variants,
      prompt: find("prompt").value,
      max_tokens: Number(find("tokens").value),
      chat: find("chat").checked,
    }, signal, (part) => {
      const answer = heard[part.side];
      answer.tokens.push(...part.tokens);
      answer.error = part.error;
      answer.last = part.last;
      draw(heard);
    });
  } catch (error) {
    if (!signal.aborted) find("answers").replaceChildren(element("p", { class: "bad" }, error.message));
  }
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  find("key").value = "";
  refresh();
});
find("playground").addEventListener("submit", play);
find("model").addEventListener("change", choose);
await refresh();
setInterval(refresh, EVERY_MS);
