// Command p2-republish-counter is for teams that count retries in the header
// x-retry-count and publish the message to its queue again:
//
//	channel.ack(delivery_info.delivery_tag)
//	if should_retry # retry_count <= 4
//	  queue.publish(payload, headers: { "x-retry-count": retry_count + 1 })
//	end
//
// It shows two losses. Each retry drops everything except the payload. And if the publish
// fails, the message is lost, because it was acknowledged before. hopback publishes the copy
// first, waits until the broker has confirmed it, and only then acknowledges the original. The
// copy has everything that the sender set, and the same counter.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p2-republish-counter
package main

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"reflect"
	"strings"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	queue         = "p2.some.queue"
	retryExchange = "p2.retry_exchange"
)

var policy = retry.Policy{
	MaxRetries: 5, // retry_count <= 4: five retries, six attempts
	Backoff:    retry.Delays(50 * time.Millisecond),
	Names:      retry.Names{Prefix: "p2."},
}

var errSome = errors.New("some error when handling the message")

func main() { show.Main(example) }

func example(s *show.Stage) {
	topology := show.Must(retry.Topology(policy, declare.QuorumQueue{Name: queue}))

	s.Act("The old way: ack, then publish with a counter")
	s.Declare(topology)
	ackThenPublish(s)

	s.Act("hopback: publish, wait for the confirm, then acknowledge")
	s.Declare(topology)
	copies := everythingIsKept(s)

	s.Act("hopback: the same accident: the exchange is missing when the message is published")
	attempts := nothingIsLost(s, topology)

	s.Proven("with ack before publish, 1 message of 1 was lost when the publish failed, and the first retry lost everything but the payload; "+
		"hopback lost 0 (attempt %d succeeded after the same accident), and %d of %d copies had every property, header, and annotation",
		attempts, copies, 2*policy.MaxRetries)
}

// order is a message with everything that a sender can set.
func order(id string) *client.Message {
	return &client.Message{
		Header: &client.Header{Durable: true, Priority: 5},
		Properties: &client.Properties{
			MessageID: id, CorrelationID: uint64(42), Subject: new("order placed"), ReplyTo: new("answers"),
			ContentType: new("application/json"), ContentEncoding: new("identity"), GroupID: new("customer-7"),
		},
		ApplicationProperties: map[string]any{"tenant": "acme", "weight": 2.5, "express": true, "items": int32(3)},
		Annotations:           amqp.Annotations{"x-opt-trace": "4bf92f35"},
		Data:                  [][]byte{[]byte(`{"order": "` + id + `"}`)},
	}
}

// ackThenPublish is the old worker, with go-amqp only.
func ackThenPublish(s *show.Stage) {
	s.Send(address.Queue(queue), order("o-1"))
	session := rawSession(s)
	receiver := show.Must(session.NewReceiver(s.Ctx, "/queues/"+queue, nil))
	sender := show.Must(session.NewSender(s.Ctx, "", nil))

	retryCount := func(m *amqp.Message) int64 { n, _ := m.ApplicationProperties["x-retry-count"].(int64); return n }
	failed := func(m *amqp.Message, to string) error {
		s.Check(receiver.AcceptMessage(s.Ctx, m)) // channel.ack
		again := amqp.NewMessage(m.GetData())     // queue.publish(payload, headers: ...)
		again.Properties = &amqp.MessageProperties{To: &to}
		again.ApplicationProperties = map[string]any{"x-retry-count": retryCount(m) + 1}
		return sender.Send(s.Ctx, again, nil)
	}
	first := show.Must(receiver.Receive(s.Ctx, nil))
	s.Check(failed(first, "/queues/p2.some.queue"))

	second := show.Must(receiver.Receive(s.Ctx, nil))
	s.Say("retry %d of %s: message-id %v, tenant %v, trace %v", retryCount(second), second.GetData(),
		second.Properties.MessageID, second.ApplicationProperties["tenant"], second.Annotations["x-opt-trace"])
	s.Want(second.Properties.MessageID == nil && len(second.ApplicationProperties) == 1 && second.Annotations["x-opt-trace"] == nil,
		"everything but the payload is lost")

	err := failed(second, "/exchanges/p2.renamed_exchange/some.queue")
	s.Want(err != nil, "publishing to a missing exchange fails")
	s.Say("the next publish fails: %v", err)
	s.Check(receiver.Close(s.Ctx))
	s.Holds(queue, 0)
	s.Say("%s has 0 messages: the message was already acknowledged", queue)
}

