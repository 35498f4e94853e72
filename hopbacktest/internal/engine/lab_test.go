package engine

import (
	"fmt"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// lab is a broker in virtual time, and a client of it.
type lab struct {
	t    *testing.T
	b    *Broker
	conn *Connection
	s    *Session
	// published counts the messages of the lab.
	published uint32
}

// bothVersions runs a test with each version, in virtual time.
func bothVersions(t *testing.T, test func(t *testing.T, l *lab)) {
	t.Helper()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(t, newLab(t, Config{Version: version})) })
		})
	}
}

func newLab(t *testing.T, cfg Config) *lab {
	t.Helper()
	b, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(b.Close)
	l := &lab{t: t, b: b}
	l.connect()
	return l
}

func (l *lab) newer() bool { return l.b.version.newer }

// connect opens another connection, for what follows.
func (l *lab) connect() {
	l.t.Helper()
	u, err := l.b.Authenticate("PLAIN", "guest", "guest")
	require.NoError(l.t, err)
	c, refused := l.b.Connect(u, "/", Peer{})
	require.Nil(l.t, refused)
	l.conn, l.s = c, c.Begin()
}

// request sends a request to the management.
func (l *lab) request(method, path string, body any) (int, any) {
	l.t.Helper()
	value, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x77), Value: body})
	require.NoError(l.t, err)
	reply, fault := l.s.Request(&frames.Message{
		Properties: &frames.Properties{MessageID: uint64(7), To: path, Subject: frames.Some(method), ReplyTo: "$me"}, Body: value,
	})
	if fault != nil {
		return 0, fault
	}
	require.NotNil(l.t, reply)
	require.Equal(l.t, uint64(7), reply.Properties.CorrelationID)
	v, _, err := frames.ReadValue(reply.Body)
	require.NoError(l.t, err)
	var status int
	_, err = fmt.Sscan(reply.Properties.Subject.Value, &status)
	require.NoError(l.t, err)
	return status, v.(frames.Described).Value
}

// m is a map of symbols or strings to values.
type m map[string]any

func (m m) strings() frames.Map {
	out := frames.Map{}
	for k, v := range m {
		if inner, ok := v.(map[string]any); ok {
			v = inner
		}
		out = append(out, frames.Entry{Key: k, Value: v})
	}
	return out
}

func (m m) symbols() frames.Map {
	out := frames.Map{}
	for k, v := range m {
		out = append(out, frames.Entry{Key: frames.Symbol(k), Value: v})
	}
	return out
}

// quorum declares a quorum queue.
func (l *lab) quorum(name string, args m) {
	l.t.Helper()
	l.queue(name, "quorum", args)
}

func (l *lab) queue(name, kind string, args m) {
	l.t.Helper()
	all := m{"x-queue-type": kind}
	for k, v := range args {
		all[k] = v
	}
	status, body := l.request("PUT", "/queues/"+url.PathEscape(name), frames.Map{
		{Key: "durable", Value: true}, {Key: "exclusive", Value: false}, {Key: "auto_delete", Value: false}, {Key: "arguments", Value: all.strings()},
	})
	require.Equal(l.t, 201, status, "%v", body)
}

func (l *lab) exchange(name, kind string, args m) {
	l.t.Helper()
	status, body := l.request("PUT", "/exchanges/"+url.PathEscape(name), m{"type": kind, "arguments": args.strings()}.strings())
	require.Equal(l.t, 204, status, "%v", body)
}

func (l *lab) bind(source, queue, key string, args m) {
	l.t.Helper()
	status, body := l.request("POST", "/bindings", m{
		"source": source, "destination_queue": queue, "binding_key": key, "arguments": args.strings(),
	}.strings())
	require.Equal(l.t, 204, status, "%v", body)
}

func encoded(t testing.TB, edit func(*frames.Message), body string) []byte {
	t.Helper()
	data, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x75), Value: []byte(body)})
	require.NoError(t, err)
	msg := &frames.Message{Header: &frames.MessageHeader{Durable: true}, Body: data}
	if edit != nil {
		edit(msg)
	}
	b, err := msg.Append(nil)
	require.NoError(t, err)
	return b
}

func (l *lab) publisher(address any) *Publisher {
	l.t.Helper()
	p, fault := l.s.OpenPublisher(&frames.Attach{Name: "p", Target: &frames.Target{Address: address}})
	require.Nil(l.t, fault)
	return p
}

// events takes the events of the lab's connection.
func (l *lab) events() []Event { return l.conn.Take(nil) }

// outcome publishes and returns the outcome.
func (l *lab) outcome(address string, edit func(*frames.Message), body string) any {
	l.t.Helper()
	p := l.publisher(address)
	l.published++
	require.Nil(l.t, p.Publish(l.published, false, encoded(l.t, edit, body)))
	var state any
	for _, e := range l.events() {
		if e.Kind == EventConfirmed && e.ID == l.published {
			state = e.State
		}
		e.toReader()
	}
	require.NotNil(l.t, state, "no outcome")
	p.Close()
	return state
}

