package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/refusal"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// A peer over TCP that does as a broker does up to some step, and then something that
// no broker should.

// step is where it begins.
type step string

const (
	stepHeader     step = "protocol header"
	stepMechanisms step = "mechanisms"
	stepOutcome    step = "SASL outcome"
	stepOpen       step = "open"
	stepBegin      step = "begin"
	stepAttach     step = "attach"
	stepCredit     step = "credit"
	stepAnswer     step = "disposition"
	stepDelivery   step = "delivery"
	stepDrain      step = "drain"
	stepDetach     step = "detach"
	stepClose      step = "close"
	stepNever      step = "never"
)

var wireSteps = []step{stepHeader, stepMechanisms, stepOutcome, stepOpen, stepBegin, stepAttach, stepCredit, stepAnswer, stepDelivery, stepDrain, stepDetach, stepClose}

// deeds are what it does then, in place of the answer.
var deeds = map[string]func(c net.Conn, answer []byte) error{
	"closes":       func(net.Conn, []byte) error { return io.EOF },
	"says nothing": func(c net.Conn, _ []byte) error { _, err := io.Copy(io.Discard, c); return errors.Join(err, io.EOF) },
	"garbage": func(c net.Conn, _ []byte) error {
		_, err := c.Write(bytes.Repeat([]byte{0xde, 0xad, 0xbe, 0xef}, 300))
		return err
	},
	"zeros": func(c net.Conn, _ []byte) error { _, err := c.Write(make([]byte, 1000)); return err },
	"HTTP": func(c net.Conn, _ []byte) error {
		_, err := io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
		return errors.Join(err, io.EOF)
	},
	"cut halfway": func(c net.Conn, answer []byte) error {
		_, err := c.Write(answer[:len(answer)/2])
		return errors.Join(err, io.EOF)
	},
	"cut and silent": func(c net.Conn, answer []byte) error {
		_, err := c.Write(answer[:len(answer)-1])
		if err == nil {
			_, err = io.Copy(io.Discard, c)
		}
		return errors.Join(err, io.EOF)
	},
	"a huge size": func(c net.Conn, answer []byte) error {
		b := bytes.Clone(answer)
		copy(b, "\xff\xff\xff\xf0")
		_, err := c.Write(b)
		return err
	},
	"a size of nothing": func(c net.Conn, answer []byte) error {
		b := bytes.Clone(answer)
		copy(b, "\x00\x00\x00\x03")
		_, err := c.Write(b)
		return err
	},
	"byte by byte": func(c net.Conn, answer []byte) error {
		for i := range answer {
			if _, err := c.Write(answer[i : i+1]); err != nil {
				return err
			}
			time.Sleep(200 * time.Microsecond)
		}
		return nil
	},
	"another performative": func(c net.Conn, answer []byte) error {
		b := bytes.Clone(answer)
		if len(b) > performativeAt {
			b[10] = 0x10 + (b[10]+3)&7
		}
		_, err := c.Write(b)
		return err
	},
	"an unknown performative": func(c net.Conn, answer []byte) error {
		b := bytes.Clone(answer)
		if len(b) > performativeAt {
			b[10] = 0x77
		}
		_, err := c.Write(b)
		return err
	},
	"another channel": func(c net.Conn, answer []byte) error {
		b := bytes.Clone(answer)
		if len(b) > performativeAt {
			b[7] += 9
		}
		_, err := c.Write(b)
		return err
	},
	"twice": func(c net.Conn, answer []byte) error {
		_, err := c.Write(append(bytes.Clone(answer), answer...))
		return err
	},
	"without fields": func(c net.Conn, answer []byte) error {
		if len(answer) <= performativeAt {
			return io.EOF
		}
		b := append(bytes.Clone(answer[:performativeAt]), 0x45)
		binary.BigEndian.PutUint32(b, uint32(len(b)))
		_, err := c.Write(b)
		return err
	},
	"fields of the wrong types": func(c net.Conn, answer []byte) error {
		if len(answer) <= performativeAt {
			return io.EOF
		}
		b := append(bytes.Clone(answer[:performativeAt]), 0xc0, 13, 4, 0xa1, 1, 'x', 0x41, 0xc1, 1, 0, 0x82, 0, 0, 0, 0)
		b = append(b, 0, 0, 0, 0)
		binary.BigEndian.PutUint32(b, uint32(len(b)))
		_, err := c.Write(b)
		return err
	},
}

