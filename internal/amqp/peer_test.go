package amqp

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/internal/frames"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// peer is the other end of a connection: a script writes its frames by hand.
type peer struct {
	t   testing.TB
	net net.Conn
	r   *frames.Reader
	got chan frames.Frame // what comes, without empty frames; closed when the connection is
	mu  sync.Mutex
}

// pair returns a connection and its peer, in a bubble of virtual time.
func pair(t *testing.T, cfg Config, test func(t *testing.T, c *Conn, p *peer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c, p := connect(t, cfg, &frames.Open{ContainerID: "peer", MaxFrameSize: frames.Some(uint32(4096)), ChannelMax: frames.Some(uint16(63))})
		test(t, c, p)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_ = c.Close(ctx)
		_ = p.net.Close()
		synctest.Wait()
	})
}

func connect(t testing.TB, cfg Config, open *frames.Open) (*Conn, *peer) {
	t.Helper()
	near, far := net.Pipe()
	p := &peer{t: t, net: far, r: frames.NewReader(far, 64<<10, 1<<20), got: make(chan frames.Frame, 10_000)}
	var handshake sync.WaitGroup
	handshake.Go(func() { p.handshake(open) })
	c, err := Open(t.Context(), near, cfg)
	require.NoError(t, err)
	handshake.Wait()
	go p.read()
	return c, p
}

func (p *peer) handshake(open *frames.Open) {
	_, _ = p.r.AwaitProtocol()
	_, _ = p.net.Write(frames.ProtocolSASL.Header())
	p.write(frames.Frame{Type: frames.TypeSASL, Body: &frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN", "ANONYMOUS", ""}}})
	_, _ = p.r.AwaitFrame() // init
	p.write(frames.Frame{Type: frames.TypeSASL, Body: &frames.Outcome{}})
	_, _ = p.r.AwaitProtocol()
	_, _ = p.net.Write(frames.ProtocolAMQP.Header())
	_, _ = p.r.AwaitFrame() // open
	p.write(frames.Frame{Body: open})
}

func (p *peer) read() {
	defer close(p.got)
	for {
		f, err := p.r.AwaitFrame()
		if err != nil {
			return
		}
		if f.Body != nil {
			p.got <- f
		}
	}
}

func (p *peer) write(all ...frames.Frame) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var b []byte
	for _, f := range all {
		var err error
		b, err = frames.Append(b, f)
		require.NoError(p.t, err)
	}
	_, _ = p.net.Write(b)
}

func (p *peer) send(channel uint16, all ...frames.Performative) {
	fs := make([]frames.Frame, len(all))
	for i, b := range all {
		fs[i] = frames.Frame{Channel: channel, Body: b}
	}
	p.write(fs...)
}

// next returns the next frame, which must be a T.
func next[T frames.Performative](p *peer) T {
	p.t.Helper()
	b, _ := nextFrame[T](p)
	return b
}

func nextFrame[T frames.Performative](p *peer) (T, frames.Frame) {
	p.t.Helper()
	select {
	case f, ok := <-p.got:
		if !ok {
			require.Fail(p.t, "the connection is closed")
		}
		b, ok := f.Body.(T)
		require.True(p.t, ok, "%T: %+v", f.Body, f.Body)
		return b, f
	case <-time.After(time.Hour):
		var zero T
		require.Fail(p.t, "nothing comes", "%T", zero)
		return zero, frames.Frame{}
	}
}

// nothing checks that no frame has come.
func (p *peer) nothing() {
	p.t.Helper()
	synctest.Wait()
	select {
	case f, ok := <-p.got:
		if ok {
			require.Fail(p.t, "a frame too many", "%T %+v", f.Body, f.Body)
		}
	default:
	}
}

// begin begins a session at both ends.
func (p *peer) begin(c *Conn, cfg SessionConfig) *Session {
	p.t.Helper()
	s, err := together(p, func() (*Session, error) { return c.Begin(p.t.Context(), cfg) }, func() {
		_, f := nextFrame[*frames.Begin](p)
		p.send(f.Channel, &frames.Begin{RemoteChannel: frames.Some(f.Channel), IncomingWindow: 1000, OutgoingWindow: 1000, NextOutgoingID: 7})
	})
	require.NoError(p.t, err)
	return s
}

// together runs a call and the peer's part in it.
func together[T any](p *peer, call func() (T, error), script func()) (T, error) {
	p.t.Helper()
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		v, err := call()
		done <- result{v, err}
	}()
	script()
	r := <-done
	return r.v, r.err
}

