// The page works without this. It keeps what changes by itself up to date, ticks all boxes
// of a page, and has three keys.
"use strict";
(() => {
  const body = document.body;

  // Parts with data-live are replaced by those of a newer page.
  let timer = 0;
  const plan = () => {
    const seconds = Number(body.dataset.refresh || 0);
    clearTimeout(timer);
    if (seconds > 0) timer = setTimeout(refresh, seconds * 1000);
  };
  const refresh = async () => {
    if (document.hidden) return plan();
    try {
      const answer = await fetch(location.href, { headers: { "X-Hopback-Refresh": "1" }, cache: "no-store", redirect: "follow" });
      const kind = answer.headers.get("Content-Type") || "";
      if (!kind.startsWith("text/html")) return location.reload();
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const reading = document.querySelector("[data-reload]");
      if (!answer.ok || (reading && !page.querySelector("[data-reload]"))) {
        if (reading) return location.reload();
        return plan();
      }
      for (const old of document.querySelectorAll("[data-live]")) {
        const fresh = page.getElementById(old.id);
        if (!fresh || old.innerHTML === fresh.innerHTML) continue;
        const focus = old.contains(document.activeElement) ? document.activeElement : null;
        const words = focus && focus.textContent;
        const link = focus && focus.getAttribute("href");
        const now = document.importNode(fresh, true);
        // What somebody has typed stays, and so does the focus.
        for (const field of old.querySelectorAll("input:not([type=hidden]), select")) {
          const same = now.querySelector('[name="' + field.name + '"]');
          if (same) { same.value = field.value; same.checked = field.checked; }
        }
        old.replaceWith(now);
        if (focus) {
          for (const one of now.querySelectorAll("a, button, input, select")) {
            if (one.textContent === words && one.getAttribute("href") === link && one.name === focus.name) { one.focus(); break; }
          }
        }
      }
      if (page.body.dataset.refresh) body.dataset.refresh = page.body.dataset.refresh;
      else delete body.dataset.refresh;
    } catch { /* the server is away: the next one tells */ }
    plan();
  };
  plan();
  document.addEventListener("visibilitychange", () => { if (!document.hidden && body.dataset.refresh) refresh(); });

  const boxes = () => [...document.querySelectorAll("form.pick input[name=id]")];
  const all = document.querySelector("[data-tick-all]");
  const count = () => {
    const ticked = boxes().filter((b) => b.checked).length;
    for (const e of document.querySelectorAll("[data-ticked]")) e.textContent = ticked ? "(" + ticked + ")" : "";
    for (const e of document.querySelectorAll("[data-needs-tick]")) e.disabled = ticked === 0;
    if (all) {
      all.checked = ticked > 0 && ticked === boxes().length;
      all.indeterminate = ticked > 0 && ticked < boxes().length;
    }
  };
  if (all) {
    all.hidden = false;
    all.addEventListener("change", () => { for (const b of boxes()) b.checked = all.checked; count(); });
  }
  document.addEventListener("change", (e) => { if (e.target.matches("form.pick input[name=id]")) count(); });
  window.addEventListener("pageshow", count);

  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input:not([type=checkbox]), textarea, select")) return;
    const search = document.querySelector("[data-search]");
    if (e.key === "/" && search) { e.preventDefault(); search.focus(); }
    if (e.key === "o") location.assign("./");
    if (e.key === "r") location.assign("runs");
  });
})();