// performativeAt is where the fields of a performative begin, behind the frame's header
// and a descriptor of three bytes.
const performativeAt = frames.HeaderSize + 3

func encoded(f frames.Frame) []byte {
	b, err := frames.Append(nil, f)
	if err != nil {
		panic(err)
	}
	return b
}

func amqpFrame(channel uint16, body frames.Performative) []byte {
	return encoded(frames.Frame{Channel: channel, Body: body})
}

func saslFrame(body frames.Performative) []byte {
	return encoded(frames.Frame{Type: frames.TypeSASL, Body: body})
}

const wideWindow = 4096

// hostileServer serves until the test ends.
func hostileServer(t *testing.T, at step, deed func(net.Conn, []byte) error) string {
	return serveEach(t, func(c net.Conn) *hostilePeer { return &hostilePeer{Conn: c, at: at, deed: deed} })
}

// serveEach serves each connection with a separate peer until the test ends.
func serveEach(t *testing.T, peer func(net.Conn) *hostilePeer) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var all sync.WaitGroup
	t.Cleanup(func() {
		_ = ln.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer func() { _ = c.Close() }()
				stop := context.AfterFunc(t.Context(), func() { _ = c.Close() })
				defer stop()
				peer(c).serve()
			})
		}
	})
	return ln.Addr().String()
}

type hostilePeer struct {
	net.Conn
	at   step
	deed func(net.Conn, []byte) error
	err  error
	// alarm, if not nil, says whether sessions have an incoming-window of 0.
	alarm *atomic.Bool
	// deaf, if not nil, says that no frame arrives.
	deaf *atomic.Bool
	// sessions is how many the peer allows, by its channel-max. Default: 64.
	sessions int
	// management has the handles of the client's receivers of that node, by channel. Nothing is sent to them: a delivery
	// for each credit would go round in circles until the test ends.
	management map[uint16]uint32
}

// manages reports whether handle is a receiver of the management node's replies.
func (p *hostilePeer) manages(channel uint16, handle uint32) bool {
	h, ok := p.management[channel]
	return ok && h == handle
}

func (p *hostilePeer) channelMax() uint16 {
	if p.sessions == 0 {
		return 63
	}
	return uint16(p.sessions - 1)
}

func (p *hostilePeer) window() uint32 {
	if p.alarm != nil && p.alarm.Load() {
		return 0
	}
	return wideWindow
}

// alarmedServer is a server that has an alarm until clear is called, which sessions that
// begin then hear of.
func alarmedServer(t *testing.T) (addr string, clear func()) {
	var alarm atomic.Bool
	alarm.Store(true)
	addr = serveEach(t, func(c net.Conn) *hostilePeer { return &hostilePeer{Conn: c, alarm: &alarm} })
	return addr, func() { alarm.Store(false) }
}

func (p *hostilePeer) answer(at step, b []byte) {
	if p.err != nil {
		return
	}
	if at == p.at {
		p.err = p.deed(p.Conn, b)
		return
	}
	_, p.err = p.Write(b)
}

