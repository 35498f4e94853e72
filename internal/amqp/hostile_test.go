package amqp

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// A peer that breaks a rule costs what the rule is about: a link, a session, or the connection.
// What depends on that ends with an error, once, and the rest lives on.
func TestViolations(t *testing.T) {
	transfer := func(handle, id uint32) frames.Frame {
		return frames.Frame{Body: &frames.Transfer{Handle: handle, DeliveryID: frames.Some(id)}, Payload: []byte("m")}
	}
	raw := func(b string) func(p *peer) { return func(p *peer) { _, _ = p.net.Write([]byte(b)) } }
	put := func(all ...frames.Frame) func(p *peer) { return func(p *peer) { p.write(all...) } }
	// Handle 20 is a receiver with 2 credits and at most 10 bytes a message, 21 a sender.
	tests := map[string]struct {
		scope     Scope
		condition frames.Symbol
		do        func(p *peer)
	}{
		"more than the credit":        {ScopeLink, condCredit, put(transfer(20, 1), transfer(20, 2), transfer(20, 3))},
		"no delivery-id":              {ScopeLink, condInvalid, put(frames.Frame{Body: &frames.Transfer{Handle: 20}})},
		"a delivery in another":       {ScopeLink, condInvalid, put(frames.Frame{Body: &frames.Transfer{Handle: 20, DeliveryID: frames.Some(uint32(1)), More: true}}, transfer(20, 2))},
		"a message too large":         {ScopeLink, condSize, put(frames.Frame{Body: &frames.Transfer{Handle: 20, DeliveryID: frames.Some(uint32(1))}, Payload: []byte("0123456789a")})},
		"a message too large, parts":  {ScopeLink, condSize, put(frames.Frame{Body: &frames.Transfer{Handle: 20, DeliveryID: frames.Some(uint32(1)), More: true}, Payload: []byte("0123456")}, frames.Frame{Body: &frames.Transfer{Handle: 20, More: true}, Payload: []byte("0123456")})},
		"more than the window":        {ScopeSession, condWindow, put(transfer(20, 1), transfer(20, 2), transfer(20, 3), transfer(20, 4), transfer(20, 5))},
		"a transfer to nobody":        {ScopeSession, condHandle, put(transfer(99, 1))},
		"a transfer to a sender":      {ScopeSession, condErrant, put(transfer(21, 1))},
		"a flow to nobody":            {ScopeSession, condHandle, put(frames.Frame{Body: &frames.Flow{Handle: frames.Some(uint32(99))}})},
		"a detach of nobody":          {ScopeSession, condHandle, put(frames.Frame{Body: &frames.Detach{Handle: 99}})},
		"a link that nobody asked":    {ScopeSession, condErrant, put(frames.Frame{Body: &frames.Attach{Name: "x", Role: frames.RoleSender}})},
		"a session that nobody asked": {ScopeConnection, condFraming, put(frames.Frame{Channel: 5, Body: &frames.Begin{}})},
		"a begin answered twice":      {ScopeConnection, condFraming, put(frames.Frame{Channel: 5, Body: &frames.Begin{RemoteChannel: frames.Some(uint16(0))}})},
		"an unknown channel":          {ScopeConnection, condFraming, put(frames.Frame{Channel: 5, Body: &frames.End{}})},
		"a second open":               {ScopeConnection, condFraming, put(frames.Frame{Body: &frames.Open{ContainerID: "x"}})},
		"an undecodable frame":        {ScopeConnection, condFraming, raw("\x00\x00\x00\x0a\x02\x00\x00\x00\x00\x53")},
		"an undecodable transfer":     {ScopeConnection, condFraming, raw("\x00\x00\x00\x0d\x02\x00\x00\x00\x00\x53\x14\xff\xff")},
		"a frame too large":           {ScopeConnection, condFraming, raw("\x7f\xff\xff\xff\x02\x00\x00\x00")},
		"a frame too small":           {ScopeConnection, condFraming, raw("\x00\x00\x00\x07\x02\x00\x00\x00")},
		"a frame of SASL":             {ScopeConnection, condFraming, put(frames.Frame{Type: frames.TypeSASL, Body: &frames.Outcome{}})},
		"noise":                       {ScopeConnection, condFraming, raw("GET / HTTP/1.1\r\n\r\n")},
	}
	for name, v := range tests {
		t.Run(name, func(t *testing.T) {
			pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
				var ended record
				manual := v.condition == condWindow
				s := p.begin(c, SessionConfig{Window: 4, MaxBytes: map[bool]int64{true: 1}[manual], OnEnd: func(err error) { ended.locked(func() { ended.ends = append(ended.ends, err) }) }})
				var got record
				cfg := got.receiver("q")
				cfg.MaxMessageSize = 10
				r := p.receive(s, cfg)
				require.NoError(t, r.AddCredit(map[bool]uint32{false: 2, true: 10}[manual]))
				next[*frames.Flow](p)
				l := p.sender(s, SenderConfig{}, 1)
				x := &record{}
				require.NoError(t, l.Send(x.sending("sent")))
				next[*frames.Transfer](p)
				v.do(p)
				synctest.Wait()
				var condition frames.Symbol
				for condition == "" {
					f, ok := <-p.got
					require.True(t, ok)
					switch b := f.Body.(type) {
					case *frames.Detach:
						assert.Equal(t, ScopeLink, v.scope)
						condition = b.Error.Condition
					case *frames.End:
						assert.Equal(t, ScopeSession, v.scope)
						condition = b.Error.Condition
					case *frames.Close:
						assert.Equal(t, ScopeConnection, v.scope)
						condition = b.Error.Condition
					}
				}
				assert.Equal(t, v.condition, condition)
				time.Sleep(2 * parting)
				synctest.Wait()
				assert.Error(t, r.Err())
				got.locked(func() { assert.Len(t, got.ends, 1) })
				lost := v.scope > ScopeLink
				x.locked(func() { assert.Equal(t, lost, len(x.answers) == 1) })
				assert.Equal(t, lost, s.Err() != nil)
				ended.locked(func() { assert.Equal(t, lost, len(ended.ends) == 1) })
				assert.Equal(t, v.scope == ScopeConnection, c.Err() != nil)
				if v.scope == ScopeSession { // another session works
					p.send(0, &frames.End{})
					synctest.Wait()
					p.begin(c, SessionConfig{})
				}
			})
		})
	}
}