// record is what a link's callbacks were called with.
type record struct {
	mu       sync.Mutex
	payloads []string
	ids      []uint32
	ends     []error
	answers  []Answer
	drained  int
	states   []string
	flows    []frames.Map

	onDelivery func(*Delivery) // called with mu held, and in place of keeping the delivery; may be nil
}

func (r *record) locked(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *record) receiver(source string) ReceiverConfig {
	return ReceiverConfig{Source: &frames.Source{Address: source}, Events: r}
}

func (r *record) Delivered(d *Delivery) {
	r.locked(func() {
		if r.onDelivery != nil {
			r.onDelivery(d)
			return
		}
		r.payloads = append(r.payloads, string(d.Payload))
		r.ids = append(r.ids, d.ID)
	})
}

func (r *record) Drained(uint32)      { r.locked(func() { r.drained++ }) }
func (r *record) Ended(err error)     { r.locked(func() { r.ends = append(r.ends, err) }) }
func (r *record) Flowed(m frames.Map) { r.locked(func() { r.flows = append(r.flows, m) }) }

func (r *record) StateChanged(first, last uint32) {
	r.locked(func() { r.states = append(r.states, fmt.Sprintf("%d-%d", first, last)) })
}

func (r *record) Answered(_ *Sending, a Answer) {
	r.locked(func() { r.answers = append(r.answers, a) })
}

func (r *record) sending(payload string) *Sending { return &Sending{Payload: []byte(payload), To: r} }

// receive attaches a receiver; the peer's handle is 20 above this end's.
func (p *peer) receive(s *Session, cfg ReceiverConfig) *Receiver {
	p.t.Helper()
	r, err := together(p, func() (*Receiver, error) { return s.Receiver(p.t.Context(), cfg) }, func() {
		a, f := nextFrame[*frames.Attach](p)
		p.send(f.Channel, &frames.Attach{Name: a.Name, Handle: a.Handle + 20, Role: frames.RoleSender, Source: a.Source, Target: a.Target, InitialDeliveryCount: frames.Some(uint32(100))})
	})
	require.NoError(p.t, err)
	return r
}

// sender attaches a sender with credit.
func (p *peer) sender(s *Session, cfg SenderConfig, credit uint32) *Sender {
	p.t.Helper()
	l, err := together(p, func() (*Sender, error) { return s.Sender(p.t.Context(), cfg) }, func() {
		a, f := nextFrame[*frames.Attach](p)
		p.send(f.Channel, &frames.Attach{Name: a.Name, Handle: a.Handle + 20, Role: frames.RoleReceiver, Source: a.Source, Target: a.Target})
		if credit > 0 {
			p.credit(f.Channel, a.Handle+20, 0, credit)
		}
	})
	require.NoError(p.t, err)
	return l
}

func (p *peer) credit(channel uint16, handle, count, credit uint32) {
	p.send(channel, &frames.Flow{NextIncomingID: frames.Some(uint32(0)), IncomingWindow: 1000, OutgoingWindow: 1000, Handle: frames.Some(handle), DeliveryCount: frames.Some(count), LinkCredit: frames.Some(credit)})
}

// deliver sends a message of one frame.
func (p *peer) deliver(channel uint16, handle, id uint32, payload string) {
	p.write(frames.Frame{Channel: channel, Body: &frames.Transfer{Handle: handle, DeliveryID: frames.Some(id), DeliveryTag: []byte{1}, MessageFormat: frames.Some(uint32(0))}, Payload: []byte(payload)})
}

