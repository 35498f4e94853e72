package dedicated

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/userid"
)

// to dials the end of a pipe; nil can't be reached.
type to struct{ net.Conn }

func (to to) Dial(context.Context, int) (link.Dialed, error) {
	if to.Conn == nil {
		return link.Dialed{}, errors.New("nobody is there")
	}
	return link.Dialed{Net: to, Host: "vhost:/", Name: "test", Shown: "broker", Mechanism: "PLAIN", Response: []byte("\x00u\x00p"), IdleTimeout: time.Minute, Login: userid.NewLogin("u", false)}, nil
}

func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			println(err.Error())
			code = 1
		}
	}
	os.Exit(code)
}

// limit is for what hangs.
const limit = time.Minute

// fakeBroker is the other end of a Conn.
type fakeBroker struct {
	t   testing.TB
	net net.Conn
	r   *frames.Reader
}

// serve runs script as the broker, behind the handshake, and returns the client's end.
func serve(t testing.TB, script func(b *fakeBroker)) (*Conn, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	near, wait := broker(t, func(b *fakeBroker) {
		b.hello()
		script(b)
	})
	c, err := Open(ctx, to{near})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		_ = c.Close(ctx)
		wait()
	})
	return c, ctx
}

func broker(t testing.TB, script func(b *fakeBroker)) (near net.Conn, wait func()) {
	t.Helper()
	near, far := net.Pipe()
	_ = far.SetDeadline(time.Now().Add(limit))
	var over sync.WaitGroup
	over.Go(func() {
		script(&fakeBroker{t, far, frames.NewReader(far, 64<<10, 1<<20)})
		_, _ = io.Copy(io.Discard, far) // until the client is gone
		_ = far.Close()
	})
	return near, over.Wait
}

// get returns the next performative, without signs of life.
func (b *fakeBroker) get() (frames.Performative, []byte) {
	for {
		f, err := b.r.AwaitFrame()
		if err != nil {
			return nil, nil
		}
		if f.Body != nil {
			return f.Body, f.Payload
		}
	}
}

func (b *fakeBroker) put(p frames.Performative, payload ...byte) {
	out, err := frames.Append(nil, frames.Frame{Body: p, Payload: payload})
	if assert.NoError(b.t, err) {
		_, _ = b.net.Write(out)
	}
}

// login is the handshake to where the client asks for the virtual host.
func (b *fakeBroker) login() {
	_, _ = b.r.AwaitProtocol()
	_, _ = b.net.Write(frames.ProtocolSASL.Header())
	out, err := frames.Append(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN"}}})
	assert.NoError(b.t, err)
	_, _ = b.net.Write(out)
	b.get() // init
	out, err = frames.Append(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Outcome{}})
	assert.NoError(b.t, err)
	_, _ = b.net.Write(out)
	_, _ = b.r.AwaitProtocol()
	b.get() // open
	_, _ = b.net.Write(frames.ProtocolAMQP.Header())
}

func (b *fakeBroker) hello() {
	b.login()
	b.put(&frames.Open{ContainerID: "broker", MaxFrameSize: frames.Some(uint32(1024))})
}

// begun answers the begin of the session, which comes with the first link.
func (b *fakeBroker) begun() {
	b.get()
	b.put(&frames.Begin{RemoteChannel: frames.Some(uint16(0)), NextOutgoingID: 7, IncomingWindow: 3, OutgoingWindow: 100})
}

// attached answers an attach, and gives a sender credit.
func (b *fakeBroker) attached(credit uint32) *frames.Attach {
	p, _ := b.get()
	switch p.(type) {
	case *frames.Begin:
		b.put(&frames.Begin{RemoteChannel: frames.Some(uint16(0)), NextOutgoingID: 7, IncomingWindow: 3, OutgoingWindow: 100})
		p, _ = b.get()
	case *frames.Flow:
		p, _ = b.get()
	}
	a, ok := p.(*frames.Attach)
	if !assert.True(b.t, ok, "%T", p) {
		return &frames.Attach{}
	}
	b.put(&frames.Attach{Name: a.Name, Handle: a.Handle + 40, Role: !a.Role, Source: a.Source, Target: a.Target, InitialDeliveryCount: frames.Some(uint32(0xffffffff))})
	if a.Role == frames.RoleSender {
		b.put(&frames.Flow{IncomingWindow: 3, NextIncomingID: frames.Some(uint32(0)), Handle: frames.Some(a.Handle + 40), DeliveryCount: frames.Some(uint32(0)), LinkCredit: frames.Some(credit)})
	}
	return a
}