// everythingIsKept lets o-1 succeed at its last attempt, and o-2 never. It returns how many
// copies it checked.
func everythingIsKept(s *show.Stage) (copies int) {
	var changes []string
	done := make(chan struct{})
	stop := s.Consume(queue, retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		id := d.Message().Properties.MessageID
		s.Say("%v, attempt %d, x-retry-count %v", id, retry.Attempt(ctx), d.Property(retry.CountProperty))
		if retry.Count(d.Message()) > 0 {
			copies++
		}
		changes = append(changes, changed(d.Message())...)
		if id == "o-1" && retry.Attempt(ctx) == policy.MaxRetries+1 {
			close(done)
			return nil
		}
		return errSome
	})), client.ConsumerConfig{})
	s.Send(address.Queue(queue), order("o-1"), order("o-2"))
	show.Next(s, done, "the last attempt at o-1")
	s.Take("p2.some.queue.dead", 1, func(m *client.Message) {
		death := retry.DeadLetterOf(m)
		s.Say("p2.some.queue.dead has %v: %s after %d retries, %q", m.Properties.MessageID, death.Reason, death.Retries, death.Error)
		changes = append(changes, changed(m)...)
		if m.Properties.MessageID != "o-2" || death.Reason != retry.ReasonExhausted || death.Retries != policy.MaxRetries {
			changes = append(changes, "the limit")
		}
	})
	stop()
	s.Say("%d copies checked, changes: %d", copies, len(changes))
	s.Want(copies == 2*policy.MaxRetries, "each order is retried %d times", policy.MaxRetries)
	s.Want(len(changes) == 0, "everything is kept: these changed: %v", changes)
	return copies
}

// changed returns the parts of an order that differ from what its sender set.
func changed(m *client.Message) (changes []string) {
	sent := order(m.Properties.MessageID.(string))
	if !reflect.DeepEqual(m.Properties, sent.Properties) {
		changes = append(changes, "properties")
	}
	for key, value := range sent.ApplicationProperties {
		if m.ApplicationProperties[key] != value {
			changes = append(changes, key)
		}
	}
	for key, value := range sent.Annotations {
		if m.Annotations[key] != value {
			changes = append(changes, key.(string))
		}
	}
	if m.Header.Priority != sent.Header.Priority || !m.Header.Durable {
		changes = append(changes, "header")
	}
	if string(m.GetData()) != string(sent.GetData()) {
		changes = append(changes, "body")
	}
	return changes
}

// nothingIsLost deletes the retry exchange while the handler fails, and declares it again after
// the message is back in its queue. It returns the number of attempts.
func nothingIsLost(s *show.Stage, topology declare.Topology) (attempts int) {
	back, done := make(chan struct{}), make(chan struct{})
	stop := s.Consume(queue, retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		attempts++
		s.Say("attempt %d, x-retry-count %v", attempts, d.Property(retry.CountProperty))
		switch {
		case attempts == 1:
			return errors.Join(errSome, declare.DeleteExchange(ctx, s.Conn.Management(), retryExchange))
		case attempts == 2:
			close(back)
		case retry.Count(d.Message()) == 1:
			close(done)
			return nil
		}
		return errSome
	})), client.ConsumerConfig{ForwardPatience: 300 * time.Millisecond}) // 30 s by default
	s.Send(address.Queue(queue), order("o-3"))
	show.Next(s, back, "the message that couldn't be published")
	s.Say("the original was not acknowledged, so it is delivered again")
	show.Must(declare.Apply(s.Ctx, s.Conn.Management(), topology))
	s.Say("the exchange is back")
	show.Next(s, done, "the retry")
	stop()
	return attempts
}

// rawSession is a session of go-amqp, without hopback.
func rawSession(s *show.Stage) *amqp.Session {
	u := show.Must(url.Parse(s.URL))
	password, _ := u.User.Password()
	conn := show.Must(amqp.Dial(s.Ctx, u.Scheme+"://"+u.Host, &amqp.ConnOptions{
		SASLType: amqp.SASLTypePlain(u.User.Username(), password),
		HostName: "vhost:" + cmp.Or(strings.TrimPrefix(u.Path, "/"), "/"),
	}))
	context.AfterFunc(s.Ctx, func() { _ = conn.Close() })
	return show.Must(conn.NewSession(s.Ctx, nil))
}
