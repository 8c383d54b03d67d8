// Two answers side by side, token by token. What is known of a token is said where the pointer is
// and, without one, where the arrow keys have gone: at the same place of both answers at once.

import { element, percent } from "./draw.js";

const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

// Returns a function that draws what was heard so far; what is drawn stays, so that focus does.
export function answers(place, variants) {
  const verdict = element("p", { role: "status" });
  const told = element("p", { id: "token", role: "status" });
  const boxes = variants.map((variant) => element("div", {
    class: "tokens", tabindex: "0", role: "group",
    "aria-label": `Answer of ${variant}; arrow keys go from token to token`,
  }));
  const pair = variants.map((variant, i) =>
    element("div", {}, element("h3", {}, variant), boxes[i]));
  place.replaceChildren(verdict, element("div", { class: "pair" }, ...pair), told);
  let heard = [];
  let at = -1;

  function go(place) {
    const last = Math.max(...heard.map((answer) => answer.tokens.length)) - 1;
    if (last < 0) return;
    at = Math.max(0, Math.min(last, place));
    boxes.forEach((box, i) => {
      box.querySelector(".here")?.classList.remove("here");
      if (!heard[i].error) box.children[at]?.classList.add("here");
    });
    const words = heard.map((answer) => describe(answer, at)).join("; ");
    say(told, `Token ${at + 1}: ${words}.`);
  }

  for (const box of boxes) {
    box.addEventListener("keydown", (event) => {
      if (!(event.key in STEPS) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      go(at + STEPS[event.key]);
    });
    box.addEventListener("pointerover", (event) => {
      const i = [...box.children].indexOf(event.target);
      if (i >= 0) go(i);
    });
  }

  return (answered) => {
    heard = answered;
    const first = firstDifference(heard);
    say(verdict, judged(heard, first));
    heard.forEach((answer, i) => fill(boxes[i], answer, first));
  };
}

function say(line, text) {
  if (line.textContent !== text) line.textContent = text;
}

function judged(heard, first) {
  if (first !== null) return `The first different token is number ${first + 1}.`;
  if (heard.some((answer) => answer.error)) return "They cannot be compared.";
  return heard.every((answer) => answer.last) ? "Both say the same." : "The same so far …";
}

// The place of the first token that is not the same, null while there is none.
function firstDifference([one, two]) {
  const shorter = Math.min(one.tokens.length, two.tokens.length);
  for (let i = 0; i < shorter; i += 1) if (one.tokens[i].text !== two.tokens[i].text) return i;
  const over = [one, two].some((answer) => answer.last && answer.tokens.length === shorter);
  return over && one.tokens.length !== two.tokens.length ? shorter : null;
}

function describe({ variant, tokens, error }, i) {
  if (error) return `${variant} failed`;
  if (i >= tokens.length) return `${variant} has none`;
  const { text, probability } = tokens[i];
  const known = probability === null ? "" : `, probability ${percent(probability)}`;
  return `${variant} “${text}”${known}`;
}

function fill(box, answer, first) {
  if (answer.error) {
    box.replaceChildren(element("span", { class: "bad" }, answer.error));
    return;
  }
  for (const token of answer.tokens.slice(box.children.length)) {
    const known = token.probability !== null;
    const title = known ? { title: `probability ${percent(token.probability)}` } : {};
    box.append(element("span", title, token.text));
  }
  const differs = first === null ? null : box.children[first];
  if (!differs || differs.tagName === "MARK") return;
  const mark = element("mark", { class: `differs ${differs.className}` }, differs.textContent);
  if (differs.title) mark.title = differs.title;
  differs.replaceWith(mark);
}
