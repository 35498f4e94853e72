// Package web is a page for the dead letters of package desk: an http.Handler that shows
// the retry topology with its depths, the dead letters by group, and single messages with
// their hops, and that replays, edits and discards them.
//
//	d, err := desk.New(conn, desk.Config{HTTP: api})
//	handler, err := web.New(d, web.Config{Writable: true, Authorize: whoMay})
//	http.Handle("/ops/dead/", http.StripPrefix("/ops/dead", handler))
//	...
//	handler.Shutdown(ctx)
//
// The command "hopback desk" serves it on localhost.
//
// # Security
//
// The zero Config changes nothing and answers this machine alone; see [Loopback]. With
// Config.Authorize every request is asked about, with its [Access].
//
// Everything that changes something is a POST by a form of this page, from the same origin,
// with a token that belongs to the browser, to who asks, and to this process. The content
// security policy allows no inline script and nothing from elsewhere. What messages bring
// is escaped, and control characters are shown by number. Bodies are hidden until somebody
// asks for them, and are downloaded as files that no browser opens by itself.
//
// # Bounds
//
// A request doesn't wait for a queue to be read. After a moment it shows the progress, and
// asks again. A look that nobody waits for ends. One walk at a time reads a queue, since two
// would each see a part of it. There are at most 16 looks and 8 runs at a time. The last 64
// looks are kept for a minute or ten times what they took, with at most 64 MiB of bodies,
// and the last 100 runs. None of it outlives the process.
package web
