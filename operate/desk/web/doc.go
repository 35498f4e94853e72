// Package web serves a web page for dead letters, as an http.Handler on top of package desk.
// The page shows the queues of the retry topology with their counts, the dead letters by
// group, and single messages with their history. On request it replays, edits, and discards
// them. Mount it in a service's own HTTP server:
//
//	d, err := desk.New(conn, desk.Config{HTTP: api})
//	handler, err := web.New(d, web.Config{Writable: true, Authorize: whoMay})
//	http.Handle("/ops/dead/", http.StripPrefix("/ops/dead", handler))
//	...
//	handler.Shutdown(ctx)
//
// The command "hopback desk" serves the same page on localhost.
//
// # Security
//
// The zero Config is read-only and answers only browsers on this machine that have opened
// [Handler.LoginURL], which has a secret. With Config.Authorize you decide about every request,
// by its [Access].
//
// Every change is a POST from a form of this page, from the same origin, with a token that
// is bound to the browser, the user, and this process. The content security policy allows no
// inline script and nothing from other hosts. The content of messages is escaped, and control
// characters are shown by their number. Bodies are hidden until somebody asks for them, and
// are downloaded as files that no browser opens by itself.
//
// # Limits
//
// A request doesn't wait until a queue is read: after a moment it shows the progress and
// refreshes. If nobody waits for a page any more, reading stops. Only one scan at a time reads
// a queue, since each of two would get only some of the messages.
//
//   - Up to 16 pages are read, and up to 8 replays, discards, and dry runs are active at a time.
//   - The last 64 results are kept for a minute, or for ten times the time that reading them
//     took, with up to 64 MiB of bodies. The last 100 replays, discards, and dry runs are kept.
//   - Everything is in memory, and is lost when the process stops.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package web
