const percent = x => x === null ? "–" : (Math.round(1000 * x) / 10).toFixed(1) + "%"; // never "-0.0%"
const ms = x => x < 1000 ? (x < 100 ? +x.toFixed(1) : Math.round(x)) + " ms" : (x / 1000).toFixed(2) + " s";
const $ = id => document.getElementById(id);
const narrow = () => document.documentElement.clientWidth < 560;
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
// Colour of the palette by name, as the page shows it now.
function colours() { const s = getComputedStyle(document.documentElement), cache = {}; return name => cache[name] || (cache[name] = s.getPropertyValue("--" + name).trim()); }
// Legend of `[colour, name, class of its box]`; a colour is any CSS colour, empty for that of the class.
function showLegend(parent, entries) {
  parent.replaceChildren(...entries.map(([colour, name, shape]) => { const span = make("span", {}); make("i", { class: shape || "", style: colour ? `background:${colour}` : "" }, undefined, span).after(name); return span; }));
}
// Figures at the head of a page: [value, its name, "gain" or "loss"].
function showCards(parent, cards) { parent.replaceChildren(...cards.map(([value, name, kind]) => { const card = make("div", kind ? { class: kind } : {}); make("b", {}, value, card); make("span", {}, name, card); return card; })); }

// --- two pens with one interface: for a canvas, and for an SVG
const FONT = "system-ui, 'DejaVu Sans', sans-serif";
class CanvasPen {
  constructor(canvas, width, height, ratio, top = 0) {
    this.width = width; this.height = height;
    this.g = canvas.getContext("2d"); this.g.setTransform(ratio, 0, 0, ratio, 0, top * ratio); this.g.textBaseline = "middle";
  }
  static on(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = height + "px"; canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    return new CanvasPen(canvas, width, height, ratio);
  }
  rects(fill, all) { this.g.fillStyle = fill; for (const [x, y, w, h] of all) this.g.fillRect(x, y, w, h); }
  line(stroke, points, width = 1, dash = []) { const g = this.g; g.strokeStyle = stroke; g.lineWidth = width; g.setLineDash(dash); g.beginPath(); points.forEach(([x, y], i) => i ? g.lineTo(x, y) : g.moveTo(x, y)); g.stroke(); g.setLineDash([]); }
  text(fill, x, y, text, align = "start", size = 11, weight = "normal") { const g = this.g; g.fillStyle = fill; g.font = `${weight} ${size}px ${FONT}`; g.textAlign = align; g.fillText(text, x, y); }
  clip(x, y, w, h, draw) { const g = this.g; g.save(); g.beginPath(); g.rect(x, y, w, h); g.clip(); draw(); g.restore(); }
  // Hatched, so that it differs from ops without any colour.
  hatch(fill, stroke, all) {
    const tile = document.createElement("canvas"), p = tile.getContext("2d"); tile.width = tile.height = 6;
    p.fillStyle = fill; p.fillRect(0, 0, 6, 6); p.strokeStyle = stroke; p.lineWidth = 1.6;
    for (const d of [-6, 0, 6]) { p.beginPath(); p.moveTo(d - 1, 7); p.lineTo(d + 7, -1); p.stroke(); }
    this.rects(this.g.createPattern(tile, "repeat"), all);
  }
}
class SvgPen {
  constructor(width, height) { this.width = width; this.height = height; this.parts = []; }
  rects(fill, all) { if (all.length) this.parts.push(`<path fill="${fill}" d="${all.map(([x, y, w, h]) => `M${x.toFixed(1)} ${y.toFixed(1)}h${w.toFixed(1)}v${h.toFixed(1)}h${(-w).toFixed(1)}z`).join("")}"/>`); }
  line(stroke, points, width = 1, dash = []) { this.parts.push(`<path fill="none" stroke="${stroke}" stroke-width="${width}"${dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : ""} d="M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}"/>`); }
  text(fill, x, y, text, align = "start", size = 11, weight = "normal") { const anchor = { start: "start", right: "end", center: "middle" }[align]; this.parts.push(`<text x="${x.toFixed(1)}" y="${(y + size * 0.35).toFixed(1)}" fill="${fill}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}">${String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;")}</text>`); }
  clip(x, y, w, h, draw) { draw(); }
}

