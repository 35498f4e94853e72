package interop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/retry"
)

// What RabbitMQ changes in a header. durable, priority and ttl arrive as they were sent. An absent
// header, and an absent durable, are false with 4.3 and true with 4.0, and the priority stays
// absent. The broker sets first-acquirer and delivery-count itself and ignores what was sent. 4.0 doesn't
// count a released delivery in the header, and does in an annotation.
func TestHeadersBetweenProtonAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		s.queues(t, "proton", "hopback")
		durable := s.Version == "4.0"
		headers := map[string]struct {
			sent     any
			durable  bool
			priority any
			ttl      any
		}{
			"none":                 {nil, durable, nil, nil},
			"empty":                {frames.List{}, durable, nil, nil},
			"durable":              {frames.List{true}, true, nil, nil},
			"not durable":          {frames.List{false}, false, nil, nil},
			"a priority":           {frames.List{nil, uint8(7)}, durable, uint8(7), nil},
			"priority 0":           {frames.List{nil, uint8(0)}, durable, uint8(0), nil},
			"priority 255":         {frames.List{nil, uint8(255)}, durable, uint8(255), nil},
			"a ttl":                {frames.List{nil, nil, uint32(3_600_000)}, durable, nil, uint32(3_600_000)},
			"not first-acquirer":   {frames.List{nil, nil, nil, false}, durable, nil, nil},
			"first-acquirer":       {frames.List{nil, nil, nil, true}, durable, nil, nil},
			"a delivery-count":     {frames.List{nil, nil, nil, nil, uint32(3)}, durable, nil, nil},
			"all":                  {frames.List{true, uint8(4), uint32(3_600_000), false, uint32(3)}, true, uint8(4), uint32(3_600_000)},
			"durable first, count": {frames.List{true, nil, nil, true, uint32(1)}, true, nil, nil},
		}
		var sent []order
		for name, h := range headers {
			sections := []section{body}
			if h.sent != nil {
				sections = []section{{frames.SectionHeader, h.sent}, body}
			}
			sent = append(sent, named(name, sections))
		}
		p.send(t, at("proton"), sent)
		p.send(t, at("hopback"), sent)
		n := len(sent)
		first := p.receive(t, at("proton"), n, order{"outcome": "release"})
		second := p.receive(t, at("proton"), n, order{"outcome": "modify", "failed": true})
		third := p.receive(t, at("proton"), n, protonAccepts)
		here := s.take(t, "hopback", n)
		for name, h := range headers {
			for i, m := range []protonMessage{first[name], second[name], third[name]} {
				want := noteOf(frames.List{h.durable, h.priority, h.ttl, i == 0, uint32(max(i-1, 0))})
				assert.Equal(t, fmt.Sprint(noted(want)), fmt.Sprint(m.section(frames.SectionHeader)), "%s, delivery %d", name, i+1)
			}
			returned := map[string]string{"4.3": "x-acquired-count", "4.0": "x-delivery-count"}[s.Version]
			assert.Nil(t, first[name].entry(frames.SectionAnnotations, returned))
			assert.Equal(t, note{"long", "1"}, second[name].entry(frames.SectionAnnotations, returned), name)
			assert.Equal(t, note{"long", "2"}, third[name].entry(frames.SectionAnnotations, returned), name)

			want := client.Header{Durable: h.durable, Priority: 4, FirstAcquirer: true}
			if h.priority != nil {
				want.Priority = h.priority.(uint8)
			}
			if h.ttl != nil {
				want.TTL = time.Hour
			}
			assert.Equal(t, &want, here[name].Header, name)
		}
	})
}

