// Builds elements from plain text only: nothing that a worker or a client wrote becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell))));
  return element("div", { class: "scroll" }, element("table", {},
    element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body)));
}

function drawing(label, shapes) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 10");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const [name, attributes] of shapes) {
    const shape = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    svg.append(shape);
  }
  return svg;
}

// As it was configured: a quotient of two settings has more digits than anybody gave it.
export const bound = (value) => String(Number(value.toPrecision(4)));

// A measure in the unit that its setting has: nats, or a share.
export function inUnits(told) {
  if (told.nats === null) return { ...told, unit: "" };
  const [mean, low, high, bound] = [told.mean, told.low, told.high, told.bound]
    .map((value) => value * told.nats);
  return { ...told, mean, low, high, bound, unit: " nats" };
}

// A mean, where the true one lies, and what it may be at most.
export function interval(name, told) {
  const far = Math.max(0.01, 1.2 * Math.max(told.bound ?? 0, Math.abs(told.mean)));
  const at = (value) => 50 + 50 * Math.max(-1, Math.min(1, value / far));
  const text = `${name}: ${told.mean.toFixed(4)} in ${told.low.toFixed(4)} to ${told.high.toFixed(4)}${told.unit}`;
  const label = told.bound === null ? text : `${text}, at most ${bound(told.bound)}${told.unit}`;
  const shapes = [
    ["line", { class: "span", x1: at(told.low), x2: at(told.high), y1: 5, y2: 5 }],
    ["circle", { class: "mean", cx: at(told.mean), cy: 5, r: 2 }],
  ];
  if (told.bound !== null) {
    const x = at(told.bound);
    shapes.push(["line", { class: "bound", x1: x, x2: x, y1: 0, y2: 10 }]);
  }
  return drawing(label, shapes);
}

// Agreement over time, and the band that the true one is in.
export function course(variant, points) {
  const times = points.map((point) => Date.parse(point.at));
  // The first bands are nearly as high as all that is possible: they would flatten the rest.
  const newer = points.slice(points.length >> 1);
  const means = points.map((point) => point.mean);
  const low = Math.min(...means, ...newer.map((point) => point.low));
  const high = Math.max(...means, ...newer.map((point) => point.high));
  const passed = Math.max(1, times.at(-1) - times[0]);
  const at = (i, value) => {
    const x = 100 * (times[i] - times[0]) / passed;
    const shown = Math.max(low, Math.min(high, value));
    return `${x},${high > low ? 9.5 - 9 * (shown - low) / (high - low) : 5}`;
  };
  const along = (name) => points.map((point, i) => at(i, point[name]));
  const last = points.at(-1);
  const label = `Agreement of ${variant} over time, ${clock(times[0])} to ${clock(times.at(-1))}: `
    + `now ${percent(last.mean)} in ${percent(last.low)} to ${percent(last.high)}`;
  const svg = drawing(label, [
    ["polygon", { class: "band", points: [...along("low"), ...along("high").reverse()].join(" ") }],
    ["polyline", { class: "path", points: along("mean").join(" ") }],
  ]);
  svg.classList.add("course");
  const words = `${clock(times[0])} to ${clock(times.at(-1))}, ${percent(low)} to ${percent(high)}. `
    + "The line is the mean so far, the band holds the true agreement at all times.";
  return element("figure", {}, svg, element("figcaption", {}, words));
}

const clock = (time) => new Date(time).toLocaleTimeString();

export function percent(share) {
  return `${(100 * share).toFixed(2)} %`;
}