// The peer's errors reach whom they concern.
func TestPeerEnds(t *testing.T) {
	reason := &frames.Error{Condition: "amqp:internal-error", Description: "it rains"}
	for name, test := range map[string]struct {
		scope Scope
		body  frames.Performative
	}{
		"detach": {ScopeLink, &frames.Detach{Handle: 20, Closed: true, Error: reason}},
		"end":    {ScopeSession, &frames.End{Error: reason}},
		"close":  {ScopeConnection, &frames.Close{Error: reason}},
	} {
		t.Run(name, func(t *testing.T) {
			pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
				s := p.begin(c, SessionConfig{})
				var got record
				r := p.receive(s, got.receiver("q"))
				p.send(0, test.body)
				synctest.Wait()
				err := r.Err()
				var e *Error
				require.ErrorAs(t, err, &e)
				assert.Equal(t, test.scope, e.Scope)
				assertRemote(t, reason, err)
				got.locked(func() { require.Equal(t, []error{err}, got.ends) })
				require.Error(t, r.AddCredit(1))
				f := <-p.got
				assert.IsType(t, test.body, f.Body) // the answer
			})
		})
	}
}

// A link that RabbitMQ refuses is attached without a terminus, and detached behind that.
func TestRefusedLink(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		no := &frames.Error{Condition: "amqp:not-found", Description: "no queue q"}
		_, err := together(p, func() (*Receiver, error) { return s.Receiver(t.Context(), (&record{}).receiver("q")) }, func() {
			a := next[*frames.Attach](p)
			p.send(0, &frames.Attach{Name: a.Name, Handle: 3, Role: frames.RoleSender}, &frames.Detach{Handle: 3, Closed: true, Error: no})
			next[*frames.Detach](p)
		})
		assertRemote(t, no, err)
		_, err = together(p, func() (*Sender, error) {
			return s.Sender(t.Context(), SenderConfig{Target: &frames.Target{Address: "q"}})
		}, func() {
			a := next[*frames.Attach](p)
			p.send(0, &frames.Attach{Name: a.Name, Handle: 3, Role: frames.RoleReceiver}, &frames.Detach{Handle: 3, Closed: true, Error: no})
			next[*frames.Detach](p)
		})
		assertRemote(t, no, err)
		p.receive(s, (&record{}).receiver("q")) // the handles are free again
	})
}

