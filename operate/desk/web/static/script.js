// The page works without this script. It keeps changing parts up to date, selects all messages
// of a page, copies texts, and has three keys.
"use strict";
(() => {
  const body = document.body;

  // The server sends each notice once. It stays until somebody dismisses it or leaves the page.
  const notices = document.getElementById("notices");
  const dismissable = (note) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "dismiss";
    button.textContent = "Dismiss";
    button.addEventListener("click", () => note.remove());
    note.append(button);
  };
  for (const note of notices.children) dismissable(note);
  const notify = (page) => {
    for (const note of page.querySelectorAll("#notices > .note")) {
      const now = document.importNode(note, true);
      dismissable(now);
      notices.append(now);
    }
  };

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
      const answer = await fetch(location.href, { headers: { "X-Hopback-Refresh": document.querySelector("[data-reload]") ? "reload" : "1" }, cache: "no-store", redirect: "follow" });
      const kind = answer.headers.get("Content-Type") || "";
      if (!kind.startsWith("text/html")) return location.reload();
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      notify(page);
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
    } catch { /* the server doesn't answer: try again later */ }
    plan();
  };
  plan();
  document.addEventListener("visibilitychange", () => { if (!document.hidden && body.dataset.refresh) refresh(); });

  const boxes = () => [...document.querySelectorAll("form.pick input[name=id]")];
  const all = document.querySelector("[data-select-all]");
  const count = () => {
    const selected = boxes().filter((b) => b.checked).length;
    for (const e of document.querySelectorAll("[data-selected]")) e.textContent = selected ? "(" + selected + ")" : "";
    for (const e of document.querySelectorAll("[data-needs-selection]")) e.disabled = selected === 0;
    if (all) {
      all.checked = selected > 0 && selected === boxes().length;
      all.indeterminate = selected > 0 && selected < boxes().length;
    }
  };
  if (all) {
    all.hidden = false;
    all.addEventListener("change", () => { for (const b of boxes()) b.checked = all.checked; count(); });
  }
  document.addEventListener("change", (e) => { if (e.target.matches("form.pick input[name=id]")) count(); });
  window.addEventListener("pageshow", count);

  // Copy buttons are hidden without this script.
  const copied = document.getElementById("copied");
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text); // only over TLS, or on this machine
      return true;
    } catch { /* use a field instead */ }
    const field = document.createElement("textarea");
    field.className = "clip";
    field.value = text;
    field.setAttribute("aria-hidden", "true");
    body.append(field);
    field.select();
    let ok = false;
    try { ok = document.execCommand("copy"); } catch { /* it isn't allowed */ }
    field.remove();
    return ok;
  };
  for (const button of document.querySelectorAll("[data-copy]")) {
    const name = button.getAttribute("aria-label");
    let reset = 0;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const ok = await copy(document.getElementById(button.dataset.copy).textContent);
      button.focus();
      button.textContent = ok ? "Copied" : "Can't copy";
      button.classList.toggle("done", ok);
      copied.textContent = "";
      requestAnimationFrame(() => { copied.textContent = ok ? name.replace("Copy", "Copied") : "The browser doesn't allow copying."; });
      clearTimeout(reset);
      reset = setTimeout(() => { button.textContent = "Copy"; button.classList.remove("done"); copied.textContent = ""; }, 2000);
    });
  }

  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input:not([type=checkbox]), textarea, select")) return;
    const search = document.querySelector("[data-search]");
    if (e.key === "/" && search) { e.preventDefault(); search.focus(); }
    if (e.key === "o") location.assign("./");
    if (e.key === "r") location.assign("runs");
  });
})();
