package engine

import "github.com/hopback/hopback/internal/frames"

// Session is a client's session.
type Session struct {
	// Tag is the wire's.
	Tag any
}

// End ends the session at the client's wish. Its unsettled deliveries go back to their
// queues as failed ones. It has no events afterwards.
func (s *Session) End() {}

// OpenPublisher opens the link of a client that sends. The attach frame is the client's.
// The target's address is one of version 2, or absent: then each message's to property
// is its address. The target of /management isn't for the engine: see Request.
func (s *Session) OpenPublisher(attach *frames.Attach) (*Publisher, *Fault) { return nil, nil }

// OpenConsumer opens the link of a client that receives from a queue.
func (s *Session) OpenConsumer(attach *frames.Attach) (*Consumer, *Fault) { return nil, nil }

// Settle settles deliveries with the outcome of a disposition, nil being accepted. Those that
// are settled already are ignored.
func (s *Session) Settle(deliveries []*Delivery, state any) *Fault { return nil }

// Request answers a request to /management. A fault is what RabbitMQ does instead of
// answering: it ends the session.
func (s *Session) Request(request *frames.Message) (*frames.Message, *Fault) { return nil, nil }
