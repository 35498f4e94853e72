package client

import (
	"sync/atomic"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/userid"
)

// outgoing is a message on its way out.
type outgoing struct {
	msg   *amqp.Message
	state atomic.Int32
	// blamed counts the links that the broker ended while nothing else was in flight.
	blamed uint8
	// overdue says that a link was given up since it wasn't answered.
	overdue bool
	// maybe says that the broker may have stored it, from an earlier link.
	maybe bool
	// by is the user that it was sent by last.
	by *userid.Login
	// index is its place in its batch.
	index int
	// seq is its place among the messages of the link that it was with last.
	seq int64
	// size is what it takes of the budget.
	size int64
	// abandoned, if not nil, is closed when nobody wants it sent any more.
	abandoned <-chan struct{}
	to        answerer
	// on is what the link has of it; nil before it is with a link.
	on atomic.Pointer[sent]
}

// answerer is whom a message's answer goes to.
type answerer interface {
	// Answered is called at most once for each message, by the sender's goroutines:
	// it must not block. The sender doesn't touch o any more.
	Answered(o *outgoing, err error)
}

// earlier is the state of a message that was sent on a link whose broker hasn't read it.
func (o *outgoing) earlier() int32 {
	if o.maybe {
		return outAgain
	}
	return outQueued
}

const (
	outQueued  int32 = iota
	outSending       // with its link, or with the broker
	outAgain         // was sent, and waits for the next link
	outLeft          // was being sent when its caller left
	outOver          // answered, or taken back
)

// addressOf is the address in a message itself: where a sender without a target sends it.
func addressOf(m *amqp.Message) string {
	if m.Properties == nil || m.Properties.To == nil {
		return ""
	}
	return *m.Properties.To
}