// Messages go out in order, as credit and window allow, and each gets the peer's answer.
func TestSend(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		l := p.sender(s, SenderConfig{Target: &frames.Target{Address: "/queues/q"}}, 2)
		var r record
		for _, text := range []string{"a", "b", "c"} {
			require.NoError(t, l.Send(r.sending(text)))
		}
		for i, text := range []string{"a", "b"} {
			tr, f := nextFrame[*frames.Transfer](p)
			assert.Equal(t, text, string(f.Payload))
			assert.Equal(t, uint32(i), tr.DeliveryID.Value)
			assert.False(t, tr.Settled.Or(true))
		}
		p.nothing() // without credit
		all, queued := l.Unanswered()
		assert.Equal(t, []int{3, 1}, []int{all, queued})
		p.send(0, &frames.Disposition{Role: frames.RoleReceiver, First: 1, Settled: frames.Some(true), State: &frames.Released{}})
		synctest.Wait()
		r.locked(func() { assert.Equal(t, []Answer{{State: &frames.Released{}, Sent: true}}, r.answers) })
		p.credit(0, 20, 2, 5)
		_, f := nextFrame[*frames.Transfer](p)
		assert.Equal(t, "c", string(f.Payload))
		p.send(0, &frames.Disposition{Role: frames.RoleReceiver, First: 0, Last: frames.Some(uint32(1 << 31)), Settled: frames.Some(true), State: &frames.Accepted{}})
		synctest.Wait()
		r.locked(func() {
			require.Len(t, r.answers, 3)
			assert.Equal(t, &frames.Accepted{}, r.answers[2].State)
		})
	})
}

// A message larger than a frame is sent in several, as the window allows, and other links don't
// wait for it.
func TestSendLarge(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		l := p.sender(s, SenderConfig{}, 10)
		var r record
		large := string(slices.Repeat([]byte("0123456789abcdef"), 600_000/16))
		p.send(0, &frames.Flow{NextIncomingID: frames.Some(uint32(0)), IncomingWindow: 3})
		synctest.Wait()
		require.NoError(t, l.Send(r.sending(large)))
		got := ""
		for i := range uint32(1000) {
			tr, f := nextFrame[*frames.Transfer](p)
			assert.LessOrEqual(t, len(f.Payload), 4096)
			assert.Equal(t, i == 0, tr.DeliveryID.Set)
			got += string(f.Payload)
			if !tr.More {
				break
			}
			if i%3 == 2 {
				p.nothing()
				p.send(0, &frames.Flow{NextIncomingID: frames.Some(i + 1), IncomingWindow: 3})
			}
		}
		assert.Equal(t, large, got)
	})
}

func withdraws(t *testing.T, l *Sender, x *Sending, unsent, withdrawn bool) {
	t.Helper()
	u, w := l.Withdraw(x)
	assert.Equal(t, []bool{unsent, withdrawn}, []bool{u, w})
}

// answering calls a function with each answer.
type answering func(x *Sending, a Answer)

func (f answering) Answered(x *Sending, a Answer) { f(x, a) }

// A message that wasn't sent is known to be so also between the end of its link and its answer. That
// answer comes all the same.
func TestWithdrawBetweenTheLinksEndAndTheAnswer(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		l := p.sender(p.begin(c, SessionConfig{}), SenderConfig{}, 1)
		var r record
		y := r.sending("unsent")
		x := &Sending{Payload: []byte("sent")}
		x.To = answering(func(x *Sending, a Answer) { // y's answer is the next one
			assert.True(t, a.Sent)
			withdraws(t, l, x, false, false)
			withdraws(t, l, y, true, false)
		})
		require.NoError(t, l.Send(x))
		require.NoError(t, l.Send(y))
		next[*frames.Transfer](p)
		p.send(0, &frames.Detach{Handle: 20, Closed: true})
		next[*frames.Detach](p)
		synctest.Wait()
		r.locked(func() {
			require.Len(t, r.answers, 1)
			assert.False(t, r.answers[0].Sent)
		})
		all, _ := l.Unanswered()
		assert.Zero(t, all)
	})
}

