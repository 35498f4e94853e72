package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/hopbacktest/internal/vnet"
	"github.com/hopback/hopback/internal/frames"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a server, and what it has logged.
type world struct {
	t      testing.TB
	engine *engine.Broker
	server *Server
}

func newWorld(t testing.TB, version string, cfg Config) *world {
	e, err := engine.New(engine.Config{Version: version})
	require.NoError(t, err)
	cfg.Engine = e
	w := &world{t: t, engine: e, server: NewServer(cfg)}
	t.Cleanup(func() {
		w.server.Close()
		e.Close()
	})
	return w
}

// peer is a client that sends and receives frames.
type peer struct {
	t  testing.TB
	nc net.Conn
	r  *frames.Reader
}

func (w *world) dial() *peer {
	client, server := vnet.Pipe(vnet.Config{Client: "127.0.0.1:40000", Server: "127.0.0.1:5672"})
	go w.server.Serve(server)
	w.t.Cleanup(func() { _ = client.Close() })
	return &peer{t: w.t, nc: client, r: frames.NewReader(client, 64<<10, 1<<20)}
}

func (p *peer) write(b []byte) {
	_, err := p.nc.Write(b)
	require.NoError(p.t, err)
}

// send sends frames on a channel.
func (p *peer) send(channel uint16, bodies ...frames.Performative) {
	var b []byte
	var err error
	for _, body := range bodies {
		b, err = frames.Append(b, frames.Frame{Channel: channel, Body: body})
		require.NoError(p.t, err)
	}
	p.write(b)
}

func (p *peer) transfer(channel uint16, t *frames.Transfer, payload []byte) {
	b, err := frames.Append(nil, frames.Frame{Channel: channel, Body: t, Payload: payload})
	require.NoError(p.t, err)
	p.write(b)
}

// next is the next frame that isn't empty.
func (p *peer) next() frames.Frame {
	p.t.Helper()
	for {
		f, err := p.r.AwaitFrame()
		require.NoError(p.t, err)
		if f.Body != nil {
			return f
		}
	}
}

// expect is the next frame's body, which must be a T.
func expect[T frames.Performative](p *peer) T {
	p.t.Helper()
	f := p.next()
	body, ok := f.Body.(T)
	require.True(p.t, ok, "a %T: %+v", f.Body, f.Body)
	return body
}

// closed says that the server closes the connection without a further frame.
func (p *peer) closed() {
	p.t.Helper()
	_, err := p.r.AwaitFrame()
	require.Error(p.t, err)
	assert.True(p.t, errors.Is(err, io.EOF), err)
}

func plain(user, password string) []byte { return []byte("\x00" + user + "\x00" + password) }

// open goes as far as the broker's open frame.
func (p *peer) open(change func(*frames.Open)) *frames.Open {
	p.t.Helper()
	p.login("guest", "guest", 0)
	p.write(frames.ProtocolAMQP.Header())
	protocol, err := p.r.AwaitProtocol()
	require.NoError(p.t, err)
	require.Equal(p.t, frames.ProtocolAMQP, protocol)
	open := &frames.Open{ContainerID: "test", Hostname: "vhost:/"}
	if change != nil {
		change(open)
	}
	p.send(0, open)
	return expect[*frames.Open](p)
}

func (p *peer) login(user, password string, code uint8) {
	p.t.Helper()
	p.write(frames.ProtocolSASL.Header())
	protocol, err := p.r.AwaitProtocol()
	require.NoError(p.t, err)
	require.Equal(p.t, frames.ProtocolSASL, protocol)
	expect[*frames.Mechanisms](p)
	b, err := frames.Append(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Init{Mechanism: "PLAIN", InitialResponse: plain(user, password)}})
	require.NoError(p.t, err)
	p.write(b)
	require.Equal(p.t, code, expect[*frames.Outcome](p).Code)
}

// begin begins a session on a channel.
func (p *peer) begin(channel uint16) *frames.Begin {
	p.t.Helper()
	p.send(channel, &frames.Begin{IncomingWindow: 5000, OutgoingWindow: 5000})
	return expect[*frames.Begin](p)
}

// declare declares a queue with a management request, on a separate session.
func (p *peer) declare(channel uint16, queue string) {
	p.t.Helper()
	reply := p.manage(channel, "PUT", "/queues/"+queue, frames.Map{
		{Key: "durable", Value: true},
		{Key: "arguments", Value: frames.Map{{Key: "x-queue-type", Value: "quorum"}}},
	})
	require.Equal(p.t, "201", reply.Properties.Subject.Value)
}

