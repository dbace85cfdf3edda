// Building blocks. Every text goes onto the page as a text node, never as markup.

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const COLOURS = {
  light: ["#2f6db5", "#d9662b", "#3a9a5b", "#8a5fb0", "#c23b57", "#7a6a4f"],
  dark: ["#6ea8e5", "#ee9460", "#6cc48a", "#b391d6", "#e87b91", "#b8a684"],
};
const isDark = () => document.documentElement.dataset.theme === "dark";
const colourOf = (index) => COLOURS[isDark() ? "dark" : "light"][index % 6];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const MINUS = "\u2212";
function signed(value, digits = 2) {
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return text;
  return (value < 0 ? MINUS : "+") + text;
}
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1).replace("-", MINUS);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4;
  return String(Number(value.toFixed(digits))).replace("-", MINUS);
}
// A tick of an axis: as many digits as its neighbours need, not a reader.
function tick(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? short(value) : String(Number(value.toPrecision(4))).replace("-", MINUS);
}
const fixed = (value) => (value === null || value === undefined ? "–" : value.toFixed(2).replace("-", MINUS));
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const [TRAIN, VAL, TEST] = [0, 1, 2];
const SPLITS = ["training", "validation", "test roll-out"]; // the last is evaluate.sh's, of any checkpoint
const whenOf = (row) => (row.split === TEST ? SPLITS[TEST] : `${SPLITS[row.split]}, step ${row.step}`);
const IS_TOUCH = navigator.maxTouchPoints > 0;

function scoreChip(score, extra = "") {
  const kind = score === null ? "" : score >= 0.5 ? "good" : score < 0 ? "bad" : "";
  return h("span", { class: `chip num ${kind} ${extra}` }, fixed(score));
}
const finishChip = (finish) =>
  h("span", { class: `chip ${finish === "answer" ? "" : finish === "error" ? "bad" : "warn"}` }, finish);

function select(options, value, onchange, attributes) {
  const box = h("select", { ...attributes, onchange: () => onchange(box.value) });
  for (const [key, label] of options) box.append(h("option", { value: key }, label));
  box.value = value;
  return box;
}

function runDot(run) {
  return h("span", { class: "dot", style: { background: colourOf(run) } });
}

// Text with every occurrence of a gold answer marked.
function withGolds(text, golds) {
  const words = golds.map((gold) => gold.trim()).filter((gold) => gold.length > 1 && gold.length < 200);
  if (!words.length || words.length > 50) return [text];
  const pattern = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
  const parts = text.split(new RegExp(`(${pattern})`, "gi"));
  return parts.map((part, i) => (i % 2 ? h("mark", { title: "gold answer" }, part) : part));
}

function safeLink(url) {
  if (!/^https?:\/\//i.test(url)) return h("span", { class: "faint" }, url);
  return h("a", { href: url, rel: "noopener noreferrer", target: "_blank", class: "faint" }, url);
}