// What RabbitMQ doesn't carry, though AMQP allows it. A described value in a map ends the session of
// its sender. A null annotation is accepted, and so is a decimal with 4.0, and then they close the
// connection of each consumer that they are delivered to. In a body described values arrive.
func TestWhatRabbitMQCannotCarryForProton(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		described := frames.Described{Descriptor: frames.Symbol("x:y"), Value: frames.List{"v"}}
		queues := []string{"q"}
		for _, k := range kinds() {
			if deadly(s.Version, "annotation", k.name) {
				queues = append(queues, k.name)
			}
		}
		s.queues(t, queues...)
		for _, pl := range places() {
			var answer struct {
				Answers []protonAnswer
				End     *protonEnd
			}
			p.do(t, order{"do": "send", "to": at("q"), "messages": []order{named(pl.name, pl.sections(described))}}, &answer)
			if pl.name == "application property" || pl.name == "annotation" {
				require.NotNil(t, answer.End, pl.name)
				assert.Equal(t, [2]string{"session", "amqp:internal-error"}, [2]string{answer.End.Scope, answer.End.Condition}, pl.name)
				continue
			}
			require.Nil(t, answer.End, pl.name)
			assertSections(t, pl.name, pl.sections(described), p.receive(t, at("q"), 1, protonAccepts)[pl.name])
		}
		for _, k := range kinds() {
			if !deadly(s.Version, "annotation", k.name) {
				continue
			}
			queue := address.Queue(k.name)
			to, err := queue.Build()
			require.NoError(t, err)
			p.send(t, to, []order{named("deadly", []section{{frames.SectionAnnotations, frames.Map{{Key: frames.Symbol(annotated), Value: k.value}}}, body})})
			var answer struct{ End *protonEnd }
			p.do(t, order{"do": "receive", "from": to, "n": 1, "outcome": protonAccepts}, &answer)
			require.NotNil(t, answer.End, k.name)
			assert.Equal(t, [2]string{"connection", "amqp:internal-error"}, [2]string{answer.End.Scope, answer.End.Condition}, k.name)
		}
	})
}

// protonProperties are messages with properties of every kind, as proton's own Message has them,
// as sections, and as hopback's.
func protonProperties() map[string]struct {
	api  map[string]any
	list frames.List
	here *client.Properties
} {
	expires, created := frames.Timestamp(4_000_000_000_000), frames.Timestamp(1_000_000_000_000)
	id := frames.UUID{1, 2, 15: 3}
	return map[string]struct {
		api  map[string]any
		list frames.List
		here *client.Properties
	}{
		"all": {
			map[string]any{
				"id": "m-1", "user_id": []byte("guest"), "address": "/queues/else", "subject": "s\u00e9", "reply_to": "/queues/answers",
				"correlation_id": "c-1", "content_type": "text/plain", "content_encoding": "gzip", "expiry_time": 4_000_000_000.0,
				"creation_time": 1_000_000_000.0, "group_id": "g", "group_sequence": uint32(7), "reply_to_group_id": "rg",
			},
			frames.List{"m-1", []byte("guest"), "/queues/else", "s\u00e9", "/queues/answers", "c-1", frames.Symbol("text/plain"), frames.Symbol("gzip"), expires, created, "g", uint32(7), "rg"},
			&client.Properties{
				MessageID: "m-1", UserID: []byte("guest"), To: new("/queues/else"), Subject: new("s\u00e9"), ReplyTo: new("/queues/answers"),
				CorrelationID: "c-1", ContentType: new("text/plain"), ContentEncoding: new("gzip"), AbsoluteExpiryTime: new(expires.Time()),
				CreationTime: new(created.Time()), GroupID: new("g"), GroupSequence: new(uint32(7)), ReplyToGroupID: new("rg"),
			},
		},
		"ids of ulong": {
			map[string]any{"id": uint64(1<<63 + 5), "correlation_id": uint64(0)},
			frames.List{uint64(1<<63 + 5), nil, nil, nil, nil, uint64(0)}, &client.Properties{MessageID: uint64(1<<63 + 5), CorrelationID: uint64(0)},
		},
		"ids of uuid": {
			map[string]any{"id": id, "correlation_id": id},
			frames.List{id, nil, nil, nil, nil, id}, &client.Properties{MessageID: amqp.UUID(id), CorrelationID: amqp.UUID(id)},
		},
		"ids of binary": {
			map[string]any{"id": []byte{0, 255}, "correlation_id": []byte{1}},
			frames.List{[]byte{0, 255}, nil, nil, nil, nil, []byte{1}}, &client.Properties{MessageID: []byte{0, 255}, CorrelationID: []byte{1}},
		},
	}
}