func (p *hostilePeer) serve() {
	r := frames.NewReader(p.Conn, 64<<10, 1<<20)
	for p.err == nil {
		if protocol, err := r.AwaitProtocol(); err == nil {
			if protocol == frames.ProtocolSASL {
				p.answer(stepHeader, protocol.Header())
				p.answer(stepMechanisms, saslFrame(&frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN"}}))
			} else {
				p.answer(stepNever, protocol.Header())
			}
			continue
		}
		f, err := r.AwaitFrame()
		if err != nil {
			return
		}
		if p.deaf == nil || !p.deaf.Load() {
			p.frame(f)
		}
	}
}

func (p *hostilePeer) frame(f frames.Frame) {
	answer := func(at step, body frames.Performative) { p.answer(at, amqpFrame(f.Channel, body)) }
	switch b := f.Body.(type) {
	case *frames.Init:
		p.answer(stepOutcome, saslFrame(&frames.Outcome{}))
	case *frames.Open:
		answer(stepOpen, &frames.Open{
			ContainerID: "x", MaxFrameSize: frames.Some[uint32](65536), ChannelMax: frames.Some(p.channelMax()),
			Properties: frames.Map{{Key: frames.Symbol("version"), Value: "4.3.0"}},
		})
	case *frames.Begin:
		if f.Channel > p.channelMax() { // as RabbitMQ does
			p.err = io.EOF
			return
		}
		answer(stepBegin, &frames.Begin{RemoteChannel: frames.Some(f.Channel), IncomingWindow: p.window(), OutgoingWindow: wideWindow, HandleMax: frames.Some[uint32](255)})
	case *frames.Attach:
		answer(stepAttach, &frames.Attach{
			Name: b.Name, Handle: b.Handle, Role: !b.Role, SenderSettleMode: b.SenderSettleMode, ReceiverSettleMode: b.ReceiverSettleMode,
			Source: &frames.Source{}, Target: &frames.Target{}, InitialDeliveryCount: frames.Some[uint32](0), MaxMessageSize: frames.Some[uint64](1 << 24),
		})
		if b.Name == managementLink && b.Role == frames.RoleReceiver {
			if p.management == nil {
				p.management = map[uint16]uint32{}
			}
			p.management[f.Channel] = b.Handle
		}
		if b.Role == frames.RoleSender {
			answer(stepCredit, p.flow(frames.Flow{Handle: frames.Some(b.Handle), DeliveryCount: frames.Some[uint32](0), LinkCredit: frames.Some[uint32](100)}))
		}
	case *frames.Flow:
		switch {
		case !b.Handle.Set:
		case b.Drain:
			used := frames.Some(b.DeliveryCount.Value + b.LinkCredit.Value)
			answer(stepDrain, p.flow(frames.Flow{Handle: b.Handle, DeliveryCount: used, LinkCredit: frames.Some[uint32](0), Drain: true}))
		case p.manages(f.Channel, b.Handle.Value):
		default:
			payload, _ := NewMessage([]byte("{}")).MarshalBinary()
			p.answer(stepDelivery, encoded(frames.Frame{Channel: f.Channel, Body: &frames.Transfer{
				Handle: b.Handle.Value, DeliveryID: frames.Some[uint32](0), DeliveryTag: []byte{0}, MessageFormat: frames.Some[uint32](0), Settled: frames.Some(false),
			}, Payload: payload}))
		}
	case *frames.Transfer:
		if b.DeliveryID.Set {
			answer(stepAnswer, &frames.Disposition{Role: frames.RoleReceiver, First: b.DeliveryID.Value, Settled: frames.Some(true), State: &frames.Accepted{}})
		}
	case *frames.Detach:
		answer(stepDetach, &frames.Detach{Handle: b.Handle, Closed: true})
	case *frames.End:
		answer(stepNever, &frames.End{})
	case *frames.Close:
		answer(stepClose, &frames.Close{})
		p.err = io.EOF
	}
}

// flow fills in the session's part.
func (p *hostilePeer) flow(f frames.Flow) *frames.Flow {
	f.NextIncomingID, f.IncomingWindow, f.OutgoingWindow = frames.Some[uint32](0), p.window(), wideWindow
	return &f
}

// The other side may do anything, at any step: what was asked ends within its
// ctx, in an error or not, and so does Close; nothing panics, nothing is left behind.
func TestHostileServers(t *testing.T) {
	const limit, slack = 400 * time.Millisecond, 5 * time.Second
	var all sync.WaitGroup
	turns := make(chan struct{}, 200)
	for _, at := range wireSteps {
		for name, deed := range deeds {
			silent := name == "says nothing" || name == "cut and silent"
			if (at == stepDrain || silent && (at == stepDelivery || at == stepDetach)) && os.Getenv("HOPBACK_LONG") == "" {
				continue // what isn't answered takes what its limits are: 20 s in all
			}
			if underRace && name == "twice" && at == stepAttach {
				continue // go-amqp writes a link's handle again, which its sender reads: harmless, but a race
			}
			all.Go(func() {
				turns <- struct{}{}
				defer func() { <-turns }()
				what := fmt.Sprintf("%s at %s", name, at)
				timed := func(call string, max time.Duration, f func(ctx context.Context)) {
					ctx, cancel := context.WithTimeout(context.Background(), max)
					defer cancel()
					began := time.Now()
					f(ctx)
					assert.Less(t, time.Since(began), max+slack, "%s: %s", what, call)
				}
				addr := hostileServer(t, at, deed)
				var conn *Conn
				timed("Connect", limit, func(ctx context.Context) {
					var err error
					conn, err = Connect(ctx, "amqp://u:p@"+addr+"/", Config{Logger: quiet, ConnectTimeout: limit, Reconnect: ReconnectBackoff{Min: 10 * time.Millisecond, Max: 50 * time.Millisecond}})
					if err != nil {
						assert.ErrorAs(t, err, new(*failure.Error), what)
						assert.True(t, failure.SafeToRetry(err), what)
					}
				})
				if conn == nil {
					return
				}
				timed("Publish", 2*limit, func(ctx context.Context) {
					p, err := NewPublisher[string](ctx, conn, address.Queue("q"), PublisherConfig{})
					if err != nil {
						assert.ErrorAs(t, err, new(*failure.Error), what)
						return
					}
					if err := p.Publish(ctx, "m"); err != nil {
						assert.ErrorAs(t, err, new(*failure.Error), what)
					}
				})
				timed("Consume", limit+drainTimeout+2*link.CloseTimeout, func(ctx context.Context) {
					ctx, cancel := context.WithTimeout(ctx, limit)
					defer cancel()
					_ = conn.Consume(ctx, "q", returns(nil), ConsumerConfig{Grace: 10 * time.Millisecond})
				})
				timed("Request", limit, func(ctx context.Context) {
					_, _, err := conn.Management().Request(ctx, "GET", "/queues/q", nil)
					assert.Error(t, err, what)
				})
				timed("Close", limit, func(ctx context.Context) { _ = conn.Close(ctx) })
			})
		}
	}
	all.Wait()
}

// The server does all as it should where nothing is to be wrong: what the test above
// shows isn't that nothing ever works.
func TestHostileServerThatBehavesIsABroker(t *testing.T) {
	addr := hostileServer(t, "", nil)
	conn, err := Connect(t.Context(), "amqp://u:p@"+addr+"/", Config{Logger: quiet})
	require.NoError(t, err)
	assert.Equal(t, "4.3.0", conn.Broker().Version)
	p, err := NewPublisher[string](t.Context(), conn, address.Queue("q"), PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), "m"))
	ctx, stop := context.WithCancel(t.Context())
	require.NoError(t, conn.Consume(ctx, "q", HandlerFunc(func(context.Context, *Delivery) error { stop(); return nil }), ConsumerConfig{}))
	require.NoError(t, conn.Close(t.Context()))
}