// What wasn't sent can be withdrawn, and gets no answer. What ends with the link gets an error
// that says whether it was sent.
func TestWithdrawAndLoss(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		l := p.sender(s, SenderConfig{}, 1)
		var sent, unsent, withdrawn record
		x := sent.sending("sent")
		require.NoError(t, l.Send(x))
		require.NoError(t, l.Send(unsent.sending("unsent")))
		y := withdrawn.sending("withdrawn")
		require.NoError(t, l.Send(y))
		withdraws(t, l, y, true, true)
		withdraws(t, l, y, false, false)
		next[*frames.Transfer](p)
		withdraws(t, l, x, false, false)
		p.send(0, &frames.Detach{Handle: 20, Closed: true, Error: &frames.Error{Condition: "amqp:resource-deleted"}})
		next[*frames.Detach](p)
		synctest.Wait()
		sent.locked(func() {
			require.Len(t, sent.answers, 1)
			assert.True(t, sent.answers[0].Sent)
			assert.ErrorContains(t, sent.answers[0].Err, "amqp:resource-deleted")
		})
		unsent.locked(func() {
			require.Len(t, unsent.answers, 1)
			assert.False(t, unsent.answers[0].Sent)
		})
		withdrawn.locked(func() { assert.Empty(t, withdrawn.answers) })
		var e *Error
		require.ErrorAs(t, l.Send(sent.sending("late")), &e)
		assert.Equal(t, ScopeLink, e.Scope)
		require.NoError(t, s.Err())
	})
}

// A drain by the peer uses up the credit.
func TestPeerDrainsSender(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		l := p.sender(s, SenderConfig{}, 0)
		p.send(0, &frames.Flow{NextIncomingID: frames.Some(uint32(0)), IncomingWindow: 10, Handle: frames.Some(uint32(20)), DeliveryCount: frames.Some(uint32(0)), LinkCredit: frames.Some(uint32(5)), Drain: true})
		f := next[*frames.Flow](p)
		assert.Equal(t, []uint32{5, 0}, []uint32{f.DeliveryCount.Value, f.LinkCredit.Value})
		require.NoError(t, l.Send((&record{}).sending("a")))
		p.nothing()
	})
}

// Deliveries come to the callback in order, whole, also those of several frames.
func TestReceive(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		var got record
		r := p.receive(s, got.receiver("/queues/q"))
		require.NoError(t, r.AddCredit(10))
		f := next[*frames.Flow](p)
		assert.Equal(t, []uint32{100, 10, 7, 2048}, []uint32{f.DeliveryCount.Value, f.LinkCredit.Value, f.NextIncomingID.Value, f.IncomingWindow})
		p.deliver(0, 20, 5, "one")
		transfer := &frames.Transfer{Handle: 20, DeliveryID: frames.Some(uint32(6)), DeliveryTag: []byte{2}, More: true}
		p.write(frames.Frame{Body: transfer, Payload: []byte("tw")}, frames.Frame{Body: &frames.Transfer{Handle: 20, More: true}, Payload: []byte("o, ")})
		p.write(frames.Frame{Body: &frames.Transfer{Handle: 20}, Payload: []byte("long")})
		p.write(frames.Frame{Body: &frames.Transfer{Handle: 20, DeliveryID: frames.Some(uint32(7)), More: true}, Payload: []byte("abor")},
			frames.Frame{Body: &frames.Transfer{Handle: 20, Aborted: true}, Payload: []byte("ted")})
		p.deliver(0, 20, 8, "three")
		synctest.Wait()
		got.locked(func() {
			assert.Equal(t, []string{"one", "two, long", "three"}, got.payloads)
			assert.Equal(t, []uint32{5, 6, 8}, got.ids)
		})
		assert.Equal(t, uint32(6), r.Credit())
	})
}

// Neighbors with the same outcome are sent as one range, in any order of settlement. Nothing
// else is settled.
func TestSettlementsLeaveAsRanges(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		var got record
		r := p.receive(s, got.receiver("q"))
		hold(c, func() {
			for _, id := range []uint32{3, 1, 2, 5, 4, 9} {
				settled(t, r, id, Accepted)
			}
			settled(t, r, 6, Released)
			settled(t, r, 7, Modified(true, false, nil))
			settled(t, r, 8, Modified(true, false, nil))
		})
		var text []string
		for range 4 {
			d := next[*frames.Disposition](p)
			assert.True(t, d.Settled.Value)
			text = append(text, fmt.Sprintf("%d-%d %T", d.First, d.Last.Or(d.First), d.State))
		}
		slices.Sort(text)
		assert.Equal(t, []string{"1-5 *frames.Accepted", "6-6 *frames.Released", "7-8 *frames.Modified", "9-9 *frames.Accepted"}, text)
		p.nothing()
	})
}