func assertRemote(t *testing.T, want *frames.Error, err error) {
	t.Helper()
	var remote *frames.Error
	require.ErrorAs(t, err, &remote)
	assert.Equal(t, want, remote)
}

// A caller that stops waiting leaves nothing behind: what the peer opens later is closed.
func TestAbandonedOpens(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		gone, cancel := context.WithCancelCause(t.Context())
		why := errors.New("enough")
		_, err := together(p, func() (*Session, error) { return c.Begin(gone, SessionConfig{}) }, func() {
			next[*frames.Begin](p)
			cancel(why)
		})
		require.ErrorIs(t, err, why)
		p.send(0, &frames.Begin{RemoteChannel: frames.Some(uint16(0)), IncomingWindow: 10})
		next[*frames.End](p)
		p.send(0, &frames.End{})

		s := p.begin(c, SessionConfig{})
		gone, cancel = context.WithCancelCause(t.Context())
		var name string
		_, err = together(p, func() (*Receiver, error) { return s.Receiver(gone, (&record{}).receiver("q")) }, func() {
			name = next[*frames.Attach](p).Name
			cancel(why)
		})
		require.ErrorIs(t, err, why)
		p.send(s.channel, &frames.Attach{Name: name, Handle: 7, Role: frames.RoleSender, Source: &frames.Source{}})
		assert.True(t, next[*frames.Detach](p).Closed)
		p.send(s.channel, &frames.Detach{Handle: 7, Closed: true})
		p.receive(s, (&record{}).receiver("q"))
	})
}

// A session doesn't begin on a channel before the last one there has rested.
func TestChannelsRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := connect(t, Config{}, &frames.Open{ChannelMax: frames.Some(uint16(1))})
		c.RestChannels(time.Minute)
		began := time.Now()
		for i := range 6 {
			s := p.begin(c, SessionConfig{})
			assert.Equal(t, uint16(i%2), s.channel)
			_, err := together(p, func() (any, error) { return nil, s.End(t.Context()) }, func() {
				_, f := nextFrame[*frames.End](p)
				p.send(f.Channel, &frames.End{})
			})
			require.NoError(t, err)
		}
		assert.Equal(t, 2*time.Minute, time.Since(began))
		c.Fail(ErrClosed)
		<-c.Done()
		_ = p.net.Close()
	})
}

// What this end says of a violation fits into any frame, however long the peer's names are: the
// session ends at both ends, and its channel is free again.
func TestLongNamesOfAPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := connect(t, Config{}, &frames.Open{ChannelMax: frames.Some(uint16(0)), MaxFrameSize: frames.Some(uint32(512))})
		p.begin(c, SessionConfig{})
		p.send(0, &frames.Attach{Name: strings.Repeat("é", 5000), Role: frames.RoleSender})
		assert.Equal(t, frames.Symbol(condErrant), next[*frames.End](p).Error.Condition)
		p.send(0, &frames.End{})
		synctest.Wait()
		p.begin(c, SessionConfig{})
		c.Fail(ErrClosed)
		<-c.Done()
		_ = p.net.Close()
	})
}