// A handler that finds the program at fault ends its consumer with that error. Its
// message goes back.
func TestAHandlerStopsItsConsumer(t *testing.T) {
	conn, err := Connect(t.Context(), "amqp://u:p@"+hostileServer(t, "", nil)+"/", Config{Logger: quiet})
	require.NoError(t, err)
	fault := errors.New("hidden")
	err = conn.Consume(t.Context(), "q", HandlerFunc(func(ctx context.Context, _ *Delivery) error {
		assert.True(t, refusal.Stop(ctx, fault))
		assert.NoError(t, ctx.Err(), "handlers go on")
		return Requeue{}
	}), ConsumerConfig{})
	assert.Equal(t, fault, err)
	assert.False(t, refusal.Stop(t.Context(), fault))
	require.NoError(t, conn.Close(t.Context()))
}

// deafServers are servers that send heartbeats, one for each address, to be dialed in a bubble. From
// deafen on that address' server reads nothing any more: what is sent to it goes nowhere.
func deafServers(t *testing.T) (dial func(context.Context, string, string) (net.Conn, error), deafen func(addr string)) {
	var deaf sync.Map
	var all sync.WaitGroup
	t.Cleanup(func() {
		synctest.Wait() // a connection that is closed may be dialing once more
		all.Wait()
	})
	flag := func(addr string) *atomic.Bool {
		f, _ := deaf.LoadOrStore(addr, new(atomic.Bool))
		return f.(*atomic.Bool)
	}
	dial = func(_ context.Context, _, addr string) (net.Conn, error) {
		near, far := net.Pipe()
		all.Go(func() {
			for {
				time.Sleep(200 * time.Millisecond)
				if _, err := far.Write([]byte{0, 0, 0, 8, 2, 0, 0, 0}); err != nil {
					return
				}
			}
		})
		all.Go(func() {
			defer func() { _ = far.Close() }()
			(&hostilePeer{Conn: far, deaf: flag(addr)}).serve()
		})
		return near, nil
	}
	return dial, func(addr string) { flag(addr).Store(true) }
}
