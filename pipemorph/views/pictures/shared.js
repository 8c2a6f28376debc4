const percent = x => x === null ? "–" : (Math.round(1000 * x) / 10).toFixed(1) + "%"; // never "-0.0%"
const ms = x => x < 1000 ? (x < 100 ? +x.toFixed(1) : Math.round(x)) + " ms" : (x / 1000).toFixed(2) + " s";
// All text from the data goes through textContent.
function make(tag, attributes, text, parent) {
  const node = document.createElement(tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
// Round distance of marks on an axis of length `span` with room for `room` marks.
function step(span, room) { const raw = span / Math.max(1, room), base = 10 ** Math.floor(Math.log10(raw)); return base * [1, 2, 5, 10].find(k => k * base >= raw * (1 - 1e-9)); }
