// Package anew has the names of annotations that earlier revisions wrote.
package anew

// Older are the annotations in which revisions before v0.1 wrote what is now in
// annotation.History. They are still read. Workers of now overwrite them with 0,
// which workers of then ignore.
var Older = struct{ ErrorType, First, Last, Worker, Asked, Left, Attempts string }{
	"x-opt-hopback-error-type", "x-opt-hopback-first-failure", "x-opt-hopback-last-failure", "x-opt-hopback-worker",
	"x-opt-hopback-delay-asked", "x-opt-hopback-delay-left", "x-opt-hopback-attempts",
}

// OlderKeys has them all.
var OlderKeys = []string{Older.ErrorType, Older.First, Older.Last, Older.Worker, Older.Asked, Older.Left, Older.Attempts}
