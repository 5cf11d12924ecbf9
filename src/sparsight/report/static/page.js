// The live page. What comes from a store is put on the page as text and never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const runs = new Map();
const cards = new Map(); // chart id → card
const listed = new Set(); // numbers of the events in the list
let current = null;
let source = null;
let again = 0;

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

async function ask(path, parameters = {}) {
  const answer = await fetch(`api/${path}?${new URLSearchParams(parameters)}`);
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

// Numbers and times as people read them.
const number = (value) => value === null ? "nan" : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}
function ago(time) {
  const seconds = Math.max(0, Date.now() / 1000 - time);
  if (seconds < 90) return "just now";
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

// The list of runs. Rows are kept and filled anew, so that the focus stays where it is.
const rows = new Map();
function showRuns() {
  const order = [...runs.values()].sort((a, b) => Math.round(b.changed / 60) - Math.round(a.changed / 60) || (a.name < b.name ? -1 : 1));
  for (const [name, row] of rows) if (!runs.has(name)) { row.remove(); rows.delete(name); }
  order.forEach((run, place) => {
    let row = rows.get(run.name);
    if (!row) {
      const link = make("a", { href: `#${encodeURIComponent(run.name)}` },
        make("span", { className: "title", textContent: run.name }), make("span", { className: "about" }));
      row = make("li", {}, link);
      rows.set(run.name, row);
    }
    const about = row.querySelector(".about");
    about.replaceChildren(make("span", { className: `level ${run.level}`, textContent: run.level === "broken" ? "cannot be read" : run.verdict }),
      `step ${run.step.toLocaleString("en")} · ${run.live ? "running" : ago(run.changed)}`);
    const link = row.firstChild;
    if (run.name === current) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    if ($("runs").children[place] !== row) $("runs").insertBefore(row, $("runs").children[place] || null);
  });
  $("empty").hidden = current !== null;
  $("empty").textContent = runs.size ? "Choose a run." : "No runs here yet. They appear as soon as they start.";
}

// Arrow keys walk through the list.
$("runs").addEventListener("keydown", (event) => {
  const links = [...$("runs").querySelectorAll("a")];
  const step = { ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const place = links.indexOf(document.activeElement) + (step || 0);
  if (!step || !links[place]) return;
  links[place].focus();
  event.preventDefault();
});

function showSummary(run) {
  $("name").textContent = run.name;
  $("verdict").className = `level ${run.level}`;
  $("verdict").textContent = run.level === "broken" ? "cannot be read" : run.verdict;
  $("status").textContent = run.live ? "running" : `last written ${ago(run.changed)}`;
  $("trouble").hidden = run.level !== "broken";
  $("trouble").textContent = run.level === "broken" ? run.verdict : "";
  const pairs = [["steps", run.step.toLocaleString("en")], ["time", duration(run.seconds)],
    ...Object.entries(run.numbers).map(([key, value]) => [key, number(value)])];
  $("numbers").replaceChildren(...pairs.map(([key, value]) => make("div", {}, make("dt", { textContent: key }), make("dd", { textContent: value }))));
}

function showMeta(meta) {
  const lines = [];
  (function walk(value, path) {
    if (value && typeof value === "object" && !Array.isArray(value)) for (const [key, inner] of Object.entries(value)) walk(inner, path ? `${path}.${key}` : key);
    else lines.push(make("tr", {}, make("th", { scope: "row", textContent: path }), make("td", { textContent: typeof value === "string" ? value : JSON.stringify(value) })));
  })(meta, "");
  $("meta").replaceChildren(...lines);
}

// Findings and actions, the latest first.
function showEvents(events) {
  const list = $("events");
  if (!list) return;
  for (const event of events) {
    if (listed.has(event.id)) continue;
    listed.add(event.id);
    const finding = event.kind === "finding";
    const since = event.onset !== event.step ? ` since step ${event.onset.toLocaleString("en")}` : "";
    const level = finding && ["act", "warn", "info"].includes(event.severity) ? event.severity : event.kind === "action" ? "fine" : "info";
    const line = make("li", { id: `event-${event.id}` }, make("span", { className: "step", textContent: `step ${event.step.toLocaleString("en")}` }),
      make("span", { className: `level ${level}`, textContent: finding ? event.severity : event.kind }),
      make("span", { className: "what" }, `${event.message} `, make("span", { className: "where", textContent: event.rule + since })));
    line.dataset.step = event.step;
    list.insertBefore(line, [...list.children].find((other) => +other.dataset.step <= event.step) || null);
  }
}

// What the rules find as the run stands: it goes when it has healed.
let found = new Set();
function showFound(events) {
  const now = new Set(events.map((event) => event.id));
  for (const id of found) if (!now.has(id)) { listed.delete(id); document.getElementById(`event-${id}`)?.remove(); }
  found = now;
  showEvents(events);
}

// Charts: drawn when they come into view, and again when the run has gone on.
const inView = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    const card = cards.get(target.dataset.chart);
    if (card) { card.seen = isIntersecting; refresh(card); }
  }
}, { rootMargin: "300px" });