// Properties arrive as they were sent, both ways, whether proton's Message has encoded them or its
// bare codec. RabbitMQ changes none of them. Delivery annotations end at the broker.
func TestPropertiesBetweenProtonAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		s.queues(t, "hopback", "back")
		pub := s.publisher(t, "back")
		for name, props := range protonProperties() {
			noted := map[string]note{"body": noteOf([]byte("body")), "inferred": noteOf(true)}
			for field, v := range props.api {
				noted[field] = noteOf(v)
			}
			noted["instructions"] = noteOf(frames.Map{{Key: frames.Symbol("x-opt-once"), Value: "v"}})
			p.send(t, at("hopback"), []order{
				{"api": noted},
				{"sections": []section{{frames.SectionProperties, props.list}, body, {frames.SectionData, []byte{}}, {frames.SectionData, []byte(" and more")}}},
			})
			got := s.next(t, "hopback", 2)
			for i, m := range got {
				if m.Properties.AbsoluteExpiryTime != nil {
					m.Properties.AbsoluteExpiryTime, m.Properties.CreationTime = new(m.Properties.AbsoluteExpiryTime.UTC()), new(m.Properties.CreationTime.UTC())
				}
				assert.Equal(t, props.here, m.Properties, "%s, %d", name, i)
				assert.Empty(t, m.DeliveryAnnotations)
			}
			assert.Equal(t, [][]byte{[]byte("body")}, got[0].Data)
			assert.Equal(t, []string{"body", "", " and more"}, []string{string(got[1].Data[0]), string(got[1].Data[1]), string(got[1].Data[2])})

			m := client.NewMessage([]byte("body"))
			*m.Properties = *props.here
			m.Data = append(m.Data, nil, []byte(" and more"))
			m.DeliveryAnnotations = amqp.Annotations{"x-opt-once": "v"}
			require.NoError(t, pub.Publish(t.Context(), m))
			var answer struct{ Messages []protonMessage }
			p.do(t, order{"do": "receive", "from": at("back"), "n": 1, "outcome": protonAccepts}, &answer)
			back := answer.Messages[0]
			assert.Nil(t, back.section(frames.SectionDeliveryAnnotations))
			for i, v := range props.list {
				assert.Equal(t, fmt.Sprint(noteOf(v)), fmt.Sprint(back.field(frames.SectionProperties, i)), "%s, field %d", name, i)
			}
			assertSections(t, name, []section{body, {frames.SectionData, []byte{}}, {frames.SectionData, []byte(" and more")}}, back)
			for field, v := range props.api {
				want := fmt.Sprint(noteOf(v))
				switch field {
				case "content_type", "content_encoding":
					want = fmt.Sprint(noteOf(frames.Symbol(v.(string))))
				}
				if want[1] == 'u' && v != any(frames.UUID{1, 2, 15: 3}) { // an int of Python
					want = strings.Replace(strings.Replace(want, "uint", "long", 1), "ulong", "long", 1)
				}
				assert.Equal(t, want, fmt.Sprint(back.API[field]), "%s, %s of proton's Message", name, field)
			}
		}
	})
}

// next has hopback take n messages in their order.
func (s *site) next(t *testing.T, queue string, n int) []*client.Message {
	t.Helper()
	got := make(chan *client.Message, n)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- s.conn.Consume(ctx, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			got <- d.Message()
			return nil
		}), client.ConsumerConfig{})
	}()
	all := make([]*client.Message, n)
	for i := range all {
		all[i] = soon(t, got, queue)
	}
	cancel()
	require.NoError(t, <-done)
	return all
}

// bodyOf is what body is in the client's script.
func bodyOf(number, size int) []byte {
	return payload(number, max(size, len(fmt.Sprint(number, " "))))
}