// --- axes
const AXIS = 20, HEAD = 22;
// Part of a picture right of the names and left of the notes; `from` and `to`: values at its edges.
class Frame {
  constructor(width, from, to, edge = narrow() ? 30 : 74, right = 6) { this.width = width; this.from = from; this.to = to; this.edge = edge; this.plot = Math.max(50, width - edge - right); }
  x(value) { return this.edge + (value - this.from) / (this.to - this.from) * this.plot; }
  at(px) { return this.from + (px - this.edge) / this.plot * (this.to - this.from); }
}
// Uprights at round values from `top` to `bottom`, with their texts below.
function drawAxis(pen, c, frame, top, bottom, text, apart = 80) {
  const every = step(frame.to - frame.from, frame.plot / apart), end = frame.edge + frame.plot;
  for (let k = Math.ceil(frame.from / every - 1e-9); k * every <= frame.to; k++) {
    const at = frame.x(k * every);
    pen.line(c("rule"), [[at, top], [at, bottom]]);
    if (at < end - 16) pen.text(c("dim"), at, bottom + AXIS / 2 + 1, text(+(k * every).toPrecision(9)), "center");
  }
}
const drawTimeAxis = (pen, c, frame, top, bottom) => drawAxis(pen, c, frame, top, bottom, us => ms(us / 1e3), 90);