async function refresh(card) {
  if (!card.stale || !card.seen || card.busy || !window.Plotly) return;
  card.busy = true;
  card.stale = false;
  const run = current;
  const begin = performance.now();
  try {
    const figure = await ask("figure", { run, chart: card.id, ...(card.layer ? { layer: card.layer } : {}) });
    if (run !== current || cards.get(card.id) !== card) return;
    card.trouble.hidden = !figure.error;
    card.trouble.textContent = figure.error || "";
    if (figure.data) Charts.draw(card.plot, figure); else Charts.forget(card.plot);
  } catch {
    card.stale = true; // the server is away; the stream says when it is back
    return;
  } finally {
    // A store that is slow to read is read less often.
    setTimeout(() => { card.busy = false; refresh(card); }, Math.max(1000, 5 * (performance.now() - begin)));
  }
}

function makeCard(chart) {
  const plot = make("div", { className: "plot", id: `chart-${chart.id}` });
  if (chart.steps) plot.dataset.steps = "1";
  const trouble = make("p", { className: "trouble", hidden: true });
  const top = make("div", { className: "top" }, make("figcaption", {}, make("h3", { textContent: chart.title })));
  const node = make("figure", { className: chart.wide ? "card wide" : "card" }, top, make("p", { className: "note", textContent: chart.note }), trouble, plot);
  node.dataset.chart = chart.id;
  const card = { id: chart.id, node, plot, trouble, stale: true, seen: false, busy: false, layer: chart.layers[0] };
  if (chart.layers.length > 1) {
    const select = make("select", {}, ...chart.layers.map((name) => make("option", { value: name, textContent: name })));
    select.setAttribute("aria-label", `Layer of ${chart.title}`);
    select.addEventListener("change", () => { Object.assign(card, { layer: select.value, stale: true, busy: false }); plot.back = undefined; refresh(card); });
    top.append(select);
  }
  return card;
}

function clear() {
  for (const card of cards.values()) { inView.unobserve(card.node); Charts.forget(card.plot); }
  cards.clear();
  listed.clear();
  found = new Set();
  $("sections").replaceChildren();
}

function showSections(charts, events, found) {
  clear();
  for (const section of new Set(charts.map((chart) => chart.section))) {
    const grid = make("div", { className: "cards" });
    for (const chart of charts.filter((c) => c.section === section)) {
      const card = makeCard(chart);
      cards.set(chart.id, card);
      grid.append(card.node);
    }
    if (charts.find((c) => c.section === section).id === "timeline")
      grid.append(make("div", { className: "card wide" }, make("h3", { textContent: "What" }), make("ul", { className: "events", id: "events" })));
    $("sections").append(make("section", {}, make("h2", { textContent: section }), grid));
  }
  for (const card of cards.values()) inView.observe(card.node);
  showEvents(events);
  showFound(found);
}

async function openRun(name) {
  const place = name === current ? scrollY : 0; // a run that is laid out again stays where it was
  current = name;
  clear();
  $("run").hidden = name === null;
  document.title = name === null ? "Sparsight" : `${name} – Sparsight`;
  showRuns();
  if (name === null) { follow(0); return; }
  $("name").textContent = name;
  let after = 0;
  try {
    const run = await ask("run", { run: name });
    if (current !== name) return;
    if (run.error) showSummary({ ...(runs.get(name) || { name, step: 0, seconds: null, numbers: {}, changed: 0 }), level: "broken", verdict: run.error });
    else { showSummary(run.summary); showMeta(run.meta); showSections(run.charts, run.events, run.found); after = run.after; scrollTo(0, place); }
  } catch { /* the stream tells when the server is back, and then all is asked again */ }
  follow(after);
}

function news(data) {
  if (data.error) { showSummary({ ...(runs.get(current) || { name: current, step: 0, seconds: null, numbers: {}, changed: 0 }), level: "broken", verdict: data.error }); return; }
  if (data.reset || data.charts.some((id) => !cards.has(id))) { openRun(current); return; }
  showSummary(data.summary);
  showEvents(data.events);
  showFound(data.found);
  for (const card of cards.values()) { card.stale = true; refresh(card); }
}

// The stream: comes back by itself after the server was away, and rests while nobody looks.
function follow(after) {
  clearTimeout(again);
  if (source) source.close();
  if (document.hidden) return;
  source = new EventSource(`api/stream?${new URLSearchParams({ ...(current === null ? {} : { run: current }), after })}`);
  source.addEventListener("open", () => { $("offline").hidden = true; });
  source.addEventListener("runs", (event) => {
    runs.clear();
    for (const run of JSON.parse(event.data)) runs.set(run.name, run);
    showRuns();
    if (current === null && !location.hash && runs.size) openRun($("runs").querySelector(".title").textContent);
  });
  source.addEventListener("changes", (event) => {
    const { changed, gone } = JSON.parse(event.data);
    for (const run of changed) runs.set(run.name, run);
    for (const name of gone) runs.delete(name);
    showRuns();
  });
  source.addEventListener("run", (event) => news(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    $("offline").hidden = false;
    if (source.readyState === EventSource.CLOSED) again = setTimeout(() => openRun(current), 2000);
  });
}

function chosen() {
  try { return location.hash ? decodeURIComponent(location.hash.slice(1)) : null; } catch { return null; }
}

addEventListener("hashchange", () => { if (location.hash !== "#main" && chosen() !== current) openRun(chosen()); });
document.addEventListener("visibilitychange", () => { if (document.hidden) { if (source) source.close(); } else openRun(current); });
$("plotly").addEventListener("load", () => { for (const card of cards.values()) refresh(card); });

(async () => {
  Charts.begin($("theme"), await (await fetch("themes.json")).json());
  openRun(chosen());
})();