func paired() frames.Map { return frames.Map{{Key: frames.Symbol("paired"), Value: true}} }

// pair attaches a pair of links to the management, with handles 0 and 1.
func (p *peer) pair(channel uint16, credit uint32) {
	p.t.Helper()
	node := managementNode
	p.send(channel, &frames.Attach{Name: "m", Handle: 1, Role: frames.RoleReceiver, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: node}, Target: &frames.Target{Address: "$me"}, Properties: paired()})
	expect[*frames.Attach](p)
	p.send(channel, &frames.Flow{IncomingWindow: 5000, OutgoingWindow: 5000, Handle: frames.Some[uint32](1), DeliveryCount: frames.Some[uint32](0), LinkCredit: frames.Some(credit)})
	p.send(channel, &frames.Attach{Name: "m", Handle: 0, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: "$me"}, Target: &frames.Target{Address: node}, InitialDeliveryCount: frames.Some[uint32](0), Properties: paired()})
	expect[*frames.Attach](p)
	assert.Equal(p.t, uint32(requestCredit), expect[*frames.Flow](p).LinkCredit.Value)
}

func request(method, path string, body any) []byte {
	value, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x77), Value: body})
	if err != nil {
		panic(err)
	}
	m := frames.Message{
		Properties: &frames.Properties{MessageID: uint64(7), To: path, Subject: frames.Some(method), ReplyTo: "$me"},
		Body:       value,
	}
	b, err := m.Append(nil)
	if err != nil {
		panic(err)
	}
	return b
}

func (p *peer) manage(channel uint16, method, path string, body any) *frames.Message {
	p.t.Helper()
	p.begin(channel)
	p.pair(channel, 10)
	p.transfer(channel, &frames.Transfer{Handle: 0, DeliveryID: frames.Some[uint32](0), DeliveryTag: []byte{}, Settled: frames.Some(true)}, request(method, path, body))
	f := p.next()
	require.IsType(p.t, &frames.Transfer{}, f.Body)
	m, err := frames.DecodeMessage(f.Payload)
	require.NoError(p.t, err)
	assert.Equal(p.t, uint64(7), m.Properties.CorrelationID)
	p.send(channel, &frames.End{})
	expect[*frames.End](p)
	return m
}

func target(queue string) *frames.Attach {
	return &frames.Attach{Name: "to " + queue, Handle: 0, Source: &frames.Source{}, Target: &frames.Target{Address: "/queues/" + queue}, InitialDeliveryCount: frames.Some[uint32](0)}
}

func source(queue string) *frames.Attach {
	return &frames.Attach{Name: "from " + queue, Handle: 1, Role: frames.RoleReceiver, Source: &frames.Source{Address: "/queues/" + queue}, Target: &frames.Target{}}
}

// body is a message with one data section.
func body(text []byte) []byte {
	b, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x75), Value: text})
	if err != nil {
		panic(err)
	}
	return b
}

func (p *peer) publish(channel uint16, id uint32, text []byte) {
	p.transfer(channel, &frames.Transfer{Handle: 0, DeliveryID: frames.Some(id), DeliveryTag: []byte{byte(id)}, MessageFormat: frames.Some[uint32](0)}, body(text))
}

func (p *peer) credit(channel uint16, handle, count, credit uint32, drain bool) {
	p.send(channel, &frames.Flow{IncomingWindow: 5000, OutgoingWindow: 5000, Handle: frames.Some(handle), DeliveryCount: frames.Some(count), LinkCredit: frames.Some(credit), Drain: drain})
}

// message joins the transfer frames of a delivery.
func (p *peer) message() (first *frames.Transfer, payload []byte, n int) {
	p.t.Helper()
	for {
		f := p.next()
		t, ok := f.Body.(*frames.Transfer)
		require.True(p.t, ok, "a %T: %+v", f.Body, f.Body)
		if first == nil {
			first = t
		}
		payload = append(payload, f.Payload...)
		n++
		if !t.More {
			return first, payload, n
		}
	}
}

func data(t testing.TB, payload []byte) []byte {
	t.Helper()
	m, err := frames.DecodeMessage(payload)
	require.NoError(t, err)
	v, _, err := frames.ReadValue(m.Body)
	require.NoError(t, err)
	b, ok := v.(frames.Described).Value.([]byte)
	require.True(t, ok)
	return bytes.Clone(b)
}
