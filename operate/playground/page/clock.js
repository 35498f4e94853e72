// The clock of the Go program. Go's runtime reads performance.now and Date, and waits with setTimeout; this file
// replaces the three before wasm_exec.js uses them. Time here is virtual: it stands still while Go computes, and
// passes from one timer of Go to the next, as fast as clock.speed says. So no timer is late, however fast time
// passes and however slow the computer is, and every run of a scenario has the same times.
"use strict";
const clock = (() => {
  const real = { now: performance.now.bind(performance), setTimeout: setTimeout.bind(globalThis), Date };
  const origin = Date.now();
  const timers = new Map();
  let now = 0, last = real.now(), ids = 0;

  globalThis.performance = { now: () => now };
  globalThis.Date = class extends real.Date {
    constructor(...at) { if (at.length) super(...at); else super(origin + now); }
    static now() { return origin + now; }
  };
  globalThis.setTimeout = (run, delay = 0) => { timers.set(++ids, { due: now + Math.max(0, delay), run }); return ids; };
  globalThis.clearTimeout = (id) => timers.delete(id);

  const next = () => {
    let first = null;
    for (const [id, t] of timers) if (!first || t.due < first.due) first = { id, due: t.due, run: t.run };
    return first;
  };

  // A step runs Go for at most 12 ms, so that the page stays responsive, and makes up for at most 100 ms, so that a
  // tab in the background stands still for most of the time.
  const step = () => {
    const began = real.now();
    const until = now + Math.min(began - last, 100) * self.speed;
    last = began;
    for (;;) {
      const timer = next();
      if (!timer || timer.due > until) { now = until; break; }
      timers.delete(timer.id);
      now = Math.max(now, timer.due + 0.001); // Go's times have 256 ns, and a timer must not be early
      timer.run();
      if (real.now() - began > 12) break;
    }
    self.onStep(began);
    real.setTimeout(step, 16);
  };

  const self = { speed: 10, onStep: () => {}, start: step, stop: () => timers.clear(), later: real.setTimeout, realNow: real.now };
  return self;
})();
