package engine

import "github.com/hopback/hopback/internal/frames"

// Publisher is a link on which a client sends.
type Publisher struct {
	// Tag is the wire's.
	Tag any
}

// Attach is the broker's answer to the attach frame, without name and handle.
func (p *Publisher) Attach() *frames.Attach { return nil }

// Publish takes an encoded message, which is the engine's from now on. Its outcome comes
// as an event Confirmed with this id, unless it is settled already. Outcomes come in
// any order.
func (p *Publisher) Publish(id uint32, settled bool, payload []byte) *Fault { return nil }

// Unconfirmed is how many messages have no outcome yet. RabbitMQ grants the link no more
// credit while there are too many.
func (p *Publisher) Unconfirmed() int { return 0 }

// Close closes the link at the client's wish. Its messages that are under way have no
// outcome any more.
func (p *Publisher) Close() {}