// What goes back to its queue goes back in the order in which it was settled.
func TestReturnedMessagesKeepTheOrderOfTheirSettlements(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		r := p.receive(s, (&record{}).receiver("q"))
		back := Modified(false, false, nil)
		hold(c, func() {
			require.NoError(t, r.Settle(6, 9, back))
			require.NoError(t, r.Settle(0, 1, Accepted))
			require.NoError(t, r.Settle(2, 3, back))
			require.NoError(t, r.Settle(4, 5, back))
			require.NoError(t, r.Settle(10, 10, Released))
			require.NoError(t, r.Settle(11, 11, back))
		})
		var got [][2]uint32
		for len(got) < 5 {
			if d := next[*frames.Disposition](p); d.First != 0 {
				got = append(got, [2]uint32{d.First, d.Last.Or(d.First)})
			} else {
				got = append(got, [2]uint32{0, 1})
			}
		}
		assert.Equal(t, [][2]uint32{{6, 9}, {0, 1}, {2, 5}, {10, 10}, {11, 11}}, got)
		p.nothing()
	})
}

// Random settlements: each delivery is settled once, with the requested outcome, and what goes back
// does so in order.
func TestRangesSettleWhatWasSettledAndNothingElse(t *testing.T) {
	for seed := range uint64(500) {
		random := rand.New(rand.NewPCG(seed, 0))
		const n = 100
		start := uint32(1<<32 - 50)
		order := random.Perm(n)
		if seed%3 == 0 { // nearly in order, as handlers end
			slices.Sort(order)
			for range 30 {
				i := random.IntN(n - 5)
				j := i + random.IntN(5)
				order[i], order[j] = order[j], order[i]
			}
		}
		kinds := []outcomeKind{kindAccepted, kindAccepted, kindAccepted, kindReleased, kindModifiedFailed}[:1+seed%5]
		var w ranges
		want := map[uint32]outcomeKind{}
		var back, backWritten []uint32
		got := map[uint32]outcomeKind{}
		write := func() {
			for _, s := range w.all {
				for id := s.first; ; id++ {
					if _, twice := got[id]; twice {
						require.Fail(t, "settled twice", "seed %d", seed)
					}
					got[id] = s.kind
					if s.kind != kindAccepted {
						backWritten = append(backWritten, id)
					}
					if id == s.last {
						break
					}
				}
			}
			w.all = nil
		}
		for _, i := range order[:n-int(seed%7)] {
			id, kind := start+uint32(i), kinds[random.IntN(len(kinds))]
			want[id] = kind
			if kind != kindAccepted {
				back = append(back, id)
			}
			if w.add(id, id, kind) || random.IntN(40) == 0 {
				write()
			}
		}
		write()
		require.True(t, maps.Equal(want, got), "seed %d", seed)
		require.True(t, slices.Equal(back, backWritten), "seed %d", seed)
	}
}

// hold runs f while the writer can't write.
func hold(c *Conn, f func()) {
	synctest.Wait() // until the writer sleeps
	c.mu.Lock()
	kick := c.out.asleep
	c.out.asleep = false
	c.mu.Unlock()
	f()
	c.mu.Lock()
	c.out.asleep = kick
	c.out.kick()
	c.mu.Unlock()
}

func settled(t *testing.T, r *Receiver, id uint32, o Outcome) {
	t.Helper()
	require.NoError(t, r.Settle(id, id, o))
}

// What was settled is written before the detach, the end, or the close.
func TestSettlementsComeBeforeTheEnd(t *testing.T) {
	ends := map[string]func(ctx context.Context, c *Conn, s *Session, r *Receiver){
		"detach": func(ctx context.Context, _ *Conn, _ *Session, r *Receiver) { _ = r.Detach(ctx) },
		"end":    func(ctx context.Context, _ *Conn, s *Session, _ *Receiver) { _ = s.End(ctx) },
		"close":  func(ctx context.Context, c *Conn, _ *Session, _ *Receiver) { _ = c.Close(ctx) },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
				s := p.begin(c, SessionConfig{})
				r := p.receive(s, (&record{}).receiver("q"))
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				settled(t, r, 1, Accepted)
				settled(t, r, 3, Modified(false, true, frames.Map{{Key: frames.Symbol("x-opt-a"), Value: "b"}}))
				settled(t, r, 5, Released)
				end(ctx, c, s, r)
				for _, first := range []uint32{1, 3, 5} {
					assert.Equal(t, first, next[*frames.Disposition](p).First)
				}
				switch f := (<-p.got).Body.(type) {
				case *frames.Detach, *frames.End, *frames.Close:
				default:
					assert.Fail(t, "not an end", "%T", f)
				}
				require.Error(t, r.Settle(6, 6, Accepted))
			})
		})
	}
}