// --- steps: a row per stage or rank, a band for each slow link between two rows. A step has `rows`, and `links` with `row`, `text` and `messages`;
// `crossing`: messages between any two rows, from the middle of one to that of the other.
// A row has `kinds`, a letter per op, `microbatches`, `gaps` and `durations` in microseconds, and perhaps `idle`, `stages`, `note`, `replica`.
const BAND = 18, SHAPES = { T: "line", C: "hatch" }, WORDS = { L: "loss", D: "data", G: "gc", K: "save", O: "opt" };
// Calls use(kind, start, end, index) for each op of a row.
function eachOp(row, use) {
  let at = 0;
  for (let k = 0; k < row.kinds.length; k++) { at += row.gaps[k]; use(row.kinds[k], at, at + row.durations[k], k); at += row.durations[k]; }
}
// Height of a row, tops of the rows, and the end of the last.
function placeRows(step, top, most = narrow() ? 220 : 300) {
  const rows = step.rows, h = Math.max(5, Math.min(26, Math.floor(most / rows.length))), bands = new Set((step.links || []).map(link => link.row)), tops = [];
  let y = top;
  rows.forEach((row, i) => { if (i && row.replica !== rows[i - 1].replica) y += h > 12 ? 6 : 1; tops.push(y); y += h; if (bands.has(i)) y += BAND; });
  return { h, gap: h > 12 ? 2 : h > 6 ? 1 : 0, tops, bottom: y };
}
// Draws a step from `top`, and returns where it ends. `pale`: only to compare, without numbers and causes.
function drawStep(pen, c, step, frame, top, { pale = false, most } = {}) {
  const rows = step.rows, { h, gap, tops, bottom } = placeRows(step, top, most), x = us => frame.x(us), tall = h - gap, thin = Math.max(2, Math.round(tall / 4));
  const by = {}, faint = [], inks = [], hatched = [], lines = [], scale = frame.plot / (frame.to - frame.from), need = {}, sums = {};
  const put = (name, box) => (by[name] || (by[name] = [])).push(box);
  // A kind of op is numbered if its largest number has room in nine of ten of its ops.
  if (!pale && h >= 13) for (const row of rows) for (let k = 0; k < row.kinds.length; k++) { const s = sums[row.kinds[k]] || (sums[row.kinds[k]] = [[], 0]); s[0].push(row.durations[k]); s[1] = Math.max(s[1], row.microbatches[k]); }
  for (const kind in sums) { const [all, largest] = sums[kind], room = 5.2 * String(largest).length + 1.5; need[kind] = all.filter(us => us * scale >= room).length >= 0.9 * all.length ? room : Infinity; }
  rows.forEach((row, i) => {
    const y = tops[i], first = row.stages && row.stages.length ? Math.min(...row.stages.filter(each => each >= 0)) : null;
    if (step.span_us && !pale) put("idle", [x(0), y, x(step.span_us) - x(0), tall]);
    if (!pale) for (const [cause, a, b] of row.idle || []) if (b > frame.from && a < frame.to) put(cause, [x(a), y, Math.max(0.5, x(b) - x(a)), tall]);
    eachOp(row, (kind, a, b, k) => {
      if (b < frame.from || a > frame.to) return;
      const left = x(a), w = x(b) - left, box = [left, y, Math.max(0.4, w - (w > 4 ? 1 : 0)), tall];
      if (SHAPES[kind] === "hatch") return hatched.push(box);
      if (SHAPES[kind] === "line") return lines.push([left, y + tall - thin, Math.max(0.6, w), thin]);
      put(pale ? "pale-" + kind : kind, box);
      if (first !== null && row.stages[k] > first) faint.push(box);
      const text = WORDS[kind] || row.microbatches[k];
      if (WORDS[kind] ? h >= 13 && !pale && w > 5.6 * text.length + 2 : w >= (need[kind] || Infinity)) inks.push([kind, left + w / 2, y + tall / 2 + 0.5, text]);
    });
    if (h >= 11 || i % Math.ceil(12 / h) === 0) {
      const middle = y + Math.max(tall, 9) / 2;
      pen.text(c("dim"), frame.edge - 5, middle, narrow() ? row.short || row.name.replace(/^[a-z ]+/, "").split(" ")[0] : row.name, "right", Math.min(11, Math.max(9, h)));
      if (row.note && !narrow()) pen.text(c("dim"), frame.edge + frame.plot + 8, middle, row.note);
    }
  });
  pen.clip(frame.edge, top, frame.plot, bottom - top, () => {
    const names = Object.keys(by), ground = names.filter(name => name.length > 1 && !name.startsWith("pale-"));
    for (const name of ground.sort((a, b) => (b === "idle") - (a === "idle"))) pen.rects(c(name), by[name]);
    if (hatched.length) pen.hatch(c("plot"), c("line"), hatched);
    if (lines.length) pen.rects(c("mark"), lines);
    for (const name of names) if (!ground.includes(name)) pen.rects(c(name), by[name]);
    if (faint.length) pen.rects("rgba(255,255,255,0.33)", faint);  // Further stages of a rank.
    for (const [kind, px, py, text] of inks) pen.text(c("on-" + kind), px, py, text, "center", 9);
    for (const [from, to, sent, arrived] of step.crossing || []) pen.line(c("delayed"), [[x(sent), tops[from] + tall / 2], [x(arrived), tops[to] + tall / 2]], 0.8);
    for (const link of step.links || []) drawBand(pen, c, link, frame, tops[link.row] + h, x(step.span_us || frame.to));
  });
  for (const link of step.links || []) if (!narrow()) pen.text(c("ink"), frame.edge - 5, tops[link.row] + h + (BAND - gap) / 2, link.name || `link ${link.row}`, "right", 10);
  return bottom;
}
// A slow link between the rows of its stages: its messages from sent to arrived.
function drawBand(pen, c, link, frame, top, end) {
  const low = top + BAND - 2;
  pen.rects(c("plot"), [[frame.x(0), top, end - frame.x(0), BAND - 2]]);
  const near = link.messages.filter(([, sent, arrived]) => arrived >= frame.from && sent <= frame.to), dense = near.length > frame.plot / 4;
  for (const [forward, sent, arrived] of near) pen.line(c("delayed"), [[frame.x(sent), forward ? top : low], [frame.x(arrived), forward ? low : top]], dense ? 0.6 : 1.2);
  const wide = 6.2 * link.text.length + 8, limit = frame.edge + frame.plot - wide - 4, left = Math.min(end + 4, limit);
  pen.rects(c("back"), [[left, top + 2, wide, BAND - 6]]);
  pen.text(c("ink"), left + wide / 2, top + (BAND - 2) / 2, link.text, "center", 10);
}
// What is at a place of a drawn step: {row, index} with {op, start, end} or {cause, start, end}; null outside.
function findAt(step, frame, top, px, py, most) {
  const { h, tops } = placeRows(step, top, most), index = tops.findIndex(y => py >= y && py < y + h), row = step.rows[index], us = frame.at(px);
  if (!row || us < 0 || px < frame.edge || px > frame.edge + frame.plot) return null;
  let found = null;
  // An op of the compute stream, or a nested one, is the one that is seen.
  eachOp(row, (kind, start, end, op) => { if (us >= start && us < end && (!found || !SHAPES[kind] || SHAPES[row.kinds[found.op]])) found = { row, index, op, start, end }; });
  const idle = !found && (row.idle || []).find(([, a, b]) => us >= a && us < b);
  return found || (idle ? { row, index, cause: idle[0], start: idle[1], end: idle[2] } : { row, index });
}
// Op of a step by its place in its row, as findAt returns it; null if there is none.
function findOp(step, index, op) {
  let found = null;
  if (step && step.rows[index]) eachOp(step.rows[index], (kind, start, end, k) => { if (k === op) found = { row: step.rows[index], index, op, start, end }; });
  return found;
}
// Place of the op of a row that is nearest to a time, of those of the compute stream if there are some.
function findNearest(row, us) {
  let found = 0, least = Infinity;
  eachOp(row, (kind, start, end, op) => { const far = Math.max(start - us, us - end, 0) + (SHAPES[kind] ? 1 : 0); if (far < least) { least = far; found = op; } });
  return found;
}
// Moves over the ops of a picture by keys. The picture is one tab stop: no op has an element or a listener of its own.
class OpCursor {
  // `shown()`: the step that is drawn, or null; `point(found)`: shows an op in #now, or no op if null, and draws again; `begin()`: time where to start.
  constructor(canvas, shown, point, begin = () => 0) {
    this.canvas = canvas; this.shown = shown; this.begin = begin; this.place = null;
    canvas.setAttribute("role", "application"); canvas.setAttribute("aria-description", "Arrow keys go along the ops of a row and between rows, Home and End to the first and last op, Escape leaves.");
    const announce = (mode, found) => { $("now").setAttribute("aria-live", mode); point(found); };
    canvas.addEventListener("keydown", event => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
      if (event.key === "Escape") { this.place = null; announce("off", null); canvas.blur(); return; }
      if (!this.move(event.key)) return;
      event.preventDefault(); event.stopPropagation(); announce("polite", this.find());
    });
    canvas.addEventListener("pointermove", () => $("now").setAttribute("aria-live", "off"));
    for (const type of ["focus", "blur"]) canvas.addEventListener(type, () => { if (this.place) announce(type === "focus" ? "polite" : "off", type === "focus" ? this.find() : null); });
  }
  find() { return this.place && findOp(this.shown(), ...this.place); }
  // Whether the key is one of the cursor.
  move(key) {
    const rows = (this.shown() || { rows: [] }).rows, at = this.find(), by = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, Home: 0, End: 0 }[key];
    const full = rows.findIndex(row => row.kinds.length);
    if (by === undefined || full < 0) return false;
    if (!at) { this.place = [full, findNearest(rows[full], this.begin())]; return true; }
    const last = at.row.kinds.length - 1;
    if (key === "Home" || key === "End") this.place = [at.index, key === "Home" ? 0 : last];
    else if (key === "ArrowLeft" || key === "ArrowRight") this.place = [at.index, Math.max(0, Math.min(last, at.op + by))];
    else {
      let next = at.index + by;
      while (rows[next] && !rows[next].kinds.length) next += by;
      if (rows[next]) this.place = [next, findNearest(rows[next], (at.start + at.end) / 2)];
    }
    return true;
  }
  // Draws a frame around the op while the picture has the focus; `top` and `most`: those of drawStep.
  draw(pen, c, frame, top, most) {
    const found = document.activeElement === this.canvas ? this.find() : null;
    if (!found) return;
    const { h, gap, tops } = placeRows(this.shown(), top, most), x = frame.x(found.start) - 2, w = Math.max(1, frame.x(found.end) - x - 2) + 4, y = tops[found.index] - 1, tall = h - gap + 2;
    const box = [[x, y], [x + w, y], [x + w, y + tall], [x, y + tall], [x, y - 1]];
    pen.clip(frame.edge - 4, 0, frame.plot + 8, pen.height, () => { pen.line(c("back"), box, 5); pen.line(c("ink"), box, 2); });
  }
}
// Entries of the legend of steps: ops, then causes of idle time.
function listEntries(steps, c, names = NAMES) {
  const kinds = new Set(), causes = new Set();
  for (const step of steps) for (const row of step.rows) { for (const kind of row.kinds) kinds.add(kind); for (const [cause] of row.idle || []) causes.add(cause); }
  return Object.keys(names.kinds).filter(kind => kinds.has(kind)).map(kind => [c(kind), names.kinds[kind], SHAPES[kind]])
    .concat(Object.keys(names.causes).filter(cause => causes.has(cause)).map(cause => [c(cause), "idle, " + names.causes[cause]]))
    .concat(steps.some(each => (each.links || []).length + (each.crossing || []).length) ? [[c("delayed"), "messages on a slow link, from sent to arrived", "line"]] : []);
}