// Five thousand messages each way, none lost, doubled, damaged or out of order, and sizes from
// nothing to many frames: around a byte's and a frame's borders, and with small frames at proton's
// end.
func TestManyMessagesAndAllSizesBetweenProtonAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		s.queues(t, "hopback", "back")
		const frame = 131_072 // RabbitMQ's
		sizes := []int{0, 1, 249, 250, 251, 252, 253, 254, 255, 256, 257, 258, 1 << 20, 3 << 20}
		for d := -128; d <= 16; d += 6 {
			sizes = append(sizes, frame+d)
		}
		many := make([]int, 5000)
		for name, sizes := range map[string][]int{"many": many, "sizes": sizes} {
			if name == "sizes" {
				p.do(t, order{"do": "frames", "max": 4096}, nil)
			}
			var sent struct {
				Answers []protonAnswer
				End     *protonEnd
			}
			p.do(t, order{"do": "burst", "to": at("hopback"), "sizes": sizes}, &sent)
			require.Nil(t, sent.End)
			require.Len(t, sent.Answers, len(sizes))
			require.False(t, slices.ContainsFunc(sent.Answers, func(a protonAnswer) bool { return a.State != "ACCEPTED" }))
			for i, m := range s.next(t, "hopback", len(sizes)) {
				require.Equal(t, string(bodyOf(i, sizes[i])), string(m.GetData()), "%d bytes", sizes[i])
			}
			all := make([]*client.Message, len(sizes))
			for i, size := range sizes {
				all[i] = client.NewMessage(bodyOf(i, size))
				if i%10 == 0 { // in two sections
					all[i].Data = [][]byte{all[i].Data[0][:1], all[i].Data[0][1:]}
				}
			}
			require.NoError(t, s.publisher(t, "back").PublishAll(t.Context(), all))
			var got struct {
				Numbers []int
				End     *protonEnd
			}
			p.do(t, order{"do": "receive", "from": at("back"), "n": len(sizes), "numbers": true, "outcome": protonAccepts}, &got)
			require.Nil(t, got.End)
			require.Len(t, got.Numbers, len(sizes))
			for i, n := range got.Numbers {
				require.Equal(t, i, n)
			}
		}
		// Nothing and no body at all.
		p.send(t, at("hopback"), []order{named("nothing", []section{{frames.SectionData, []byte{}}})})
		assert.Empty(t, s.next(t, "hopback", 1)[0].GetData())
		m := client.NewMessage(nil)
		m.Properties.MessageID = "nothing"
		require.NoError(t, s.publisher(t, "back").Publish(t.Context(), m))
		assertSections(t, "nothing", []section{{frames.SectionData, []byte{}}}, p.receive(t, at("back"), 1, protonAccepts)["nothing"])
	})
}

// What proton does with a delivery is what hopback's next consumer sees of it.
func TestOutcomesBetweenProtonAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		s.queues(t, "q")
		mark := frames.Map{{Key: frames.Symbol("x-opt-mark"), Value: "m"}, {Key: frames.Symbol("x-opt-n"), Value: int64(7)}}
		send := func(id string) { p.send(t, at("q"), []order{named(id, []section{body})}) }
		for _, test := range []struct {
			name  string
			o     order
			count uint32 // of the next delivery
			dead  bool
			marks bool
		}{
			{"released", order{"outcome": "release"}, 0, false, false},
			{"modified", order{"outcome": "modify"}, 0, false, false},
			{"failed", order{"outcome": "modify", "failed": true}, 1, false, false},
			{"marked", order{"outcome": "modify", "failed": true, "annotations": noteOf(mark)}, 1, false, true},
			{"undeliverable", order{"outcome": "modify", "undeliverable": true, "annotations": noteOf(mark)}, 0, true, true},
			{"rejected", order{"outcome": "reject"}, 1, true, false},
			{"rejected with an error", order{"outcome": "reject", "condition": "x:y", "description": "no", "info": noteOf(mark)}, 1, true, false},
		} {
			send(test.name)
			p.receive(t, at("q"), 1, test.o)
			queue := "q"
			if test.dead {
				queue = "dead"
			}
			m := s.next(t, queue, 1)[0]
			require.Equal(t, test.name, m.Properties.MessageID)
			if !test.dead {
				assert.Equal(t, test.count, m.Header.DeliveryCount, test.name)
				assert.False(t, m.Header.FirstAcquirer, test.name)
			} else {
				assert.Equal(t, "rejected", m.Annotations["x-first-death-reason"], test.name)
				assert.Equal(t, "q", m.Annotations["x-first-death-queue"], test.name)
			}
			if test.marks {
				assert.Equal(t, []any{"m", int64(7)}, []any{m.Annotations["x-opt-mark"], m.Annotations["x-opt-n"]}, test.name)
			} else {
				assert.NotContains(t, m.Annotations, "x-opt-mark", test.name)
			}
		}
	})
}