// asked waits for a flow with credit.
func (b *fakeBroker) asked() *frames.Flow {
	for {
		p, _ := b.get()
		f, ok := p.(*frames.Flow)
		if p == nil || ok && f.Handle.Set && f.LinkCredit.Or(0) > 0 {
			return f
		}
	}
}

// deliver sends a message in parts.
func (b *fakeBroker) deliver(id uint32, parts ...string) {
	for i, part := range parts {
		t := &frames.Transfer{Handle: 40, More: i < len(parts)-1}
		if i == 0 {
			t.DeliveryID, t.DeliveryTag = frames.Some(id), []byte{1}
		}
		b.put(t, []byte(part)...)
	}
}

// drained ends a drain whose flow was f.
func (b *fakeBroker) drained(f *frames.Flow) {
	b.put(&frames.Flow{IncomingWindow: 3, Handle: frames.Some(uint32(40)), DeliveryCount: frames.Some(f.DeliveryCount.Or(0) + f.LinkCredit.Or(0)), LinkCredit: frames.Some(uint32(0)), Drain: true})
}

func fetch(ctx context.Context, r *Receiver, n uint32) (got []string, last *uint32, err error) {
	_, last, err = r.Fetch(ctx, n, func(d Delivery) error {
		got = append(got, string(d.Payload))
		return nil
	})
	return got, last, err
}

// A batch ends where the queue has no more, or where all that was asked for is there. The
// delivery-count continues over 2^32, and messages may come in parts.
func TestFetch(t *testing.T) {
	t.Parallel()
	settled := make(chan *frames.Disposition, 1)
	c, ctx := serve(t, func(b *fakeBroker) {
		b.attached(0)
		f := b.asked()
		assert.Equal(t, uint32(0xffffffff), f.DeliveryCount.Value)
		b.deliver(5, "a")
		b.deliver(6, "b1", "", "b2")
		b.drained(f)
		f = b.asked()
		assert.Equal(t, uint32(2), f.DeliveryCount.Value)
		b.deliver(7, "c")
		b.deliver(8, "d")
		p, _ := b.get()
		d, _ := p.(*frames.Disposition)
		settled <- d
	})
	r, err := c.Receiver(ctx, "/queues/q")
	require.NoError(t, err)
	got, last, err := fetch(ctx, r, 3)
	require.NoError(t, err)
	assert.Equal(t, []string{"a", "b1b2"}, got)
	assert.Equal(t, uint32(6), *last)
	got, _, err = fetch(ctx, r, 2)
	require.NoError(t, err)
	assert.Equal(t, []string{"c", "d"}, got)
	require.NoError(t, r.Move(ctx, 8, frames.Map{{Key: frames.Symbol("x-opt-a"), Value: "b"}}))
	d := <-settled
	require.NotNil(t, d)
	m, ok := d.State.(*frames.Modified)
	require.True(t, ok)
	assert.True(t, m.UndeliverableHere && !m.DeliveryFailed && d.Settled.Value)
	assert.Equal(t, frames.Map{{Key: frames.Symbol("x-opt-a"), Value: "b"}}, m.Annotations)
}

// An error of take ends its calls, and the batch is received to its end.
func TestFetchGoesOnBehindAnErrorOfTake(t *testing.T) {
	t.Parallel()
	c, ctx := serve(t, func(b *fakeBroker) {
		b.attached(0)
		f := b.asked()
		b.deliver(0, "a")
		b.deliver(1, "b")
		b.drained(f)
	})
	r, err := c.Receiver(ctx, "/queues/q")
	require.NoError(t, err)
	enough := errors.New("enough")
	calls := 0
	got, last, err := r.Fetch(ctx, 5, func(Delivery) error { calls++; return enough })
	require.ErrorIs(t, err, enough)
	assert.EqualValues(t, 2, got)
	assert.EqualValues(t, 1, *last)
	assert.Equal(t, 1, calls)
}