// put publishes to a queue and wants it accepted.
func (l *lab) put(queue string, bodies ...string) {
	l.t.Helper()
	for _, body := range bodies {
		require.IsType(l.t, &frames.Accepted{}, l.outcome("/queues/"+url.PathEscape(queue), nil, body))
	}
}

// reader is a consumer, and what it was given.
type reader struct {
	l      *lab
	conn   *Connection
	c      *Consumer
	s      *Session
	got    []*Delivery
	events []Event
}

// reader attaches to a queue on a separate session, with credit.
func (l *lab) reader(queue string, credit uint32, edit ...func(*frames.Attach)) *reader {
	l.t.Helper()
	attach := &frames.Attach{Name: "r", Role: frames.RoleReceiver, Source: &frames.Source{Address: "/queues/" + url.PathEscape(queue)}}
	for _, e := range edit {
		e(attach)
	}
	s := l.conn.Begin()
	c, fault := s.OpenConsumer(attach)
	require.Nil(l.t, fault)
	r := &reader{l: l, conn: l.conn, c: c, s: s}
	c.Tag = r
	r.flow(credit)
	return r
}

func (r *reader) flow(credit uint32) {
	r.c.Flow(&frames.Flow{Handle: frames.Some[uint32](0), DeliveryCount: frames.Some(r.c.count), LinkCredit: frames.Some(credit)})
}

// take hands the connection's events to its readers.
func (r *reader) take() {
	for _, e := range r.conn.Take(nil) {
		if !e.toReader() {
			r.events = append(r.events, e)
		}
	}
}

func (e Event) toReader() bool {
	if e.Consumer == nil || e.Consumer.Tag == nil {
		return false
	}
	r := e.Consumer.Tag.(*reader)
	r.events = append(r.events, e)
	if e.Kind == EventDelivered {
		r.got = append(r.got, e.Delivery)
	}
	return true
}

// next is the next delivery, which has to be there.
func (r *reader) next() (*Delivery, *frames.Message) {
	r.l.t.Helper()
	r.take()
	require.NotEmpty(r.l.t, r.got, "no delivery")
	d := r.got[0]
	r.got = r.got[1:]
	return d, r.l.decode(d)
}

// none wants no delivery.
func (r *reader) none() {
	r.l.t.Helper()
	r.take()
	require.Empty(r.l.t, r.got)
}

func (l *lab) decode(d *Delivery) *frames.Message {
	l.t.Helper()
	msg, err := frames.DecodeMessage(d.Append(nil))
	require.NoError(l.t, err)
	return msg
}

func (r *reader) settle(d *Delivery, state any) {
	r.l.t.Helper()
	require.Nil(r.l.t, r.s.Settle([]*Delivery{d}, state))
}

func text(msg *frames.Message) string {
	v, _, _ := frames.ReadValue(msg.Body)
	b, _ := v.(frames.Described).Value.([]byte)
	return string(b)
}

// bodies takes all that a queue has, accepts it, and returns the bodies.
func (l *lab) bodies(queue string) []string {
	l.t.Helper()
	r := l.reader(queue, 1000)
	defer r.c.Close()
	r.take()
	var all []string
	for _, d := range r.got {
		all = append(all, text(l.decode(d)))
		r.settle(d, &frames.Accepted{})
	}
	return all
}

// one takes the only message of a queue.
func (l *lab) one(queue string) *frames.Message {
	l.t.Helper()
	r := l.reader(queue, 10)
	defer r.c.Close()
	d, msg := r.next()
	r.none()
	r.settle(d, &frames.Accepted{})
	return msg
}

func ann(msg *frames.Message, key string) any {
	v, _ := msg.Annotations.Get(key)
	return v
}

func failed() *frames.Modified { return &frames.Modified{DeliveryFailed: true} }

// wait lets time pass, and the timers do what they do.
func wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestSentAndReceived(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.put("q", "a", "b")
		r := l.reader("q", 10)
		d, msg := r.next()
		assert.Equal(t, "a", text(msg))
		assert.True(t, msg.Header.Durable)
		assert.True(t, msg.Header.FirstAcquirer)
		assert.Equal(t, "", ann(msg, "x-exchange"))
		assert.Equal(t, "q", ann(msg, "x-routing-key"))
		assert.Len(t, msg.Annotations, 2)
		r.settle(d, &frames.Accepted{})
		d, msg = r.next()
		assert.Equal(t, "b", text(msg))
		r.settle(d, &frames.Released{})
		_, msg = r.next()
		assert.Equal(t, "b", text(msg))
		assert.False(t, msg.Header.FirstAcquirer)
		assert.Zero(t, msg.Header.DeliveryCount)
	})
}