// A session's and a connection's limits are errors before anything is sent.
func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := connect(t, Config{}, &frames.Open{ChannelMax: frames.Some(uint16(0)), MaxFrameSize: frames.Some(uint32(512))})
		assert.Equal(t, 1, c.Peer().Sessions)
		s, err := together(p, func() (*Session, error) { return c.Begin(t.Context(), SessionConfig{}) }, func() {
			next[*frames.Begin](p)
			p.send(0, &frames.Begin{RemoteChannel: frames.Some(uint16(0)), HandleMax: frames.Some(uint32(0))})
		})
		require.NoError(t, err)
		_, err = c.Begin(t.Context(), SessionConfig{})
		require.ErrorIs(t, err, ErrTooManySessions)
		_, err = s.Receiver(t.Context(), (&record{}).receiver(strings.Repeat("q", 600)))
		require.ErrorIs(t, err, ErrTooLarge)
		r := p.receive(s, (&record{}).receiver("q"))
		_, err = s.Receiver(t.Context(), (&record{}).receiver("q"))
		require.ErrorIs(t, err, ErrTooManyLinks)
		require.ErrorIs(t, r.Settle(1, 1, Modified(false, false, frames.Map{{Key: frames.Symbol("x-a"), Value: strings.Repeat("q", 600)}})), ErrTooLarge)
		p.nothing()
		settled(t, r, 1, Rejected(nil))
		assert.IsType(t, &frames.Rejected{}, next[*frames.Disposition](p).State)
		c.Fail(ErrClosed)
		<-c.Done()
		_ = p.net.Close()
	})
}

// Delivery-ids wrap at 2³²: messages, answers, deliveries and ranges go on.
func TestDeliveryIDsWrap(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		c.mu.Lock()
		s.nextID = 1<<32 - 3
		c.mu.Unlock()
		l := p.sender(s, SenderConfig{}, 10)
		var sent record
		for range 6 {
			require.NoError(t, l.Send(sent.sending("m")))
			next[*frames.Transfer](p)
		}
		p.send(0, &frames.Disposition{Role: frames.RoleReceiver, First: 1<<32 - 3, Last: frames.Some(uint32(2)), Settled: frames.Some(true), State: &frames.Accepted{}})
		synctest.Wait()
		sent.locked(func() { assert.Len(t, sent.answers, 6) })
		var got record
		r := p.receive(s, got.receiver("q"))
		require.NoError(t, r.AddCredit(10))
		next[*frames.Flow](p)
		hold(c, func() {
			for i := range uint32(6) {
				p.deliver(0, r.peerHandle, 1<<32-3+i, "m")
				settled(t, r, 1<<32-3+i, Accepted)
			}
		})
		d := next[*frames.Disposition](p)
		assert.Equal(t, []uint32{1<<32 - 3, 2}, []uint32{d.First, d.Last.Value})
		p.nothing()
	})
}

// A silent peer is lost after the idle timeout, and a peer that wants signs of life gets them.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, p := connect(t, Config{IdleTimeout: 10 * time.Second}, &frames.Open{IdleTimeout: frames.Some(uint32(3000))})
		began := time.Now()
		<-c.Done()
		assert.Equal(t, 10*time.Second+grace, time.Since(began))
		assert.ErrorIs(t, c.Err(), ErrSilent)
		_ = p.net.Close()
	})
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		p := &peer{t: t, net: far, r: frames.NewReader(far, 64<<10, 1<<20)}
		go p.handshake(&frames.Open{IdleTimeout: frames.Some(uint32(3000))})
		c, err := Open(t.Context(), near, Config{IdleTimeout: time.Hour})
		require.NoError(t, err)
		for range 20 {
			_ = far.SetReadDeadline(time.Now().Add(3 * time.Second))
			f, err := p.r.AwaitFrame()
			require.NoError(t, err)
			assert.Nil(t, f.Body)
		}
		c.Fail(ErrClosed)
		<-c.Done()
		_ = far.Close()
	})
}