// --- a history: seconds per iteration of one or several runs, and a lane per link below, over the same iterations
// `begin`, `end`: iterations; `series`: {name, colour, index, seconds}; `lanes`: {name, spans: {begin, end, kind, delegated, text}};
// `marks`: {at, text, colour, dash}; `reference`: {value, text}; `cursor`: an iteration.
const CHART = 132, TOP = HEAD + 13, LANE = 20, LANE_HEAD = 15;
const LANE_COLOURS = { healthy: "healthy", slow: "delayed", delayed: "delayed", narrow: "narrow", fallen: "down", down: "down", unknown: "unknown" };
const STRIP = 5, isHealthy = span => span.kind === "healthy" && !span.delegated;
const seconds = x => x < 1 ? ms(1e3 * x) : x.toFixed(2) + " s";
const historyHeight = history => TOP + CHART + 10 + history.lanes.length * (LANE + LANE_HEAD + 3) + AXIS + 14;
const historyFrame = (width, history) => new Frame(width, history.begin, history.end, narrow() ? 50 : 74);
// Top of the axis of seconds. The first iteration, which starts everything, and single outliers do not count.
function findMost(history) {
  const all = history.series.flatMap(each => each.seconds.filter((_, k) => each.index[k] > 0 || each.seconds.length < 3)).sort((a, b) => a - b);
  return Math.max(1e-9, 1.08 * Math.min(all[all.length - 1] || 1, 1.3 * (all[Math.floor(0.97 * (all.length - 1))] || 1)), history.reference ? 1.08 * history.reference.value : 0);
}
// Steps of a line, at most one per half pixel, from the least to the most of its iterations.
function stepPoints(each, x, y, plot) {
  const points = [], n = each.index.length, bins = Math.max(1, Math.ceil(n / (2 * plot)));
  for (let k = 0; k < n; k += bins) {
    let low = Infinity, high = 0;
    for (let j = k; j < Math.min(k + bins, n); j++) { low = Math.min(low, each.seconds[j]); high = Math.max(high, each.seconds[j]); }
    const from = x(each.index[k]), to = x(each.index[Math.min(k + bins, n) - 1] + 1);
    points.push([from, y(low)]); if (high > low) points.push([from, y(high)]);
    points.push([to, y(high)]);
  }
  return points;
}
// Marks where a line is longer than its axis: a break of each of its sides, and the largest value, unless the text before is in the way.
function drawSpikes(pen, c, each, most, x) {
  let taken = 0;
  for (let k = 0, end; k < each.index.length; k = end) {
    for (end = k + 1; end < each.index.length && (each.seconds[end] > most) === (each.seconds[k] > most); end++);
    if (each.seconds[k] <= most) continue;
    const a = x(each.index[k]), b = x(each.index[end - 1] + 1), low = TOP + 22, text = `↑ ${seconds(Math.max(...each.seconds.slice(k, end)))}`, wide = 6 * text.length + 2;
    for (const at of b - a < 14 ? [(a + b) / 2] : [a, b]) { pen.line(c("back"), [[at - 6, low + 3], [at + 6, low - 3]], 6); for (const y of [low - 4, low + 4]) pen.line(c(each.colour), [[at - 6, y + 3], [at + 6, y - 3]]); }
    const left = Math.min(a + 3, pen.width - wide);
    if (left < taken) continue;
    pen.rects(c("back"), [[left, TOP + 2, wide, 12]]); pen.text(c("ink"), left + 1, TOP + 8, text, "start", 10); taken = left + wide;
  }
}
function drawHistory(pen, c, history) {
  const frame = historyFrame(pen.width, history), { edge, plot } = frame, bottom = pen.height - AXIS - 14, most = findMost(history), x = k => frame.x(Math.max(history.begin, Math.min(history.end, k)));
  const y = value => TOP + CHART - Math.min(1, value / most) * CHART;
  pen.text(c("ink"), 4, HEAD / 2 - 2, (narrow() ? "s" : "seconds") + " per iteration" + (history.reference ? `; dashed: ${history.reference.text}` : ""), "start", 12, "600");
  drawAxis(pen, c, frame, TOP, bottom, k => k, Math.max(80, plot / (history.end - history.begin)));
  pen.text(c("dim"), edge + plot, bottom + AXIS + 5, "iteration", "right");
  const every = step(most, CHART / 24);
  for (let k = 0; k * every <= most; k++) { pen.line(c("rule"), [[edge, y(k * every)], [edge + plot, y(k * every)]]); pen.text(c("dim"), edge - 5, y(k * every), k ? seconds(+(k * every).toPrecision(9)) : "0", "right"); }
  if (history.reference) { const at = y(history.reference.value); pen.line(c("dim"), [[edge, at], [edge + plot, at]], 1.2, [4, 3]); }
  for (const dashed of [false, true]) {
    const marks = history.marks.filter(mark => !!mark.dash === dashed && mark.at >= history.begin && mark.at < history.end).sort((a, b) => a.at - b.at);
    let free = 0;  // End of the last text or mark.
    marks.forEach((mark, i) => {
      const at = x(mark.at), wide = 6.4 * mark.text.length + 4, next = i + 1 < marks.length ? x(marks[i + 1].at) : edge + plot, right = at + wide <= next;
      pen.line(c(mark.colour), [[at, dashed ? TOP : HEAD], [at, bottom]], 1.2, mark.dash || []);
      if (right || at - wide >= free) pen.text(c(mark.colour), at + (right ? 3 : -3), dashed ? TOP + CHART - 8 : HEAD + 5, mark.text, right ? "start" : "right", 10, "600");
      free = right ? at + wide : at;
    });
  }
  for (const each of history.series) {
    const points = stepPoints(each, x, y, plot);
    if (points.length) pen.line(c(each.colour), points, each.width || 1.8, each.dash || []);
    drawSpikes(pen, c, each, most, x);
    if (each.ended) { const at = x(each.ended.at); pen.line(c("down"), [[at, TOP], [at, TOP + CHART]], 2); pen.text(c("down"), at - 5, TOP + CHART - 8, each.ended.text, "right", 10); }
  }
  history.lanes.forEach((lane, i) => {
    const top = TOP + CHART + 10 + i * (LANE + LANE_HEAD + 3) + LANE_HEAD, last = lane.spans[lane.spans.length - 1];
    let unseen = last && !isHealthy(last) ? last : null;
    pen.rects(c("plot"), [[edge, top, plot, LANE]]);
    for (const span of lane.spans) {
      const a = x(span.begin), w = (span.end === null ? edge + plot : x(span.end)) - a;
      if (w <= 0) continue;
      pen.rects(c(LANE_COLOURS[span.kind]), [[a, top, w, LANE]]);
      if (span.delegated) pen.rects(c("ink"), [[a, top + LANE - STRIP, w, STRIP]]);
      if (w > 6.2 * span.text.length + 8) { pen.text(c({ fallen: "on-down", down: "on-down", healthy: "ink" }[span.kind] || "on"), a + 5, top + (LANE - (span.delegated ? STRIP : 0)) / 2 + 0.5, span.text); if (span === unseen) unseen = null; }
    }
    pen.text(c("ink"), edge, top - LANE_HEAD / 2, lane.name, "start", 11, "600");
    if (unseen) pen.text(c("dim"), edge + 7 * lane.name.length + 8, top - LANE_HEAD / 2, narrow() ? unseen.text : unseen.text + (unseen.end === null || unseen.end >= history.end ? ` since iteration ${unseen.begin}` : ` up to iteration ${unseen.end}`));
  });
  if (history.cursor !== null) pen.line(c("ink"), [[x(history.cursor + 0.5), TOP], [x(history.cursor + 0.5), bottom]], 1, [3, 3]);
}
// Iteration at a place of a history's canvas; null outside.
function iterationAt(canvas, history, px) { const frame = historyFrame(canvas.clientWidth, history), k = Math.floor(frame.at(px)); return px >= frame.edge && k >= history.begin && k < history.end ? k : null; }

