package differ

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// entries are a with its keys as key makes them, in their order.
func (w *world) entries(a args, key func(string) any) frames.Map {
	m := frames.Map{}
	for _, k := range sorted(a) {
		m = append(m, frames.Entry{Key: key(k), Value: w.value(a[k])})
	}
	return m
}

func asString(s string) any { return s }
func asSymbol(s string) any { return frames.Symbol(s) }

// value is a value of a sequence in the form in which it is sent.
func (w *world) value(v any) any {
	switch v := v.(type) {
	case string:
		return w.name(v)
	case after:
		return time.Now().UnixMilli() + int64(v)
	case args:
		return w.entries(v, asString)
	case []any:
		var l frames.List
		for _, item := range v {
			l = append(l, w.value(item))
		}
		return l
	}
	return v
}

// ask sends a request, and notes the answer.
func (w *world) ask(method, path string, body any) *frames.Message {
	m := w.request(method, path, body)
	w.answer(m)
	return m
}

func (w *world) answer(m *frames.Message) {
	if m == nil {
		w.say("answer", "none")
		return
	}
	shown := shownAnswer(m)
	if strings.Contains(shown, notFormed) {
		w.broken = fmt.Errorf("too busy: %s", shown)
	}
	w.say("answer", "%s", shown)
}

// notFormed is said of a quorum queue that has no leader in time, on a busy machine.
const notFormed = "cluster_not_formed"

func (op declare) do(w *world) {
	a := w.entries(op.Arguments, asString)
	switch op.Kind {
	case "":
		a = append(a, frames.Entry{Key: "x-queue-type", Value: "quorum"})
	case "none":
	default:
		a = append(a, frames.Entry{Key: "x-queue-type", Value: op.Kind})
	}
	if op.Arguments["x-dead-letter-strategy"] != nil {
		w.careful[op.Queue] = time.Now()
	}
	w.ask("PUT", "/queues/"+op.Queue, frames.Map{
		{Key: "durable", Value: !op.Transient}, {Key: "auto_delete", Value: op.AutoDelete}, {Key: "exclusive", Value: op.Exclusive}, {Key: "arguments", Value: a},
	})
}

func (op declareExchange) do(w *world) {
	w.ask("PUT", "/exchanges/"+op.Exchange, frames.Map{
		{Key: "type", Value: op.Type}, {Key: "durable", Value: !op.Transient}, {Key: "auto_delete", Value: op.AutoDelete},
		{Key: "internal", Value: op.Internal}, {Key: "arguments", Value: w.entries(op.Arguments, asString)},
	})
}

func (op bind) do(w *world) {
	m := frames.Map{{Key: "source", Value: w.name(op.Source)}, {Key: "binding_key", Value: w.name(op.Key)}, {Key: "arguments", Value: w.entries(op.Arguments, asString)}}
	if op.Exchange != "" {
		m = append(m, frames.Entry{Key: "destination_exchange", Value: w.name(op.Exchange)})
	} else {
		m = append(m, frames.Entry{Key: "destination_queue", Value: w.name(op.Queue)})
	}
	w.ask("POST", "/bindings", m)
}

func (op unbind) do(w *world) {
	dst := "dstq=" + op.Queue
	if op.Exchange != "" {
		dst = "dste=" + op.Exchange
	}
	m := w.ask("GET", "/bindings?src="+op.Source+"&"+dst+"&key="+escape(op.Key), nil)
	if m == nil {
		return
	}
	v, _, _ := frames.ReadValue(m.Body)
	d, _ := v.(frames.Described)
	list, _ := d.Value.(frames.List)
	want := text(w.entries(op.Arguments, asString))
	for _, b := range list {
		b, _ := b.(frames.Map)
		a, _ := b.Get("arguments")
		location, _ := b.Get("location")
		if at, ok := location.(string); ok && text(a) == want {
			w.ask("DELETE", at, nil)
			return
		}
	}
}

// A queue of RabbitMQ that is too busy to answer within 250 ms is said to have no message and no
// consumer. If it wasn't so before, it is asked again.
func (op inspect) do(w *world) {
	m := w.request("GET", "/queues/"+op.Queue, nil)
	for end := time.Now().Add(w.patience); w.quiet == nil && m != nil && counted(m) == idle && w.before.counts[op.Queue] != idle && time.Now().Before(end); {
		w.pump(time.Now().Add(50*time.Millisecond), never)
		m = w.request("GET", "/queues/"+op.Queue, nil)
	}
	w.answer(m)
}

func (op purge) do(w *world)          { w.ask("DELETE", "/queues/"+op.Queue+"/messages", nil) }
func (op deleteQueue) do(w *world)    { w.answer(w.deleteQueue(op.Queue)) }
func (op deleteExchange) do(w *world) { w.ask("DELETE", "/exchanges/"+op.Exchange, nil) }