// Every step of the handshake may fail, and the error says which and why.
func TestHandshakeFails(t *testing.T) {
	mechanisms := frames.Frame{Type: frames.TypeSASL, Body: &frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN"}}}
	outcome := func(code uint8) frames.Frame {
		return frames.Frame{Type: frames.TypeSASL, Body: &frames.Outcome{Code: code}}
	}
	bytes := func(protocol frames.Protocol, all ...frames.Frame) string {
		b := protocol.Header()
		for _, f := range all {
			b, _ = frames.Append(b, f)
		}
		return string(b)
	}
	login := bytes(frames.ProtocolSASL, mechanisms, outcome(0))
	challenge := frames.Frame{Type: frames.TypeSASL, Body: &frames.Challenge{}}
	for name, test := range map[string]struct {
		says    string
		phase   Phase
		refused bool
		text    string
	}{
		"nothing":            {"", PhaseSASL, false, "EOF"},
		"HTTP":               {"HTTP/1.1 400 Bad Request\r\n", PhaseSASL, false, "doesn't offer SASL"},
		"AMQP 0-9-1":         {"AMQP\x00\x00\x09\x01", PhaseSASL, false, "doesn't offer SASL"},
		"no such mechanism":  {bytes(frames.ProtocolSASL, frames.Frame{Type: frames.TypeSASL, Body: &frames.Mechanisms{Mechanisms: []frames.Symbol{"EXTERNAL"}}}), PhaseSASL, true, "EXTERNAL"},
		"refused":            {bytes(frames.ProtocolSASL, mechanisms, outcome(1)), PhaseSASL, true, "code 1"},
		"a failure":          {bytes(frames.ProtocolSASL, mechanisms, outcome(3)), PhaseSASL, false, "code 3"},
		"endless challenges": {bytes(frames.ProtocolSASL, mechanisms, challenge, challenge, challenge, challenge, challenge, challenge, challenge, challenge, challenge), PhaseSASL, false, "doesn't end"},
		"an open too early":  {bytes(frames.ProtocolSASL, frames.Frame{Body: &frames.Open{}}), PhaseSASL, false, "Open"},
		"then nothing":       {login, PhaseOpen, false, "EOF"},
		"then noise":         {login + "noisenoise", PhaseOpen, false, "AMQP 1.0"},
		"no open":            {login + bytes(frames.ProtocolAMQP, frames.Frame{Body: &frames.Begin{}}), PhaseOpen, false, "Begin"},
		"an empty close":     {login + bytes(frames.ProtocolAMQP, frames.Frame{Body: &frames.Close{}}), PhaseOpen, false, "without a reason"},
		"a close":            {login + bytes(frames.ProtocolAMQP, frames.Frame{Body: &frames.Close{Error: &frames.Error{Condition: "amqp:not-allowed", Description: "no such virtual host"}}}), PhaseOpen, false, "no such virtual host"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				go func() { _, _ = io.Copy(io.Discard, far) }()
				go func() {
					_, _ = far.Write([]byte(test.says))
					synctest.Wait()
					_ = far.Close()
				}()
				_, err := Open(t.Context(), near, Config{Mechanism: "PLAIN"})
				var e *HandshakeError
				require.ErrorAs(t, err, &e)
				assert.Equal(t, test.phase, e.Phase)
				assert.Equal(t, test.refused, e.Refused)
				assert.ErrorContains(t, err, test.text)
			})
		})
	}
	synctest.Test(t, func(t *testing.T) { // a silent peer, and a ctx without a deadline
		near, far := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, far) }()
		began := time.Now()
		_, err := Open(t.Context(), near, Config{})
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		assert.Equal(t, handshakeLimit, time.Since(began))
		_ = far.Close()
	})
	synctest.Test(t, func(t *testing.T) { // and with one
		near, far := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, far) }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := Open(ctx, near, Config{})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		_ = far.Close()
	})
}