// --- a range of time that keys, wheel, fingers and buttons change
class Zoom {
  constructor(whole, draw, tools) {
    this.whole = whole; this.draw = draw; this.from = 0; this.to = whole;
    const button = (text, title, does) => { make("button", { type: "button", title, "aria-label": title }, text, tools).onclick = does; };
    button("+", "zoom in (+)", () => this.scale(0.6)); button("−", "zoom out (-)", () => this.scale(1.7)); button("whole", "whole time (0)", () => this.show(0, whole));
    const keys = make("span", { class: "keys" }, "drag to move, ", tools);
    keys.append(make("kbd", {}, "Ctrl"), " + wheel to zoom; after a click or ", make("kbd", {}, "Tab"), ": ", ...["←", "→", "↑", "↓", "Home", "End"].flatMap(key => [make("kbd", {}, key), " "]), "ops, ", make("kbd", {}, "Shift"), " with ← → to move, ", ...["+", "-", "0"].flatMap(key => [make("kbd", {}, key), " "]), "to zoom; point at an op for details");
  }
  show(a, b) { const span = Math.min(this.whole, Math.max(this.whole / 5000, b - a)); this.from = Math.max(0, Math.min(a, this.whole - span)); this.to = this.from + span; this.draw(); }
  // Moves the range if a part of `a` to `b` is outside.
  reveal(a, b) { const half = (this.to - this.from) / 2; if (a < this.from || b > this.to) this.show((a + b) / 2 - half, (a + b) / 2 + half); }
  scale(factor, centre = (this.from + this.to) / 2) { this.show(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor); }
  // `frame()`: the frame of the canvas; `point(event)`: called where the pointer is, without event when it leaves.
  attach(canvas, frame, point) {
    let dragged = null;
    const move = px => { const by = px / frame().plot * (this.to - this.from); return [by, by]; };
    canvas.addEventListener("wheel", event => {
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.scale(event.deltaY > 0 ? 1.25 : 0.8, frame().at(event.offsetX)); }
      else if (event.shiftKey || event.deltaX) { event.preventDefault(); const [a, b] = move(event.deltaX || event.deltaY); this.show(this.from + a, this.to + b); }
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => { dragged = [event.clientX, this.from, this.to]; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { dragged = null; });
    canvas.addEventListener("pointermove", event => {
      if (dragged) { const [a, b] = move(dragged[0] - event.clientX); this.show(dragged[1] + a, dragged[2] + b); }
      point(event);
    });
    canvas.addEventListener("pointerleave", () => point());
    canvas.addEventListener("keydown", event => {
      const by = (this.to - this.from) / 6, does = { "+": () => this.scale(0.7), "=": () => this.scale(0.7), "-": () => this.scale(1.4), "0": () => this.show(0, this.whole), ArrowLeft: event.shiftKey && (() => this.show(this.from - by, this.to - by)), ArrowRight: event.shiftKey && (() => this.show(this.from + by, this.to + by)) }[event.key];
      if (does) { event.preventDefault(); does(); }
    });
  }
}
