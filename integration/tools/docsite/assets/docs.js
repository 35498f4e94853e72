// The search of the docs, and their programs. Both run here: what they need is loaded when it is used first.
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const el = (tag, text, attributes = {}) => {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    e.textContent = text;
    return e;
  };
  const most = 20, around = 80;
  let index = null;
  const load = () => index || (index = fetch("search.json").then((answer) => answer.json()).then((all) => all.map((s) => ({ ...s, lower: s.text.toLowerCase(), head: (s.page + " " + s.title).toLowerCase() }))));
  // A section is found if it has all words. Words in headings count more, and so does the start of a word.
  const score = (s, words) => {
    let sum = 0;
    for (const w of words) {
      const head = s.head.includes(w), n = s.lower.split(w).length - 1;
      if (!head && n === 0) return 0;
      sum += (head ? 20 : 0) + (s.title.toLowerCase().startsWith(w) ? 10 : 0) + Math.min(n, 5);
    }
    return sum;
  };
  const excerpt = (s, words) => {
    const i = Math.max(0, ...words.map((w) => s.lower.indexOf(w)));
    return (i > around ? "… " : "") + s.text.slice(Math.max(0, i - around), i + 2 * around) + (i + 2 * around < s.text.length ? " …" : "");
  };
  const search = async () => {
    const words = at("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    at("results").hidden = words.length === 0;
    document.querySelector(".doc").hidden = words.length > 0;
    if (words.length === 0) { at("found").textContent = ""; return; }
    const all = await load();
    if (words.join() !== at("words").value.toLowerCase().split(/\s+/).filter(Boolean).join()) return; // typed on
    const found = all.map((s) => ({ s, score: score(s, words) })).filter((f) => f.score > 0).sort((a, b) => b.score - a.score);
    at("found").textContent = found.length === 0 ? "Nothing found" : found.length === 1 ? "1 section found" : found.length + " sections found";
    at("results").replaceChildren(...found.slice(0, most).map(({ s }) => {
      const item = document.createElement("li"), link = el("a", s.page === s.title ? s.title : s.page + ": " + s.title, { href: s.at });
      link.addEventListener("click", () => { at("words").value = ""; search(); }); // the section may be on this page
      item.append(link, el("small", excerpt(s, words)));
      return item;
    }));
    if (found.length === 0) at("results").append(el("li", "Nothing found"));
  };
  // A complete program has a button, and what it prints stands below.
  const programs = (article) => {
    const button = el("button", "Run", { type: "button", class: "primary" }), state = el("span", "Runs in this page, on a RabbitMQ in memory.", { role: "status" });
    const printed = el("pre", "", { class: "printed", tabindex: "0", role: "region", "aria-label": "What the program prints", hidden: "" });
    [...article.querySelectorAll("pre")].find((e) => e.textContent.startsWith("package main")).after(button, " ", state, printed);
    let worker = null;
    const end = (text) => {
      worker?.terminate();
      [worker, button.textContent, state.textContent] = [null, "Run", text];
    };
    const run = () => {
      worker = new Worker("run.js", { name: article.dataset.program });
      [button.textContent, state.textContent, printed.textContent, printed.hidden] = ["Stop", "Loading the program, about 4 MB …", "", false];
      worker.onerror = () => end("It can't be loaded.");
      worker.onmessage = ({ data }) => {
        if (data.end) return end(data.end);
        state.textContent = "Running. Ten seconds pass in one.";
        printed.append(data.text);
      };
    };
    const stop = (stopped) => {
      printed.append("^C\n");
      stopped.postMessage("");
      setTimeout(() => { if (worker === stopped) end("Stopped."); }, 2000); // not every program cares about ^C
    };
    button.addEventListener("click", () => worker ? stop(worker) : run());
  };
  document.querySelectorAll("[data-program]").forEach(programs);
  at("search").addEventListener("submit", (e) => { e.preventDefault(); search(); });
  at("words").addEventListener("input", search);
  at("words").disabled = false;
  if (matchMedia("(max-width: 720px)").matches) document.querySelector(".pages details").open = false;
})();