// No input from a peer causes a panic or a hang, and each message gets one answer.
func FuzzPeer(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x08\x02\x00\x00\x00"), uint64(1))
	for _, body := range []frames.Performative{
		&frames.Begin{RemoteChannel: frames.Some(uint16(1))}, &frames.End{}, &frames.Close{}, &frames.Detach{Handle: 20}, &frames.Detach{Handle: 21},
		&frames.Flow{Handle: frames.Some(uint32(21)), LinkCredit: frames.Some(uint32(1 << 31)), NextIncomingID: frames.Some(uint32(0)), IncomingWindow: 1 << 31, Echo: true, Drain: true},
		&frames.Disposition{Role: frames.RoleReceiver, Last: frames.Some(uint32(1<<32 - 1))}, &frames.Disposition{First: 5, Last: frames.Some(uint32(1)), State: &frames.Released{}},
		&frames.Transfer{Handle: 20, DeliveryID: frames.Some(uint32(1)), More: true}, &frames.Transfer{Handle: 20, Aborted: true}, &frames.Attach{Name: "x", Handle: 20},
	} {
		b, _ := frames.Append(nil, frames.Frame{Body: body})
		f.Add(append(b, b...), uint64(len(b)))
	}
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		synctest.Test(t, func(t *testing.T) {
			c, p := connect(t, Config{}, &frames.Open{MaxFrameSize: frames.Some(uint32(600))})
			s := p.begin(c, SessionConfig{Window: 4})
			var got, sent record
			r := p.receive(s, got.receiver("q"))
			_ = r.AddCredit(3)
			next[*frames.Flow](p)
			l := p.sender(s, SenderConfig{}, 2)
			for _, text := range []string{"a", strings.Repeat("b", 2000), "c", "d"} {
				require.NoError(t, l.Send(sent.sending(text)))
			}
			_, _ = r.Drain(0)
			random := rand.New(rand.NewPCG(seed, 1))
			for len(b) > 0 { // in pieces
				n := 1 + random.IntN(min(len(b), 100))
				_, _ = p.net.Write(b[:n])
				b = b[n:]
			}
			synctest.Wait()
			_ = r.Settle(1, 3, Accepted)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_ = r.Detach(ctx)
			_ = c.Close(ctx)
			sent.locked(func() { assert.Len(t, sent.answers, 4) })
			_ = p.net.Close()
		})
	})
}

// A peer that refuses a connection by a close right behind its open, in one write, is heard at
// once: nothing more needs to come.
func TestFramesBehindTheOpenAreRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		near, far := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, far) }()
		b := frames.ProtocolSASL.Header()
		add := func(all ...frames.Frame) {
			for _, f := range all {
				b, _ = frames.Append(b, f)
			}
		}
		add(
			frames.Frame{Type: frames.TypeSASL, Body: &frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN"}}},
			frames.Frame{Type: frames.TypeSASL, Body: &frames.Outcome{}},
		)
		b = append(b, frames.ProtocolAMQP.Header()...)
		add(
			frames.Frame{Body: &frames.Open{ContainerID: "peer"}},
			frames.Frame{Body: &frames.Close{Error: &frames.Error{Condition: "amqp:not-allowed", Description: "not you"}}},
		)
		go func() { _, _ = far.Write(b) }()
		c, err := Open(t.Context(), near, Config{Mechanism: "PLAIN"})
		require.NoError(t, err)
		<-c.Done()
		assert.Less(t, time.Since(began), time.Second)
		var e *Error
		require.ErrorAs(t, c.Err(), &e)
		require.NotNil(t, e.Remote)
		assert.Equal(t, "not you", e.Remote.Description)
		require.Error(t, c.Close(t.Context()))
		_ = far.Close()
	})
}
