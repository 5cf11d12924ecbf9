// Drawing, shared by the live page and the one-file report: themes, zoom that all charts follow, sliders.
"use strict";

const Charts = (() => {
  const touch = matchMedia("(pointer: coarse)").matches;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map(); // node → figure
  let templates = {};

  function chosen() {
    try { return localStorage.getItem("sparsight-theme"); } catch { return null; } // no storage for files
  }

  function theme() {
    return document.documentElement.dataset.theme || "light";
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    for (const [node, figure] of drawn) draw(node, figure, true);
  }

  function begin(button, themes) {
    templates = themes;
    setTheme(chosen() || (prefersDark.matches ? "dark" : "light"));
    prefersDark.addEventListener("change", (event) => chosen() || setTheme(event.matches ? "dark" : "light"));
    button.addEventListener("click", () => {
      const next = theme() === "dark" ? "light" : "dark";
      try { localStorage.setItem("sparsight-theme", next); } catch { /* only this page then */ }
      setTheme(next);
    });
  }

  function draw(node, figure, sameData = false) {
    const slider = figure.layout.sliders && figure.layout.sliders[0];
    if (!sameData && slider && node.back !== undefined && node.back < slider.steps.length - 1) return; // someone looks back
    const fresh = !drawn.has(node);
    drawn.set(node, figure);
    const layout = { ...figure.layout, template: templates[theme()], dragmode: touch ? false : "zoom" };
    const config = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover" };
    node.style.minHeight = `${layout.height}px`;
    Plotly.react(node, figure.data, layout, config);
    if (!fresh) return;
    if (slider) byKeys(node);
    node.on("plotly_sliderchange", (event) => { node.back = event.slider.active; });
    if (node.dataset.steps) node.on("plotly_relayout", (change) => follow(node, change));
  }

  // Plotly's sliders take no keys: the arrows go through the steps of a chart that has the focus.
  function byKeys(node) {
    node.tabIndex = 0;
    node.setAttribute("role", "group");
    node.setAttribute("aria-label", "Chart; the arrow keys go through the steps");
    node.addEventListener("keydown", (event) => {
      const { active, steps } = node.layout.sliders[0];
      const next = active + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] || 0);
      if (next === active || !steps[next]) return;
      event.preventDefault();
      node.back = next;
      Plotly.update(node, steps[next].args[0], { "sliders[0].active": next }, [0]);
    });
  }

  function follow(from, change) {
    const reset = change["xaxis.autorange"];
    const range = reset ? null : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (from.following || (!reset && range[0] === undefined)) return;
    for (const [node, figure] of drawn) {
      if (node === from && !reset) continue;
      if (!node.dataset.steps || !node.isConnected) continue;
      node.following = true; // what we change ourselves is not to be followed in turn
      const update = { "xaxis.range": range || figure.layout.xaxis.range };
      Plotly.relayout(node, update).then(() => { node.following = false; });
    }
  }

  function forget(node) {
    if (drawn.delete(node)) Plotly.purge(node);
  }

  return { begin, draw, forget };
})();