// A drain ends when the peer has no credit left.
func TestDrain(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		var got record
		r := p.receive(s, got.receiver("q"))
		require.NoError(t, r.AddCredit(10))
		next[*frames.Flow](p)
		count, err := r.Drain(0)
		require.NoError(t, err)
		assert.Equal(t, uint32(110), count)
		f := next[*frames.Flow](p)
		assert.True(t, f.Drain)
		assert.Equal(t, uint32(10), f.LinkCredit.Value)
		p.deliver(0, 20, 1, "last")
		answer := &frames.Flow{IncomingWindow: 10, Handle: frames.Some(uint32(20)), DeliveryCount: frames.Some(uint32(110)), LinkCredit: frames.Some(uint32(0)), Drain: true}
		p.send(0, answer)
		p.send(0, answer) // once too often
		synctest.Wait()
		got.locked(func() {
			assert.Equal(t, 1, got.drained)
			assert.Equal(t, []string{"last"}, got.payloads)
		})
		assert.Zero(t, r.Credit())
		require.NoError(t, r.AddCredit(1))
		assert.Equal(t, uint32(110), next[*frames.Flow](p).DeliveryCount.Value)
	})
}

// A flow's properties go both ways, and so do changes of a delivery's state.
func TestFlowPropertiesAndStates(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		var got record
		r := p.receive(s, got.receiver("q"))
		tokens := frames.Map{{Key: frames.Symbol("rabbitmq:deferral-tokens"), Value: "t"}}
		require.NoError(t, r.Flow(tokens))
		assert.Equal(t, tokens, next[*frames.Flow](p).Properties)
		active := frames.Map{{Key: frames.Symbol("rabbitmq:active"), Value: true}}
		p.send(0, &frames.Flow{IncomingWindow: 10, Handle: frames.Some(uint32(20)), Properties: active},
			&frames.Disposition{Role: frames.RoleSender, First: 3, Last: frames.Some(uint32(4)), State: &frames.Released{}})
		synctest.Wait()
		got.locked(func() {
			assert.Equal(t, []frames.Map{active}, got.flows)
			assert.Equal(t, []string{"3-4"}, got.states)
		})
	})
}

// flooding plays a peer that sends whole messages of a size in frames, as far as the window
// allows.
type flooding struct {
	p      *peer
	window uint32
	sent   uint32 // messages
	open   int    // bytes of the current message that were sent
	frames int
}

const floodFrame = 400

func (f *flooding) run(size, most int) {
	for {
		synctest.Wait()
		for len(f.p.got) > 0 {
			f.window = next[*frames.Flow](f.p).IncomingWindow
		}
		if f.window == 0 || int(f.sent) == most {
			return
		}
		n := min(size-f.open, floodFrame)
		f.p.write(frames.Frame{Body: &frames.Transfer{Handle: 20, DeliveryID: frames.Some(f.sent), More: f.open+n < size}, Payload: make([]byte, n)})
		f.window--
		f.frames++
		if f.open += n; f.open == size {
			f.open = 0
			f.sent++
		}
	}
}

