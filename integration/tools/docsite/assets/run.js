// Runs a program of the docs: docs.js starts this worker, whose name is the program's with its arguments. Time is the playground's:
// it stands still while the program computes, and passes ten times as fast while it waits.
"use strict";
importScripts("../clock.js", "../wasm_exec.js");
(async () => {
  const go = new Go(), texts = {};
  const { instance } = await WebAssembly.instantiateStreaming(fetch("docs.wasm"), go.importObject);
  // From here on, the program can't send anything anywhere.
  for (const way of ["fetch", "XMLHttpRequest", "WebSocket", "EventSource", "WebTransport"]) globalThis[way] = undefined;
  globalThis.fs.writeSync = (file, bytes) => {
    texts[file] ||= new TextDecoder();
    postMessage({ text: texts[file].decode(bytes, { stream: true }) });
    return bytes.length;
  };
  go.argv.push(...name.trim().split(" "));
  go.env = { HOPBACK_URL: "amqp://guest:guest@127.0.0.1:5672/" }; // Go can't look up localhost in a browser
  go.exit = (code) => {
    clock.stop();
    postMessage({ end: "It has ended" + (code ? " with code " + code : "") + "." });
  };
  onmessage = () => globalThis.interrupt();
  postMessage({ text: "" });
  go.run(instance);
  clock.start();
})().catch((e) => postMessage({ end: "It can't be run: " + e.message }));