// A sender waits for the link's credit and the session's window, cuts messages into frames,
// and reports each answer once.
func TestSend(t *testing.T) {
	t.Parallel()
	whole := make(chan string, 1)
	c, ctx := serve(t, func(b *fakeBroker) {
		b.attached(1)
		var payload []byte
		for more, n := true, 0; more; n++ {
			if n == 3 { // as many as fit into the window
				b.put(&frames.Flow{IncomingWindow: 3, NextIncomingID: frames.Some(uint32(3))})
			}
			p, part := b.get()
			tr, ok := p.(*frames.Transfer)
			if !assert.True(t, ok, "%T", p) {
				return
			}
			assert.LessOrEqual(t, len(part), 1024)
			payload, more = append(payload, part...), tr.More
		}
		whole <- string(payload)
		b.put(&frames.Disposition{Role: frames.RoleReceiver, First: 0, Last: frames.Some(uint32(0)), Settled: frames.Some(true), State: &frames.Accepted{}})
		states := []any{&frames.Released{}, &frames.Modified{}, &frames.Rejected{Error: &frames.Error{Condition: "amqp:resource-limit-exceeded", Description: "full"}}, &frames.Rejected{}}
		for i, state := range states {
			id := uint32(i + 1)
			b.put(&frames.Flow{IncomingWindow: 9, NextIncomingID: frames.Some(3 + id), Handle: frames.Some(uint32(40)), DeliveryCount: frames.Some(id), LinkCredit: frames.Some(uint32(1))})
			b.get()
			b.put(&frames.Disposition{Role: frames.RoleReceiver, First: id, Settled: frames.Some(true), State: state})
		}
	})
	answers := make(chan error, 10)
	notify := func(err error) { answers <- err }
	body := bytes.Repeat([]byte("x"), 3500)
	require.NoError(t, c.Send(ctx, "/queues/q", body, notify))
	assert.Equal(t, string(body), <-whole)
	require.NoError(t, <-answers)
	for _, want := range []string{ErrReleased.Error(), ErrModified.Error(), "amqp:resource-limit-exceeded: full", "rejected"} {
		require.NoError(t, c.Send(ctx, "/queues/q", []byte("m"), notify))
		require.EqualError(t, <-answers, want)
	}
	assert.Empty(t, answers)
}

// What the broker refuses says why, whether the link, the session, the connection or the
// login.
func TestRefusals(t *testing.T) {
	t.Parallel()
	no := &frames.Error{Condition: "amqp:not-found", Description: "no queue"}
	for name, script := range map[string]func(b *fakeBroker){
		"link": func(b *fakeBroker) {
			b.begun()
			p, _ := b.get()
			a := p.(*frames.Attach)
			b.put(&frames.Attach{Name: a.Name, Handle: 40, Role: frames.RoleReceiver, Source: a.Source}) // without a target
			b.put(&frames.Detach{Handle: 40, Closed: true, Error: no})
		},
		"session":    func(b *fakeBroker) { b.begun(); b.get(); b.put(&frames.End{Error: no}) },
		"connection": func(b *fakeBroker) { b.begun(); b.get(); b.put(&frames.Close{Error: no}) },
	} {
		c, ctx := serve(t, script)
		err := c.Send(ctx, "/queues/q", []byte("m"), func(error) { t.Error("it wasn't sent") })
		var refused *RefusedError
		require.ErrorAs(t, err, &refused, name)
		assert.Equal(t, RefusedError{"amqp:not-found", "no queue"}, *refused)
	}
}

// Messages that are unanswered when their link or connection ends get that error, once.
func TestUnansweredMessagesAreToldOf(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(b *fakeBroker){
		"detach": func(b *fakeBroker) { b.put(&frames.Detach{Handle: 40, Closed: true}) },
		"end":    func(b *fakeBroker) { b.put(&frames.End{}) },
		"close":  func(b *fakeBroker) { b.put(&frames.Close{}) },
		"cut":    func(b *fakeBroker) { _ = b.net.Close() },
	} {
		c, ctx := serve(t, func(b *fakeBroker) {
			b.attached(5)
			b.get()
			b.get()
			end(b)
		})
		answers := make(chan error, 10)
		for range 2 {
			require.NoError(t, c.Send(ctx, "/queues/q", []byte("m"), func(err error) { answers <- err }))
		}
		for range 2 {
			require.ErrorAs(t, <-answers, new(*LostError), name)
		}
		assert.Empty(t, answers)
	}
}