// With MaxBytes, the peer sends no more bytes until deliveries are taken, whether or not one of
// them is on its way, and however many frames they have. A message that is larger than MaxBytes
// arrives all the same, alone.
func TestMaxBytes(t *testing.T) {
	const maxBytes = 16 << 10
	for name, test := range map[string]struct{ size, most int }{
		"small":               {10, 3000},
		"a frame":             {floodFrame, 300},
		"several frames":      {5*floodFrame + 1, 100},
		"nearly the bound":    {maxBytes - 100, 20},
		"larger than it":      {maxBytes + 100, 20},
		"ten times as large":  {10 * maxBytes, 5},
		"as small as can be":  {1, 300},
		"half of the bound":   {maxBytes / 2, 30},
		"a third of a frame ": {floodFrame / 3, 500},
	} {
		t.Run(name, func(t *testing.T) {
			pair(t, Config{MaxFrameSize: 512}, func(t *testing.T, c *Conn, p *peer) {
				s := p.begin(c, SessionConfig{MaxBytes: maxBytes})
				held, received := 0, 0
				var got record
				cfg := got.receiver("q")
				got.onDelivery = func(d *Delivery) { held += len(d.Payload); received++ }
				r := p.receive(s, cfg)
				require.NoError(t, r.AddCredit(10_000))
				f := &flooding{p: p}
				for received < test.most {
					f.run(test.size, test.most)
					var taken int
					got.locked(func() {
						taken = held
						there := held + f.open
						assert.LessOrEqual(t, there, max(maxBytes, test.size+maxBytes/4), "bytes in memory after %d frames", f.frames)
						held = 0
					})
					if int(f.sent) < test.most {
						require.True(t, s.Full() || taken == 0, "the peer has stopped")
						require.NotZero(t, taken, "it never continues")
					}
					r.Taken(taken)
				}
				assert.False(t, s.Full())
				got.locked(func() { assert.Empty(t, got.ends) })
			})
		})
	}
}

// What a lost link held doesn't count any more: nobody takes it.
func TestMaxBytesOfALostLink(t *testing.T) {
	pair(t, Config{MaxFrameSize: 512}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{MaxBytes: 2 << 10})
		var got record
		r := p.receive(s, got.receiver("q"))
		require.NoError(t, r.AddCredit(100))
		f := &flooding{p: p}
		f.run(1000, 10)
		require.True(t, s.Full())
		p.send(0, &frames.Detach{Handle: 20, Closed: true})
		synctest.Wait()
		assert.False(t, s.Full())
		window := uint32(0)
		for len(p.got) > 0 {
			if flow, ok := (<-p.got).Body.(*frames.Flow); ok {
				window = flow.IncomingWindow
			}
		}
		assert.Equal(t, uint32(4), window)
	})
}

// A message above MaxKept arrives without its body, and costs a frame of memory. Messages behind it
// arrive as usual.
func TestMaxKept(t *testing.T) {
	pair(t, Config{MaxFrameSize: 512}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{MaxBytes: 4 << 10})
		var got record
		var all []Delivery
		cfg := got.receiver("q")
		cfg.MaxKept = 1000
		got.onDelivery = func(d *Delivery) { all = append(all, *d) }
		r := p.receive(s, cfg)
		require.NoError(t, r.AddCredit(100))
		f := &flooding{p: p}
		f.run(1000, 1)
		f.run(1001, 2)
		f.run(100_000, 3)
		f.run(300, 4)
		r.Taken(1000)
		f.run(300, 4)
		require.Len(t, all, 4)
		for i, want := range []struct {
			size uint64
			kept int
		}{{1000, 1000}, {1001, 512}, {100_000, 512}, {300, 300}} {
			assert.Equal(t, want.size, all[i].Size)
			assert.LessOrEqual(t, len(all[i].Payload), want.kept)
			assert.GreaterOrEqual(t, len(all[i].Payload), min(want.kept, floodFrame))
		}
		small := got.receiver("q")
		small.MaxKept = 3
		r = p.receive(s, small)
		require.NoError(t, r.AddCredit(1))
		next[*frames.Flow](p)
		p.deliver(0, 21, 9, "12345")
		synctest.Wait()
		assert.Equal(t, uint64(5), all[4].Size)
		assert.Equal(t, "123", string(all[4].Payload))
	})
}

// The peer's incoming window of 0 is RabbitMQ's alarm.
func TestBlocked(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		changes := make(chan bool, 10)
		s := p.begin(c, SessionConfig{OnBlocked: func(b bool) { changes <- b }})
		assert.False(t, <-changes, "how it began")
		l := p.sender(s, SenderConfig{}, 10)
		p.send(0, &frames.Flow{NextIncomingID: frames.Some(uint32(0)), IncomingWindow: 0})
		assert.True(t, <-changes)
		require.NoError(t, l.Send((&record{}).sending("a")))
		p.nothing()
		p.send(0, &frames.Flow{NextIncomingID: frames.Some(uint32(0)), IncomingWindow: 10})
		assert.False(t, <-changes)
		next[*frames.Transfer](p)
	})
}