// attach attaches a link, unless there is one of that name.
func (w *world) attach(name, on string, l *link, a *frames.Attach) {
	if old := w.links[name]; old != nil && !old.over && !old.session.over && !old.session.conn.over {
		return
	}
	s := w.session(on)
	if s == nil {
		return
	}
	l.name, l.session, l.handle = name, s, s.handles
	s.handles++
	// A link that had the name before may not have ended yet for the broker.
	a.Name, a.Handle = fmt.Sprintf("%s-%d", name, l.handle), l.handle
	w.links[name], s.links[a.Name] = l, l
	delete(w.settled, name)
	s.write(a, nil)
	w.until(func() bool { return l.there || l.over })
}

func (op send) do(w *world) {
	target := &frames.Target{Address: w.name(op.To)}
	if op.Anonymous {
		target.Address = nil
	}
	a := &frames.Attach{Source: &frames.Source{}, Target: target, InitialDeliveryCount: frames.Some[uint32](0)}
	if op.Presettled {
		a.SenderSettleMode = frames.Some[uint8](1)
	}
	w.attach(op.Link, op.On, &link{sender: true, settled: op.Presettled, opened: op}, a)
}

func (op receive) do(w *world) {
	a := &frames.Attach{Role: true, Source: &frames.Source{Address: w.name(op.From)}, Target: &frames.Target{}}
	if op.Presettled {
		a.SenderSettleMode = frames.Some[uint8](1)
	}
	if op.Priority != 0 {
		a.Properties = frames.Map{{Key: frames.Symbol("rabbitmq:priority"), Value: op.Priority}}
	}
	w.attach(op.Link, op.On, &link{settled: op.Presettled}, a)
}

func (op publish) do(w *world) {
	if l := w.alive(op.Link, true); l != nil {
		w.publish(l, op)
	}
}

// then sends the message once more, and not settled, if it was settled. RabbitMQ never says when
// it has taken a settled message, and other connections overtake it. The answer to an unsettled
// one shows that the queues have those before it on the session.
func (op publish) then(w *world) {
	l := w.alive(op.Link, true)
	if l == nil || !l.settled && !op.Settled {
		return
	}
	if l.settled { // all that is sent on it has to be
		witness := l.opened
		witness.Link, witness.Presettled = fmt.Sprintf("witness of %s-%d on %s", l.name, l.handle, l.opened.On), false
		witness.do(w)
		if l = w.alive(witness.Link, true); l == nil {
			return
		}
	}
	w.publish(l, publish{Link: l.name, Message: op.Message})
}

// publish publishes on a link.
func (w *world) publish(l *link, op publish) {
	for range max(1, op.Count) {
		s := l.session
		payload := op.Message.encode(w, l.published)
		t := &frames.Transfer{Handle: l.handle, DeliveryID: frames.Some(s.nextID), DeliveryTag: []byte{byte(s.nextID), byte(s.nextID >> 8)}, Settled: frames.Some(op.Settled || l.settled)}
		s.out[s.nextID] = fmt.Sprintf("%s message %d", op.Link, l.published)
		s.nextID++
		l.published++
		for i := max(1, op.Frames); i > 0; i-- {
			part := payload[:len(payload)/i]
			payload = payload[len(part):]
			t.More = i > 1
			s.sent++
			s.write(t, part)
			t = &frames.Transfer{Handle: l.handle}
		}
	}
}

// encode is the message in its encoded form, as the nth of its link.
func (m message) encode(w *world, n int) []byte {
	if m.Raw != nil {
		return m.Raw
	}
	x := frames.Message{}
	if m.Durable || m.Priority != 0 || m.TTL != 0 || m.Count != 0 {
		x.Header = &frames.MessageHeader{Durable: m.Durable, DeliveryCount: m.Count}
		if m.Priority != 0 {
			x.Header.Priority = frames.Some(uint8(m.Priority - 1))
		}
		if m.TTL != 0 {
			x.Header.TTL = frames.Some(m.TTL)
		}
	}
	if len(m.Annotations) > 0 {
		x.Annotations = w.entries(m.Annotations, asSymbol)
	}
	if m.To != "" || m.Subject != "" {
		x.Properties = &frames.Properties{MessageID: fmt.Sprint(n)}
		if m.To != "" {
			x.Properties.To = w.name(m.To)
		}
		if m.Subject != "" {
			x.Properties.Subject = frames.Some(m.Subject)
		}
	}
	if len(m.Properties) > 0 {
		x.ApplicationProperties = w.entries(m.Properties, asString)
	}
	var body any = []byte(fmt.Sprintf("%d%s", n, strings.Repeat(".", m.Size)))
	code := uint64(0x75)
	if m.Value != nil {
		body, code = w.value(m.Value), 0x77
	}
	var err error
	if x.Body, err = frames.AppendValue(nil, frames.Described{Descriptor: code, Value: body}); err != nil {
		panic(err)
	}
	b, err := x.Append(nil)
	if err != nil {
		panic(err)
	}
	return b
}

