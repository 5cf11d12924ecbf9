// The one-file report: every figure is in the file; each is drawn when it comes into view.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  Charts.begin(document.getElementById("theme"), data.templates);
  const waiting = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) continue;
      waiting.unobserve(target);
      Charts.draw(target, data.figures[target.dataset.figure]);
    }
  }, { rootMargin: "400px" });
  for (const node of document.querySelectorAll(".plot")) waiting.observe(node);
  for (const select of document.querySelectorAll("select[data-for]")) {
    const node = document.getElementById(select.dataset.for);
    select.addEventListener("change", () => {
      node.back = undefined;
      Charts.draw(node, data.figures[select.value]);
    });
  }
  addEventListener("beforeprint", () => {
    for (const node of document.querySelectorAll(".plot")) Charts.draw(node, data.figures[node.dataset.figure]);
  });
})();
