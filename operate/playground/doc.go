// Command playground is RabbitMQ in a browser tab. Compiled for WebAssembly, it is the program of a static
// page, with the client, the retries, a RabbitMQ in memory, and the doctor:
//
//   - The playground shows what happens to failed messages, in virtual time: with one strategy or with all side by side, with a
//     handler from a list or a scripted one, and with faults, such as a deleted queue or the queue of another team.
//   - The doctor examines a definitions file, which never leaves the browser.
//
// Compiled for any other system, it builds that page: "make site" runs it, and "hopback playground" serves the
// folder. Any other server of static files can, too.
//
// The page's clock, page/clock.js, is virtual: it runs from one timer of the program to the next, and is as fast as
// the reader wants. So the histories of a page and of a test in a testing/synctest bubble are the same.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package main
