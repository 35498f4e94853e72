// The page around the Go program. It shows what the program says, and everything that it shows is text.
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const maker = (create) => (tag, attributes = {}, ...children) => {
    const e = create(tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    e.append(...children);
    return e;
  };
  const el = maker((tag) => document.createElement(tag)), svg = maker((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  const call = (name, ...args) => JSON.parse(window.hopback[name](...args));
  const narrow = matchMedia("(max-width: 720px)");
  const form = at("settings"), publish = at("publish"), examine = at("examine");
  for (const f of [form, publish, examine]) f.addEventListener("submit", (e) => e.preventDefault());

  const seconds = (ms) => {
    const s = ms / 1000;
    if (s < 60) return s.toFixed(1) + " s";
    const two = (n) => String(Math.floor(n)).padStart(2, "0");
    if (s < 86400) return (s >= 3600 ? Math.floor(s / 3600) + ":" + two((s % 3600) / 60) : Math.floor(s / 60)) + ":" + two(s % 60);
    return (s / 86400).toFixed(1) + " days";
  };

  // What is on the page.
  let drawing = null, drawn = "", place = {}, dots = new Map(), last = {}, first = "", selected = "1", follow = true;

  // The topology.
  const arrange = () => {
    place = {};
    const columns = [[], [], [], []];
    for (const n of drawing.nodes) columns[n.column].push(n);
    if (narrow.matches) {
      let y = 20;
      for (const column of columns) {
        const right = (i) => i % 2 === 1 || i > 0 && i === column.length - 1; // dead letters have the right side
        column.forEach((n, i) => { place[n.id] = { x: 24 + (right(i) ? 158 : 0), y: y + Math.floor(i / 2) * 84, w: 150, h: 54 }; });
        y += Math.ceil(column.length / 2) * 84;
      }
      return [340, y];
    }
    let h = 0;
    columns.forEach((column, c) => column.forEach((n, i) => { place[n.id] = { x: 8 + c * 196, y: 34 + i * 84, w: 158, h: 54 }; h = Math.max(h, 34 + i * 84 + 70); }));
    return [762, h];
  };
  const curve = (a, b) => {
    const column = (p) => narrow.matches ? p.y : p.x;
    if (column(b) < column(a)) { // back to the start
      if (narrow.matches) return `M${a.x} ${a.y + 27}C4 ${a.y + 27} 4 ${a.y} 4 ${a.y - 20}L4 ${b.y + 60}C4 ${b.y + 40} 4 ${b.y + 27} ${b.x} ${b.y + 27}`;
      return `M${a.x + a.w / 2} ${a.y}C${a.x + a.w / 2} 10 ${a.x + a.w / 2} 10 ${a.x} 10L${b.x + b.w} 10C${b.x + b.w / 2} 10 ${b.x + b.w / 2} 10 ${b.x + b.w / 2} ${b.y}`;
    }
    if (narrow.matches) {
      const [x1, y1, x2, y2] = [a.x + a.w / 2, a.y + a.h, b.x + b.w / 2, b.y];
      return `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`;
    }
    const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2];
    return `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
  };
  const drawTopology = () => {
    const [w, h] = arrange(), root = at("topology");
    root.setAttribute("viewBox", `0 0 ${w} ${h}`);
    const tip = (kind) => svg("marker", { id: "tip-" + kind, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8", class: "line " + kind }));
    root.replaceChildren(svg("defs", {}, tip("retry"), tip("dead"), tip("foreign")));
    for (const e of drawing.edges) if (place[e.from] && place[e.to]) root.append(svg("path", { d: curve(place[e.from], place[e.to]), class: "line " + e.kind, "marker-end": `url(#tip-${e.kind})` }));
    for (const n of drawing.nodes) {
      const p = place[n.id];
      root.append(svg("g", { class: n.role + (n.missing ? " missing" : "") },
        svg("rect", { class: "box", x: p.x, y: p.y, width: p.w, height: p.h, rx: n.kind === "queue" ? 8 : 26 }),
        svg("text", { x: p.x + p.w / 2, y: p.y + 21, "text-anchor": "middle" }, n.id),
        svg("text", { class: "sub", x: p.x + p.w / 2, y: p.y + 38, "text-anchor": "middle", "data-queue": n.kind === "queue" ? n.id : "" }, n.kind)));
    }
    dots = new Map();
  };
  const moveDots = (state) => {
    const gone = new Set(dots.keys());
    for (const [queue, ids] of Object.entries(state.dots)) ids.forEach((id, i) => {
      const p = place[queue], key = queue === "foreign" ? "copy " + id : id; // a copy is another message
      if (!p) return;
      let dot = dots.get(key);
      if (!dot) {
        dot = svg("g", { class: "dot" }, svg("circle", { r: 9 }), svg("text", { y: 3.5 }, id));
        dots.set(key, dot);
        at("topology").append(dot);
      }
      dot.style.transform = `translate(${p.x + 18 + i * 21}px, ${p.y + p.h}px)`;
      gone.delete(key);
    });
    for (const key of gone) { dots.get(key).remove(); dots.delete(key); }
    const counts = [];
    for (const text of at("topology").querySelectorAll("text[data-queue]")) {
      const queue = text.getAttribute("data-queue");
      if (!queue) continue;
      const n = state.counts[queue] || 0, missing = drawing.nodes.some((node) => node.id === queue && node.missing);
      text.textContent = missing ? "doesn't exist" : n === 1 ? "1 message" : n + " messages";
      counts.push(queue + ": " + (missing ? "doesn't exist" : n));
    }
    at("topology").setAttribute("aria-label", "Topology, with the number of messages in each queue. " + counts.join(", "));
  };

  // The timeline: a row for each message, and in it what the broker and the handler did.
  const colorOf = (queue) => queue === "orders" ? "work" : queue === "orders.dead" ? "dead" : "delay";
  const ends = ["handled", "dead", "lost", "refused"], done = (m) => ends.includes(m.state);
  const segments = (m, now) => {
    const all = [];
    let kind = "", from = 0, queue = "";
    const turn = (next, e) => {
      if (kind && e.at > from) all.push({ kind, from, to: e.at });
      [kind, from, queue] = [next, e.at, e.queue || queue];
    };
    for (const e of m.entries) {
      if (e.queue === "foreign") continue;
      if (e.kind === "published" || e.kind === "returned" || e.kind === "revoked") turn(colorOf(e.queue), e);
      else if (e.kind === "delivered") turn("run", e);
      else if (e.kind === "delayed") turn("delay", e);
      else if (["accepted", "dropped", "queue deleted"].includes(e.kind) && e.queue === queue) turn("", e);
    }
    if (kind) all.push({ kind, from, to: Math.max(from, now) });
    return all;
  };
  // Runs side by side are one below the other, over the same time.
  const drawTimeline = (labs) => {
    const root = at("timeline"), w = Math.max(280, root.parentElement.clientWidth - 34), row = 26, left = 46;
    const all = labs.flatMap((lab) => lab.shown.filter((m) => m.entries.length > 0));
    if (all.length === 0) return;
    const begin = Math.min(...all.map((m) => m.entries[0].at));
    const end = all.every(done) ? Math.max(...all.map((m) => m.entries[m.entries.length - 1].at)) + 1000 : labs[0].now;
    const x = (ms) => left + (Math.min(ms, end) - begin) / Math.max(1, end - begin) * (w - left - 14);
    const parts = [];
    let y = 4;
    for (const lab of labs) {
      if (labs.length > 1) {
        parts.push(svg("text", { class: "sub", x: 0, y: y + 14 }, `${lab.strategy}: ${lab.states.handled || 0} handled, ${lab.states.dead || 0} dead letters`));
        y += row;
      }
      for (const m of lab.shown) {
        parts.push(svg("text", { x: 0, y: y + 14 }, m.id));
        for (const s of segments(m, end)) parts.push(svg("rect", { class: "bar-" + s.kind, x: x(s.from), y: y + 2, width: Math.max(2, x(s.to) - x(s.from)), height: 14, rx: 3 }));
        for (const e of m.entries) {
          const sign = e.kind === "succeeded" ? "✓" : ["failed", "panicked", "crashed", "refused", "queue deleted"].includes(e.kind) ? "✕" : "";
          if (sign) parts.push(svg("text", { class: "mark", x: x(e.at), y: y + 14 }, svg("title", {}, e.text || e.kind), sign));
        }
        y += row;
      }
    }
    for (const i of [0, 1, 2, 3]) {
      const ms = begin + (end - begin) * i / 3;
      parts.unshift(svg("line", { class: "tick", x1: x(ms), x2: x(ms), y1: 0, y2: y }));
      parts.push(svg("text", { class: "sub", x: x(ms), y: y + 13, "text-anchor": i === 0 ? "start" : i === 3 ? "end" : "middle" }, seconds(ms - begin)));
    }
    root.setAttribute("viewBox", `0 0 ${w} ${y + 20}`);
    root.replaceChildren(...parts);
    root.setAttribute("aria-label", "Timeline of " + all.length + " messages. " + labs.map((lab) => (labs.length > 1 ? "Strategy " + lab.strategy + ". " : "") + lab.shown.map((m) => "Message " + m.id + ": " + m.state + (m.where ? " in " + m.where : "")).join(". ")).join(". "));
  };

  const drawHistory = (state) => {
    if (follow && state.total) selected = String(state.total);
    if (at("selected").value !== selected && document.activeElement !== at("selected")) at("selected").value = selected;
    const m = state.shown.find((m) => m.id === selected);
    const rows = !m ? [] : m.entries.map((e) => el("tr", {}, el("td", {}, seconds(e.at - m.entries[0].at)), el("td", {}, e.kind), el("td", {}, e.queue || ""), el("td", {}, e.text || "")));
    at("history").replaceChildren(...rows);
    const newest = m && m.entries[m.entries.length - 1];
    if (newest) last.said = "Message " + m.id + ": " + [newest.kind, newest.queue, newest.text].filter(Boolean).join(", ");
  };

  // show brings the page up to date, ten times a second.
  let shownAt = 0, saidAt = 0;
  const show = (real) => {
    if (real - shownAt < 100) return;
    shownAt = real;
    const labs = call("state", selected);
    complain(refused || labs.error || (labs[0] && labs.map((lab) => lab.error).find(Boolean)) || "");
    for (const b of document.querySelectorAll("#publish button, [role=group] button")) b.disabled = !labs[0];
    if (!labs[0]) return; // a run is starting
    if (first) { // a run has just started
      call("send", first, 1);
      first = "";
      clock.speed = Number(at("speed").value);
    }
    options("shown", labs.map((lab) => lab.strategy));
    at("one").hidden = labs.length === 1;
    const state = labs[at("shown").selectedIndex] || labs[0];
    const layout = JSON.stringify([state.drawing, narrow.matches]);
    if (layout !== drawn) {
      [drawing, drawn, last.changed] = [state.drawing, layout, ""];
      drawTopology();
      for (const kind of ["queue", "exchange"]) options(kind, drawing.nodes.filter((n) => n.kind === kind && !n.missing).map((n) => n.id));
    }
    at("now").textContent = seconds(state.now);
    const changed = JSON.stringify([labs.map((lab) => [lab.total, lab.counts, lab.dots, lab.states, lab.shown.map((m) => m.entries.length)]), state.lines, selected]);
    if (changed !== last.changed) {
      last.changed = changed;
      for (const id of ends) at(id).textContent = state.states[id] || 0;
      at("open").textContent = ends.reduce((open, id) => open - (state.states[id] || 0), state.total);
      at("lines").textContent = (state.lines || []).join("\n") || "Nothing";
      moveDots(state);
      drawHistory(state);
      drawTimeline(labs);
    } else if (labs.some((lab) => lab.shown.some((m) => !done(m)))) drawTimeline(labs);
    toggle(at("worker"), !state.worker, "Start a worker", "Stop the worker");
    toggle(at("alarm"), state.alarm, "Clear the memory alarm", "Raise a memory alarm");
    if (last.said && real - saidAt > 1000) {
      [saidAt, at("said").textContent, last.said] = [real, last.said, ""];
    }
  };
  const options = (id, names) => {
    const was = at(id).value;
    if ([...at(id).options].map((o) => o.value).join() === names.join()) return;
    at(id).replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(was)) at(id).value = was;
  };
  const toggle = (button, on, textOn, textOff) => {
    button.setAttribute("aria-pressed", String(on));
    button.textContent = on ? textOn : textOff;
  };
  // refuse shows why the program did nothing, until the user asks for the next thing.
  let refused = "";
  const refuse = (answer) => complain(refused = answer.error || "");
  const complain = (text) => {
    at("problem").hidden = !text;
    if (at("problem").textContent !== text) at("problem").textContent = text;
  };

  const settings = () => JSON.stringify({ strategy: form.strategy.value, handler: form.script.value, maxRetries: Number(form.maxRetries.value), delays: form.delays.value });
  const showCode = () => {
    const answer = call("code", settings());
    at("code").textContent = answer.code || answer.error;
  };
  const start = () => {
    const answer = call("start", settings());
    refuse(answer);
    if (answer.error) return;
    showCode();
    [first, selected, follow, last.changed] = [publish.body.value, "1", true, ""];
    clock.speed = 1; // until the first message is published
    at("history").replaceChildren();
  };

  const play = () => {
    const handlers = call("handlers");
    for (const h of handlers) form.handler.append(el("option", { value: h.name }, h.text));
    form.handler.append(el("option", { value: "" }, "as written"));
    const choose = () => { form.script.value = (handlers.find((h) => h.name === form.handler.value) || form.script).script || form.script.value; };
    form.handler.addEventListener("change", choose);
    form.script.addEventListener("input", () => { form.handler.value = (handlers.find((h) => h.script === form.script.value) || { name: "" }).name; });
    choose();
    form.addEventListener("submit", start);
    form.addEventListener("change", showCode);
    publish.addEventListener("submit", () => { refuse(call("send", publish.body.value, Number(publish.number.value))); follow = true; });
    at("speed").addEventListener("change", () => { if (!first) clock.speed = Number(at("speed").value); });
    at("shown").addEventListener("change", () => { last.changed = ""; });
    at("selected").addEventListener("change", () => { selected = String(Number(at("selected").value)); follow = false; });
    const act = (id, name, ...whenPressed) => at(id).addEventListener("click", () => call("act", whenPressed[Number(at(id).getAttribute("aria-pressed") === "true")] || id, name ? at(name).value : ""));
    for (const id of ["cut", "apply", "import"]) act(id);
    act("worker", "", "stop", "start");
    act("alarm", "", "alarm", "no alarm");
    act("delete", "queue");
    act("bind", "exchange");
    addEventListener("resize", () => { last.changed = ""; });
    start();
  };

  // The doctor.
  const largest = 8 << 20;
  let report = null;
  const verdict = (text) => { at("verdict").textContent = text; };
  const diagnose = (bytes) => {
    at("findings").replaceChildren();
    at("downloads").hidden = true;
    verdict("Examining …");
    clock.later(() => {
      const answer = call("doctor", bytes);
      if (answer.error) return verdict(answer.error);
      report = answer;
      const lines = answer.text.trim().split("\n");
      verdict(lines[0] + ". " + lines[lines.length - 1]);
      at("downloads").hidden = false;
      const { frameworks, findings, unseen } = answer.report, card = (text) => el("p", { class: "card" }, text);
      at("findings").replaceChildren(...frameworks.map((f) => card("Recognized: " + f.name + ": " + f.because + ". " + (f.cure || ""))), ...findings.map(finding), ...unseen.map((u) => card("Not seen: " + u.part + ": " + u.why + "." + (u.rules.length ? " Not checked: " + u.rules.join(", ") + "." : ""))));
    }, 30);
  };
  const finding = ({ severity, count, rule, places }) => {
    const shown = places.slice(0, 20).map((p) => {
      const where = p.resource.kind + " " + p.resource.name + (p.vhost && p.vhost !== "/" ? " in " + p.vhost : "");
      const item = el("li", {}, where + ": " + p.problem + ".");
      if (p.path) item.append(el("div", { class: "path" }, p.path.map((step, i) => i % 2 === 0 ? step : step ? " ──" + step + "──▶ " : " ──▶ ").join("")));
      return item;
    });
    const card = el("article", { class: "card finding " + severity }, el("h3", {}, severity + ": " + rule.id + ", " + (count === 1 ? "1 place" : count + " places")), el("ul", {}, ...shown));
    if (count > shown.length) card.append(el("p", {}, "… and " + (count - shown.length) + " more, in the downloads."));
    if (rule.happens) card.append(el("p", {}, "What happens: " + rule.happens));
    card.append(el("p", {}, "Fix: " + rule.remedy + "."));
    if (rule.fix) card.append(el("pre", {}, rule.fix));
    if ((rule.docs || "").startsWith("https://")) card.append(el("p", {}, el("a", { href: rule.docs, rel: "noreferrer noopener", target: "_blank" }, rule.docs)));
    return card;
  };
  const read = async (file) => {
    if (file.size > largest) return verdict("The file has more than 8 MiB. Run hopback doctor on it.");
    diagnose(new Uint8Array(await file.arrayBuffer()));
  };
  const download = (name, text) => {
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
    link.click();
    clock.later(() => URL.revokeObjectURL(link.href), 10000);
  };
  const doctor = () => {
    examine.addEventListener("submit", () => diagnose(new TextEncoder().encode(examine.definitions.value)));
    at("file").addEventListener("change", () => { if (at("file").files[0]) read(at("file").files[0]); });
    at("fixes").addEventListener("click", () => download("hopback-doctor-fixes.sh", report.fixes));
    at("report").addEventListener("click", () => download("hopback-doctor.txt", report.text));
    const area = at("doctor");
    area.addEventListener("dragover", (e) => { e.preventDefault(); area.classList.add("dropping"); });
    area.addEventListener("dragleave", () => area.classList.remove("dropping"));
    area.addEventListener("drop", (e) => {
      e.preventDefault();
      area.classList.remove("dropping");
      if (e.dataTransfer.files[0]) read(e.dataTransfer.files[0]);
    });
  };
  // A file that misses the doctor's section isn't opened in place of the page.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (e) => e.preventDefault());

  // Loading. Afterwards a second policy forbids every request.
  addEventListener("hopback", () => {
    document.head.append(el("meta", { "http-equiv": "Content-Security-Policy", content: "default-src 'none'; script-src 'wasm-unsafe-eval'; base-uri 'none'; form-action 'none'" }));
    at("status").hidden = true;
    for (const b of document.querySelectorAll("#settings button, #doctor button")) b.disabled = false;
    doctor();
    play();
    clock.onStep = show;
    clock.start();
    document.body.dataset.ready = "yes";
  });
  const load = async () => {
    try {
      const go = new Go();
      const { instance } = await WebAssembly.instantiateStreaming(fetch("playground.wasm"), go.importObject);
      go.exit = (code) => { at("status").hidden = false; at("status").textContent = "The program has stopped with code " + code + ". Reload the page."; };
      go.run(instance);
    } catch (e) {
      at("status").className = "note bad";
      at("status").textContent = "The program can't be loaded: " + e.message;
    }
  };
  load();
})();
