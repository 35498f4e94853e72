// Package anew gives package desk what package retry knows of a message that begins anew.
package anew

import "github.com/hopback/hopback/client"

// Copy returns a copy of a dead letter without its history of failures and waits: its
// retries count from 0, and retry.Policy.GiveUpAfter counts from its next failure. The copy
// keeps all that client.Copy keeps, and the exchange and the routing key that the message
// was first published with. The dead letter isn't changed. Package retry sets it.
var Copy func(dead *client.Message) *client.Message

// Failed reports whether anything but a dead letter's own annotations, which its sender may
// have written, shows that it failed in queue. in is the queue that it is in now. names is
// a retry.Names. Package retry sets it.
var Failed func(dead *client.Message, names any, in, queue string) bool

// Published is whether the broker's history of a dead letter shows that it was published to
// exchange with key before it came to queue. Package retry sets it.
var Published func(dead *client.Message, names any, queue, exchange, key string) Answer

// Answer is what a broker's history says.
type Answer uint8

// The answers. Unknown is that of a history that has forgotten it: a copy has a history of
// its own.
const (
	Unknown Answer = iota
	Yes
	No
)

// Older are the annotations in which revisions before v0.1 wrote what is now in
// annotation.History. They are still read. Workers of now overwrite them with 0,
// which workers of then ignore.
var Older = struct{ ErrorType, First, Last, Worker, Asked, Left, Attempts string }{
	"x-opt-hopback-error-type", "x-opt-hopback-first-failure", "x-opt-hopback-last-failure", "x-opt-hopback-worker",
	"x-opt-hopback-delay-asked", "x-opt-hopback-delay-left", "x-opt-hopback-attempts",
}

// OlderKeys has them all.
var OlderKeys = []string{Older.ErrorType, Older.First, Older.Last, Older.Worker, Older.Asked, Older.Left, Older.Attempts}