func (op credit) do(w *world) {
	if l := w.alive(op.Link, false); l != nil {
		w.grant(l, op.N, op.Drain, op.Tokens...)
	}
}

func (w *world) grant(l *link, n uint32, drain bool, tokens ...any) {
	l.credit = n
	f := l.session.flow(l.handle, l.count, n, drain)
	if len(tokens) > 0 {
		var claimed any = frames.Array{Type: frames.CodeString32, Elements: tokens}
		for _, token := range tokens {
			if _, ok := token.(string); !ok {
				claimed = frames.List(tokens)
			}
		}
		f.Properties = frames.Map{{Key: frames.Symbol("rabbitmq:deferral-tokens"), Value: claimed}}
	}
	l.session.write(f, nil)
}

func (op settle) do(w *world) {
	l := w.alive(op.Link, false)
	if l == nil || op.First >= len(l.unsettled) || op.Last < op.First {
		return
	}
	w.regrant = l
	last := min(op.Last+1, len(l.unsettled))
	ids := slices.Clone(l.unsettled[op.First:last])
	l.unsettled = slices.Delete(l.unsettled, op.First, last)
	w.settled[op.Link] = append(w.settled[op.Link], ids...)
	for len(ids) > 0 { // other links have the ids between
		n := 1
		for n < len(ids) && ids[n] == ids[n-1]+1 {
			n++
		}
		d := &frames.Disposition{Role: true, First: ids[0], Settled: frames.Some(!op.Unsettled), State: op.Outcome.state(w)}
		if n > 1 {
			d.Last = frames.Some(ids[n-1])
		}
		l.session.write(d, nil)
		ids = ids[n:]
	}
}

// then grants what credit there is: the answer shows that the queue has the outcome.
func (op settle) then(w *world) { w.grantAgain() }
func (op again) then(w *world)  { w.grantAgain() }

func (w *world) grantAgain() {
	if l := w.regrant; l != nil && !l.over && !l.session.over {
		w.grant(l, l.credit, false)
	}
	w.regrant = nil
}

func (op again) do(w *world) {
	l := w.alive(op.Link, false)
	if l == nil || op.N >= len(w.settled[op.Link]) {
		return
	}
	w.regrant = l
	l.session.write(&frames.Disposition{Role: true, First: w.settled[op.Link][op.N], Settled: frames.Some(true), State: op.Outcome.state(w)}, nil)
}

func (o outcome) state(w *world) any {
	switch o.Kind {
	case "rejected":
		if o.Error != "" {
			return &frames.Rejected{Error: &frames.Error{Condition: "amqp:internal-error", Description: o.Error}}
		}
		return &frames.Rejected{}
	case "released":
		return &frames.Released{}
	case "modified":
		m := &frames.Modified{DeliveryFailed: o.Failed, UndeliverableHere: o.Undeliverable}
		if len(o.Annotations) > 0 {
			m.Annotations = w.entries(o.Annotations, asSymbol)
		}
		return m
	case "none":
		return nil
	}
	return &frames.Accepted{}
}

func (op detach) do(w *world) {
	l := w.links[op.Link]
	if l == nil || l.over || !l.there {
		return
	}
	l.over = true
	l.session.write(&frames.Detach{Handle: l.handle, Closed: !op.Keep}, nil)
}

func (op endSession) do(w *world) {
	s := w.sessions[op.Session]
	if s == nil || s.over || s.conn.over {
		return
	}
	for _, l := range s.links {
		l.over = true
	}
	s.write(&frames.End{}, nil)
	w.until(func() bool { return s.over })
}

func (op cut) do(w *world) {
	if c := w.conns[op.Conn]; c != nil {
		c.gone()
	}
}

func (op hangUp) do(w *world) {
	if c := w.conns[op.Conn]; c != nil && !c.over {
		c.write(0, &frames.Close{}, nil)
		w.until(func() bool { return c.over })
	}
}

// tail is done behind each sequence: the sessions requeue what they hold, one after the other,
// and then it is taken.
func (w *world) tail() sequence {
	s := sequence{endSession{"c0.0"}, endSession{"c0.1"}, endSession{"c0.2"}, endSession{"c1.0"}, endSession{"c1.1"}, endSession{"c1.2"}}
	for _, q := range w.queues {
		s = append(s, empty{q})
	}
	return s
}

// empty consumes what is left in a queue, on a separate connection.
type empty struct{ Queue string }

func (op empty) do(w *world) {
	if m := w.request("GET", "/queues/"+op.Queue, nil); m == nil || m.Properties.Subject.Value != "200" {
		return
	}
	name := "rest of " + op.Queue
	receive{Link: name, On: name + ".0", From: "/queues/" + op.Queue, Presettled: true}.do(w)
	if l := w.alive(name, false); l != nil {
		w.grant(l, 1000, true)
	}
}