// The other way around.
func TestOutcomesBetweenHopbackAndProton(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		s.queues(t, "q")
		for _, test := range []struct {
			name  string
			err   error
			count string
			dead  bool
			marks map[string]note
		}{
			{"requeued", client.Requeue{}, "0", false, nil},
			{"requeued as failed", client.Requeue{Failed: true}, "1", false, nil},
			{"an error", errors.New("broken"), "1", false, nil},
			{"modified", client.Modify{Failed: true, Annotations: map[string]any{"x-opt-s": "m", "x-opt-l": []any{"a", int64(1)}, "x-opt-b": true}}, "1", false, map[string]note{"x-opt-s": {"string", "m"}, "x-opt-b": {"boolean", true}, "x-opt-l": noted(noteOf([]any{"a", int64(1)}))}},
			{"dead", client.DeadLetter{Reason: "done for", Err: errors.New("broken")}, "", true, map[string]note{client.AnnotationReason: {"string", "done for"}, client.AnnotationError: {"string", "broken"}}},
			{"forwarded", client.Forward{To: address.Queue("dead"), Message: client.NewMessage([]byte("a copy"))}, "", true, nil},
		} {
			p.send(t, at("q"), []order{named(test.name, []section{body})})
			s.handleOnce(t, "q", test.err)
			if test.name == "forwarded" {
				var answer struct{ Messages []protonMessage }
				p.do(t, order{"do": "receive", "from": at("dead"), "n": 1, "outcome": protonAccepts}, &answer)
				assertSections(t, test.name, []section{{frames.SectionData, []byte("a copy")}}, answer.Messages[0])
				continue
			}
			queue := "q"
			if test.dead {
				queue = "dead"
			}
			m := p.receive(t, at(queue), 1, protonAccepts)[test.name]
			if test.dead {
				assert.Equal(t, note{"string", "rejected"}, m.entry(frames.SectionAnnotations, "x-first-death-reason"))
				assert.Equal(t, "array", m.entry(frames.SectionAnnotations, "x-opt-deaths")[0])
			} else {
				assert.Equal(t, note{"uint", test.count}, m.field(frames.SectionHeader, 4), test.name)
			}
			for key, want := range test.marks {
				assert.Equal(t, want, m.entry(frames.SectionAnnotations, key), "%s: %s", test.name, key)
			}
		}
	})
}

// handleOnce has hopback handle one message, with an outcome, and leave.
func (s *site) handleOnce(t *testing.T, queue string, outcome error) {
	t.Helper()
	handled := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		once := 0
		done <- s.conn.Consume(ctx, queue, client.HandlerFunc(func(context.Context, *client.Delivery) error {
			if once++; once == 1 {
				close(handled)
				cancel()
				return outcome
			}
			return client.Requeue{} // it has come again before the consumer has heard of its end
		}), client.ConsumerConfig{Prefetch: 1})
	}()
	soon(t, handled, queue)
	require.NoError(t, <-done)
}

// A message that was retried by a copy arrives at proton with everything that its sender set, but
// for what docs/guarantees.md lists: the ttl is gone, symbols are strings, and there are a counter and
// a history. It isn't first-acquirer, since RabbitMQ has delivered it to a queue's dead-lettering.
func TestProtonReadsWhatWasRetried(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(50 * time.Millisecond)}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
		require.NoError(t, err)
		// The retried message goes to the worker, and to proton as well.
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "proton", DeadLetter: declare.Drop()})
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "requeue_exchange", Queue: "proton", Key: "#"})
		_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
		require.NoError(t, err)
		sent := map[string][]section{}
		for _, k := range kinds() {
			for _, pl := range places() {
				carried := !k.unreadable && k.here != nil && !refused(pl.name, k) && !deadly(s.Version, pl.name, k.name)
				if carried && k.read == nil && k.name != "array of symbols" {
					sent[pl.name+" of "+k.name] = pl.sections(k.value)
				}
			}
		}
		var all []order
		for name, sections := range sent {
			all = append(all, named(name, append([]section{{frames.SectionHeader, frames.List{true, uint8(7), uint32(3_600_000)}}}, sections...)))
		}
		s.consume(t, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if retry.Count(d.Message()) == 0 {
				return errNotYet
			}
			return nil
		})), client.ConsumerConfig{Concurrency: 20})
		p.send(t, at("orders"), all)
		for name, m := range p.receive(t, at("proton"), len(all), protonAccepts) {
			want := slices.DeleteFunc(slices.Clone(sent[name]), func(s section) bool { return s.code == frames.SectionApplicationProperties })
			assertSections(t, name, want, m)
			assert.Equal(t, fmt.Sprint(noted(noteOf(frames.List{true, uint8(7), nil, false, uint32(0)}))), fmt.Sprint(m.section(frames.SectionHeader)), "%s: the ttl is gone", name)
			assert.Equal(t, note{"long", "1"}, m.entry(frames.SectionApplicationProperties, retry.CountProperty), name)
			assert.Equal(t, "string", m.entry(frames.SectionAnnotations, annotation.History)[0], name)
			for _, s := range sent[name] {
				if s.code == frames.SectionApplicationProperties {
					value, _ := s.value.(frames.Map).Get("value")
					assert.Equal(t, fmt.Sprint(noted(noteOf(value))), fmt.Sprint(m.entry(frames.SectionApplicationProperties, "value")), name)
				}
			}
		}
	})
}