// Close ends links, session and connection in order, in each state, within its ctx.
func TestCloseInEachState(t *testing.T) {
	t.Parallel()
	polite := func(b *fakeBroker) {
		for {
			switch p, _ := b.get(); p := p.(type) {
			case *frames.Begin:
				b.put(&frames.Begin{RemoteChannel: frames.Some(uint16(0)), IncomingWindow: 3})
			case *frames.Detach:
				b.put(&frames.Detach{Handle: p.Handle + 40, Closed: true})
			case *frames.End:
				b.put(&frames.End{})
			case *frames.Close:
				b.put(&frames.Close{})
				return
			case nil:
				return
			}
		}
	}
	silent := func(b *fakeBroker) {
		for p, _ := b.get(); p != nil; p, _ = b.get() {
		}
	}
	for name, c := range map[string]struct {
		attach bool
		behave func(b *fakeBroker)
		fails  bool
	}{
		"no link":                       {behave: polite},
		"a link":                        {attach: true, behave: polite},
		"no link, a silent broker":      {behave: silent, fails: true},
		"a link, a silent broker":       {attach: true, behave: silent, fails: true},
		"a broker that is gone":         {behave: func(b *fakeBroker) { _ = b.net.Close() }, fails: true},
		"a broker that closes, as well": {behave: func(b *fakeBroker) { b.put(&frames.Close{}) }, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, ctx := serve(t, func(b *fakeBroker) {
				if c.attach {
					b.attached(0)
				}
				c.behave(b)
			})
			if c.attach {
				_, err := conn.Receiver(ctx, "/queues/q")
				require.NoError(t, err)
			}
			if !c.fails {
				require.NoError(t, conn.Close(ctx))
			} else {
				ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
				_ = conn.Close(ctx) // it may come before the broker's end
			}
			<-conn.Done()
			require.Error(t, conn.Err())
			_, err := conn.Receiver(ctx, "/queues/q")
			require.Error(t, err)
			require.Error(t, conn.Send(ctx, "/queues/q", nil, func(error) {}))
			require.Error(t, conn.Close(ctx), "it says why it had ended")
		})
	}
}

// A ctx that ends is obeyed wherever there is something to wait for.
func TestWaitsEndWithTheirContext(t *testing.T) {
	t.Parallel()
	gone, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	cancel(why)

	near, wait := broker(t, func(b *fakeBroker) {})
	_, err := Open(gone, to{near})
	require.ErrorIs(t, err, why)
	wait()
	_, err = Open(t.Context(), to{nil})
	require.ErrorContains(t, err, "nobody is there")

	c, ctx := serve(t, func(b *fakeBroker) {
		b.attached(0)
		b.attached(1)
	})
	r, err := c.Receiver(ctx, "/queues/q")
	require.NoError(t, err)
	_, _, err = fetch(gone, r, 1)
	require.ErrorIs(t, err, why)
	require.NoError(t, c.Send(ctx, "/queues/q", []byte("m"), func(error) {}))
	require.ErrorIs(t, c.Send(gone, "/queues/q", []byte("m"), func(error) {}), why)
	require.ErrorIs(t, c.Send(gone, "/queues/another", []byte("m"), func(error) {}), why)
}

// A broker that breaks the protocol ends what waits for it.
func TestHostileBroker(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]func(b *fakeBroker){
		"a transfer on no link":    func(b *fakeBroker) { b.attached(0); b.put(&frames.Transfer{Handle: 3}) },
		"a transfer without an id": func(b *fakeBroker) { b.attached(0); b.put(&frames.Transfer{Handle: 40}) },
		"more than was asked for":  func(b *fakeBroker) { b.attached(0); b.asked(); b.deliverAtOnce(101) },
		"rubbish":                  func(b *fakeBroker) { b.attached(0); _, _ = b.net.Write([]byte("rubbish rubbish rubbish")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, ctx := serve(t, script)
			r, err := c.Receiver(ctx, "/queues/q")
			if err == nil {
				for err == nil {
					_, _, err = fetch(ctx, r, 100)
				}
			}
			require.Error(t, err)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
		})
	}
	for name, script := range map[string]func(b *fakeBroker){
		"no SASL":           func(b *fakeBroker) { _, _ = b.r.AwaitProtocol(); _, _ = b.net.Write(frames.ProtocolAMQP.Header()) },
		"begin before open": func(b *fakeBroker) { b.login(); b.put(&frames.Begin{IncomingWindow: 9}) },
		"close": func(b *fakeBroker) {
			b.login()
			b.put(&frames.Close{Error: &frames.Error{Condition: "amqp:not-allowed"}})
		},
		"cut": func(b *fakeBroker) { b.login(); _ = b.net.Close() },
	} {
		near, wait := broker(t, func(b *fakeBroker) {
			script(b)
			_ = b.net.Close()
		})
		_, err := Open(t.Context(), to{near})
		require.Error(t, err, name)
		assert.Contains(t, err.Error(), "broker", name) // its endpoint
		wait()
	}
}

