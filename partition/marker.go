package partition

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/message"
)

// A marker is a message that Reshard puts into a partition. When its worker has it and nothing
// before it is unsettled, the worker reports its ID in a beat. Messages that stay in hand don't stop a
// marker for long: the report has the hashes of their keys behind the ID.
//
// Every publisher can write a marker's annotation. So a marker also has to contain the group's
// seal, a secret that Reshard writes into an argument of a queue, which nobody can by publishing.
// A message with another seal is handled as any other.

// markerKey is the annotation of a marker: the seal, a slash, and the marker's ID.
const markerKey = "x-opt-hopback-marker"

const maxMarker = 64

// markerLane is the key of what may be a marker; no routing key begins with a line break.
const markerLane = "\n"

// markerOf returns what a marker contains; false: d is none. A marker has no content, and was published
// to the queue itself, which RabbitMQ reports, so messages in the order of a key are none.
func markerOf(d *client.Delivery) (seal, id string, ok bool) {
	m := d.Message()
	text, ok := m.Annotations[markerKey].(string)
	if !ok || len(text) > maxMarker || len(m.GetData()) > 0 || len(m.Data) > 1 || m.Value != nil || len(m.ApplicationProperties) > 0 {
		return "", "", false
	}
	if d.Annotation("x-exchange") != "" || d.Annotation("x-routing-key") != d.Queue() {
		return "", "", false
	}
	seal, id, ok = strings.Cut(text, "/")
	return seal, id, ok && seal != "" && id != ""
}

// argSeal is the argument of the queue sealed with the seal.
const argSeal = "x-hopback-seal"

// sealQueue is the queue that has the seal of a generation that is resharded.
func (g Group) sealQueue() string { return g.hash() + ".sealed" }

// markerSeal returns the seal; "" if there is none.
func (g Group) markerSeal(ctx context.Context, conn *client.Conn) (string, error) {
	info, err := declare.Inspect(ctx, conn.Management(), g.sealQueue())
	if errors.Is(err, declare.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	seal, _ := info.Arguments[argSeal].(string)
	return seal, nil
}

// makeSeal returns the seal, which is secret unless there is one already: two calls of Reshard have the
// same.
func (g Group) makeSeal(ctx context.Context, conn *client.Conn, secret string) (string, error) {
	q := declare.QuorumQueue{Name: g.sealQueue(), DeadLetter: declare.Drop(), Arguments: map[string]any{argSeal: secret}}
	_, err := declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{q}})
	if err == nil || errors.Is(err, declare.ErrConflict) {
		return g.markerSeal(ctx, conn)
	}
	return "", err
}

// seals asks the broker for the seal. Any number of deliveries share an answer, which must be to a
// question asked after the delivery came: Reshard makes the seal before it publishes a marker.
type seals struct {
	ask    func() (string, error)
	failed func(error) // logs it, and waits until the next question may be asked

	mu       sync.Mutex
	asked    uint64 // how many questions were begun
	answered uint64 // the number of the last one that was answered
	asking   bool
	seal     string // its answer
}

// next is the number of the next question.
func (s *seals) next() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked + 1
}

// answer returns the answer to a question of that number or a later one; false: there is none yet.
func (s *seals) answer(number uint64) (seal string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answered >= number {
		return s.seal, true
	}
	if !s.asking {
		s.asking = true
		s.asked++
		go s.question(s.asked)
	}
	return "", false
}

func (s *seals) question(number uint64) {
	seal, err := s.ask()
	if err != nil {
		s.failed(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asking = false
	if err == nil {
		s.seal, s.answered = seal, number
	}
}

// Key is the key of a delivery's lane. It is called as the delivery comes.
func (p *part) Key(d *client.Delivery) string {
	if _, _, ok := markerOf(d); ok {
		return markerLane
	}
	p.checkOrder(d)
	if h := d.Message().Header; h != nil && (h.TTL > 0 || h.Priority != ordinary) && p.warned.CompareAndSwap(false, true) {
		p.of.log.Warn("hopback: a message has a priority or a ttl; the order of its key isn't kept", "queue", p.queue, "message_id", message.ID(d.Message()), "priority", h.Priority, "ttl", h.TTL)
	}
	key := p.of.cfg.Key(d)
	if suspicionOf(d.Message()).poison() {
		p.poisons.add(d, key)
	}
	return key
}

// checkOrder logs that a message has come again after one that was never delivered before. A queue
// delivers what was returned first, unless a policy has it held back, or another consumer returns
// messages. Policies can't be read over AMQP.
func (p *part) checkOrder(d *client.Delivery) {
	if acquired, _ := d.Annotation("x-acquired-count").(int64); acquired == 0 {
		p.fresh = true
		return
	}
	if p.fresh && !p.disordered {
		p.disordered = true
		p.of.log.Error("hopback: returned messages come after later ones, so the order of their keys isn't kept; remove the policy with delayed-retry-type, or the other consumer, from the queue", "queue", p.queue, "message_id", message.ID(d.Message()))
	}
}

// ordinary is the priority of a message that was published without one.
const ordinary = 4

// markerPause is between two looks whether all before a marker is settled, or whether it is one, and passAfter for how
// long a marker waits for keys whose messages are in hand, such as one that is blocked. Then it
// passes them, and its report names them.
const (
	markerPause = 20 * time.Millisecond
	passAfter   = 2 * time.Second
)

// sealLimit is how long the broker has to answer, and sealPause is between two questions if it didn.t.
const (
	sealLimit = 5 * time.Second
	sealPause = time.Second
)

// marker handles d if it is a marker. Otherwise ordinary says that it has to be handled as any other
// message; this is kept in its attempts.
func (h handler) marker(d *client.Delivery, was *attempts) (ordinary bool, again error) {
	seal, id, ok := markerOf(d)
	if !ok || was.ordinary {
		return true, nil
	}
	p := h.part
	if was.sealed == 0 {
		was.sealed = p.of.seals.next()
	}
	switch genuine, known := p.of.seals.answer(was.sealed); {
	case !known:
		return false, &inside.Again{Delay: markerPause, Retries: was.retries, State: *was}
	case genuine != seal:
		was.ordinary = true
		p.of.log.Warn("hopback: a message has the annotation of a marker, and isn't one; it is handled as any other", "queue", p.queue, "message_id", message.ID(d.Message()))
		return true, nil
	}
	if was.since.IsZero() {
		was.since = time.Now()
	}
	turn := p.current.Load()
	if turn == nil {
		return false, &inside.Again{Delay: markerPause, Retries: was.retries, State: *was}
	}
	inHand, others := (*turn).Before(d)
	if others > 0 || len(inHand) > 0 && time.Since(was.since) < passAfter {
		return false, &inside.Again{Delay: markerPause, Retries: was.retries, State: *was}
	}
	report := id
	for _, key := range inHand {
		report += " " + hashOf(key)
	}
	p.of.do(func() {
		p.of.drained = append(p.of.drained, report)
		p.of.report(false)
	})
	return false, nil
}