// Links, sessions and connections end with errors: those that proton ends leave its unsettled
// messages to hopback, and those that the broker ends are seen by both.
func TestEndsBetweenProtonAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		p := s.protonOf(t)
		s.queues(t, "q", "gone")
		for _, scope := range []string{"link", "session", "connection"} {
			p.send(t, at("q"), []order{named("1", []section{body}), named("2", []section{body})})
			p.do(t, order{"do": "attach", "from": at("q"), "n": 2}, nil)
			p.do(t, order{"do": "leave", "scope": scope}, nil)
			for _, m := range s.next(t, "q", 2) {
				counts := uint32(0)
				if scope != "link" {
					counts = 1
				}
				assert.Equal(t, counts, m.Header.DeliveryCount, "proton left its %s", scope)
			}
		}
		var answer struct{ End *protonEnd }
		p.do(t, order{"do": "attach", "from": at("gone"), "n": 0}, &answer)
		require.Nil(t, answer.End)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		done := make(chan error, 1)
		started := make(chan struct{}, 1)
		go func() {
			done <- s.conn.Consume(ctx, "gone", client.HandlerFunc(func(context.Context, *client.Delivery) error {
				started <- struct{}{}
				return nil
			}), client.ConsumerConfig{})
		}()
		require.NoError(t, s.publisher(t, "gone").Publish(ctx, client.NewMessage(nil)))
		soon(t, started, "hopback's consumer")
		s.http(t, http.MethodDelete, "/api/queues/"+s.url.Path[1:]+"/gone")
		p.do(t, order{"do": "end"}, &answer)
		assert.Equal(t, "link", answer.End.Scope)
		assert.Equal(t, "amqp:resource-deleted", answer.End.Condition)
		// Hopback's consumer waits for the queue to come back.
		s.queues(t, "gone")
		require.NoError(t, s.publisher(t, "gone").Publish(ctx, client.NewMessage(nil)))
		soon(t, started, "hopback's consumer again")
		cancel()
		require.NoError(t, soon(t, done, "the end of hopback's consumer"))

		s.forcedClose(t)
	})
}

// forcedClose has the broker close all connections of a user.
func (s *site) forcedClose(t *testing.T) {
	t.Helper()
	user, vhost := s.url.Path[1:], s.url.Path[1:]
	s.put(t, "/api/users/"+user, `{"password":"secret","tags":""}`)
	t.Cleanup(func() { s.http(t, http.MethodDelete, "/api/users/"+user) })
	s.put(t, "/api/permissions/"+vhost+"/"+user, `{"configure":".*","write":".*","read":".*"}`)
	p := startProton(t, protonClient, s.url.Host, vhost, user, "secret", "60")
	u := *s.url
	u.User = url.UserPassword(user, "secret")
	conn, err := client.Connect(t.Context(), u.String(), client.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("q"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, pub.Publish(t.Context(), client.NewMessage(nil)))
	p.do(t, order{"do": "attach", "from": at("q"), "n": 1}, nil)
	s.http(t, http.MethodDelete, "/api/connections/username/"+user)
	var answer struct{ End *protonEnd }
	p.do(t, order{"do": "end"}, &answer)
	assert.Equal(t, "connection", answer.End.Scope)
	assert.Equal(t, "amqp:internal-error", answer.End.Condition, "RabbitMQ's choice, where AMQP has amqp:connection:forced")
	assert.Contains(t, answer.End.Description, "Connection forced")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	poll(t, "hopback publishes on a new connection", func() bool { return pub.Publish(ctx, client.NewMessage(nil)) == nil })
	messages := s.next(t, "q", 2)
	assert.Equal(t, []uint32{1, 0}, []uint32{messages[0].Header.DeliveryCount, messages[1].Header.DeliveryCount}, "proton had the first one")
}

// put is a request to the HTTP API with a body.
func (s *site) put(t *testing.T, path, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, s.ManagementURL+path, strings.NewReader(body))
	require.NoError(t, err)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}).Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	require.Less(t, resp.StatusCode, 300, path)
}