// A sender keeps links to a bounded number of addresses.
func TestLinksAreBounded(t *testing.T) {
	t.Parallel()
	most := 0
	c, ctx := serve(t, func(b *fakeBroker) {
		open := map[uint32]bool{}
		for {
			switch p, _ := b.get(); p := p.(type) {
			case *frames.Begin:
				b.put(&frames.Begin{RemoteChannel: frames.Some(uint16(0)), IncomingWindow: 1000})
			case *frames.Attach:
				open[p.Handle] = true
				most = max(most, len(open))
				b.put(&frames.Attach{Name: p.Name, Handle: p.Handle + 40, Role: !p.Role, Source: p.Source, Target: p.Target})
				b.put(&frames.Flow{IncomingWindow: 1000, Handle: frames.Some(p.Handle + 40), DeliveryCount: frames.Some(uint32(0)), LinkCredit: frames.Some(uint32(10))})
			case *frames.Transfer:
				b.put(&frames.Disposition{Role: frames.RoleReceiver, First: p.DeliveryID.Value, Settled: frames.Some(true), State: &frames.Accepted{}})
			case *frames.Detach:
				delete(open, p.Handle)
				b.put(&frames.Detach{Handle: p.Handle + 40, Closed: true})
			case nil:
				return
			}
		}
	})
	for i := range 3 * maxSenders {
		answered := make(chan error, 1)
		require.NoError(t, c.Send(ctx, "/queues/"+string(rune('a'+i)), []byte("m"), func(err error) { answered <- err }))
		require.NoError(t, <-answered)
	}
	ctx2, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_ = c.Close(ctx2)
	assert.LessOrEqual(t, most, maxSenders+1)
}

// No input from a broker, in the handshake or after it, causes a panic, and all waits end.
func FuzzBroker(f *testing.F) {
	add := func(ps ...frames.Performative) {
		var b []byte
		for _, p := range ps {
			b, _ = frames.Append(b, frames.Frame{Body: p, Payload: []byte("payload")})
		}
		f.Add(true, b)
		f.Add(false, b)
	}
	f.Add(false, frames.ProtocolAMQP.Header())
	add(&frames.Transfer{Handle: 40, DeliveryID: frames.Some(uint32(1))}, &frames.Flow{Handle: frames.Some(uint32(40)), DeliveryCount: frames.Some(uint32(4)), LinkCredit: frames.Some(uint32(0))})
	add(&frames.Detach{Handle: 40}, &frames.Detach{Handle: 41}, &frames.Transfer{Handle: 40})
	add(&frames.Disposition{Role: frames.RoleReceiver, Last: frames.Some(uint32(9)), State: &frames.Rejected{}}, &frames.End{}, &frames.Close{})
	add(&frames.Open{ContainerID: "x", MaxFrameSize: frames.Some(uint32(1))}, &frames.Begin{})
	f.Fuzz(func(t *testing.T, greeted bool, data []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		near, wait := broker(t, func(b *fakeBroker) {
			if greeted {
				b.hello()
				b.attached(0)
				b.attached(2)
			} else {
				b.login()
			}
			go func() { _, _ = b.net.Write(data); _ = b.net.Close() }()
		})
		defer wait()
		c, err := Open(ctx, to{near})
		if err != nil {
			return
		}
		defer func() { _ = c.Close(ctx) }()
		if r, err := c.Receiver(ctx, "/queues/q"); err == nil {
			_ = c.Send(ctx, "/queues/p", bytes.Repeat([]byte("m"), 5000), func(error) {})
			_, last, _ := fetch(ctx, r, 4)
			if last != nil {
				_ = r.Accept(*last, *last)
				_ = r.Move(ctx, *last, nil)
			}
			_ = r.Requeue(0, 3)
		}
		select {
		case <-c.Done():
		case <-ctx.Done():
			t.Fatal("the end of the connection isn't noticed")
		}
	})
}
