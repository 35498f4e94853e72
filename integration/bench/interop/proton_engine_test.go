package interop

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
)

// The engine of internal/amqp as the client of a peer that proton plays, with no broker between
// them: what one of them sends, the other one decodes.

//go:embed proton_peer.py
var protonPeer string

// peer is proton as a server.
type peer struct {
	*proton
	anonymous, plain int // ports
	events           chan happening
}

// happening is a line of the peer's.
type happening struct {
	Event                  string
	Anonymous, Plain       int // listening
	User                   string
	Frame                  uint32
	Idle                   float64
	Properties             note
	Address                string
	Size                   int
	Sum                    string
	State                  string
	Settled                bool
	Failed                 bool
	Undeliverable          bool
	Annotations            note
	Scope                  string
	Condition, Description string
	Info                   note
	Credit                 int
	Tag                    string
}

func startPeer(t *testing.T) *peer {
	t.Helper()
	p := &peer{proton: startProton(t, protonPeer), events: make(chan happening, 100_000)}
	var first happening
	p.next(t, &first)
	p.anonymous, p.plain = first.Anonymous, first.Plain
	go func() {
		defer close(p.events)
		for {
			line, err := p.out.ReadBytes('\n')
			if err != nil {
				return
			}
			var h happening
			if err := json.Unmarshal(line, &h); err != nil {
				h = happening{Event: "unreadable: " + string(line)}
			}
			p.events <- h
		}
	}()
	return p
}

// await waits for an event and passes over others.
func (p *peer) await(t *testing.T, event string) happening {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case h, more := <-p.events:
			if !more {
				_ = p.in.Close()
				_ = p.cmd.Wait()
				require.FailNow(t, "the peer has ended", "%s", p.stderr)
			}
			if h.Event == event {
				return h
			}
		case <-timeout:
			require.FailNow(t, "no "+event, "%s", p.stderr)
		}
	}
}

// engine opens a connection to the peer. what is its host, which says what the peer is like.
func (p *peer) engine(t *testing.T, what string, cfg amqp.Config) (*amqp.Conn, error) {
	t.Helper()
	port := p.anonymous
	if cfg.Mechanism == "" {
		cfg.Mechanism, cfg.Response = "ANONYMOUS", []byte("trace")
	} else if cfg.Mechanism == "PLAIN" {
		port = p.plain
	}
	cfg.Hostname = what
	cfg.ContainerID = strings.ReplaceAll(t.Name(), "/", "-")
	nc, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := amqp.Open(ctx, nc, cfg)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = c.Close(ctx)
	})
	return c, nil
}

func (p *peer) session(t *testing.T, what string, cfg amqp.Config) *amqp.Session {
	t.Helper()
	c, err := p.engine(t, what, cfg)
	require.NoError(t, err)
	s, err := c.Begin(t.Context(), amqp.SessionConfig{})
	require.NoError(t, err)
	return s
}

// box is what a test's links get.
type box struct {
	amqp.NoReceiverEvents
	deliveries chan amqp.Delivery
	answers    chan answer
	drained    chan uint32
	ended      chan error
}

// answer is what became of the message that begins with a number.
type answer struct {
	amqp.Answer
	number int
}

func newBox() *box {
	return &box{amqp.NoReceiverEvents{}, make(chan amqp.Delivery, 10_000), make(chan answer, 10_000), make(chan uint32, 1000), make(chan error, 1000)}
}

func (b *box) Answered(x *amqp.Sending, a amqp.Answer) {
	number := -1
	_, _ = fmt.Sscan(string(x.Payload), &number)
	b.answers <- answer{a, number}
}

func (b *box) receiver(address string) amqp.ReceiverConfig {
	return amqp.ReceiverConfig{Source: &frames.Source{Address: address}, Events: b}
}

func (b *box) Delivered(d *amqp.Delivery) {
	whole := *d
	whole.Payload = append([]byte(nil), d.Payload...)
	whole.Tag = append([]byte(nil), d.Tag...)
	b.deliveries <- whole
}

func (b *box) Drained(count uint32) { b.drained <- count }
func (b *box) Ended(err error)      { b.ended <- err }

func (b *box) sender(t *testing.T, s *amqp.Session, address string) *amqp.Sender {
	t.Helper()
	l, err := s.Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: address}})
	require.NoError(t, err)
	return l
}

func (b *box) send(t *testing.T, l *amqp.Sender, payload []byte) {
	t.Helper()
	require.NoError(t, l.Send(&amqp.Sending{Payload: payload, To: b}))
}

func soon[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		require.FailNow(t, "it doesn't come", what)
		panic("unreachable")
	}
}

// payload is what body is in the script.
func payload(number, size int) []byte {
	head := fmt.Sprint(number, " ")
	return []byte((head + strings.Repeat("0123456789abcdef", size/16+1))[:size])
}

// assertEverything compares what has come with EVERYTHING of the script.
func assertEverything(t *testing.T, m frames.Map) {
	t.Helper()
	want := map[string]any{
		"null": nil, "true": true, "false": false, "ubyte": uint8(255), "ushort": uint16(65535), "uint0": uint32(0), "uint": uint32(1 << 31),
		"ulong0": uint64(0), "ulong": uint64(1<<64 - 1), "byte": int8(-128), "short": int16(-32768), "int5": int32(5), "int": int32(-1 << 31),
		"long5": int64(-5), "long": int64(-1 << 63), "float": float32(1.5), "double": -2.25, "decimal32": frames.Decimal32{1, 2, 3, 4},
		"decimal64": frames.Decimal64{1, 2, 3, 4, 5, 6, 7, 8}, "decimal128": frames.Decimal128{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
		"char": frames.Char(0x1f407), "timestamp": frames.Timestamp(-1), "uuid": frames.UUID{15: 7}, "binary": []byte{0, 255}, "empty": []byte{},
		"large": []byte(strings.Repeat("x", 256)), "string": "text \u00e9\U0001f407", "symbol": frames.Symbol("a symbol"), "list0": frames.List{},
		"list": frames.List{"a", int64(1), nil, frames.List{true}}, "map0": frames.Map{},
		"map":       frames.Map{{Key: "k", Value: "v"}, {Key: int64(1), Value: uint8(1)}},
		"array":     frames.Array{Type: 0x71, Elements: []any{int32(-100_000), int32(2)}},
		"array0":    frames.Array{Type: 0xb1},
		"arrays":    frames.Array{Type: 0xb3, Elements: []any{frames.Symbol("a"), frames.Symbol("b")}},
		"described": frames.Described{Descriptor: frames.Symbol("x:y"), Value: frames.List{int64(1)}},

		"described array": frames.Array{Type: 0xb1, Descriptor: uint64(7), Elements: []any{"a"}},
	}
	require.Len(t, m, len(want))
	for key, v := range want {
		got, ok := m.Get(key)
		require.True(t, ok, key)
		assert.Equal(t, fmt.Sprint(sorted(noted(noteOf(v)))), fmt.Sprint(sorted(noted(noteOf(got)))), key)
	}
}

// What the engine sends of every type, in its open and attach, arrives at proton unchanged, and
// the other way around.
func TestEngineAndProtonReadEachOthersTypes(t *testing.T) {
	t.Parallel()
	p := startPeer(t)
	var all frames.Map
	for _, k := range kinds() {
		all = append(all, frames.Entry{Key: frames.Symbol(k.name), Value: k.value})
	}
	all = append(all,
		frames.Entry{Key: frames.Symbol("described"), Value: frames.Described{Descriptor: frames.Symbol("x:y"), Value: "v"}},
		frames.Entry{Key: frames.Symbol("described array"), Value: frames.Array{Type: 0xb1, Descriptor: uint64(7), Elements: []any{"a"}}},
		frames.Entry{Key: frames.Symbol("array of arrays"), Value: frames.Array{Type: 0xf0, Elements: []any{frames.Array{Type: 0x71, Elements: []any{int32(1)}}}}},
		frames.Entry{Key: frames.Symbol("array of lists"), Value: frames.Array{Type: 0xd0, Elements: []any{frames.List{"a"}, frames.List{}}}},
		frames.Entry{Key: frames.Symbol("array of maps"), Value: frames.Array{Type: 0xd1, Elements: []any{frames.Map{{Key: "k", Value: "v"}}}}},
		frames.Entry{Key: frames.Symbol("array of chars"), Value: frames.Array{Type: 0x73, Elements: []any{frames.Char('a'), frames.Char(0x1f407)}}},
		frames.Entry{Key: frames.Symbol("array of decimals"), Value: frames.Array{Type: 0x94, Elements: []any{frames.Decimal128{1}}}},
	)
	want := fmt.Sprint(sorted(noted(noteOf(all))))
	c, err := p.engine(t, "everything=1,frame=65536", amqp.Config{Properties: all})
	require.NoError(t, err)
	opened := p.await(t, "open")
	assert.Equal(t, want, fmt.Sprint(sorted(opened.Properties)))
	assert.Equal(t, "proton", c.Peer().ContainerID)
	assert.Equal(t, uint32(65536), c.Peer().MaxFrameSize)
	assert.Equal(t, []frames.Symbol{"one", "two"}, c.Peer().Capabilities)
	assertEverything(t, c.Peer().Properties)

	s, err := c.Begin(t.Context(), amqp.SessionConfig{})
	require.NoError(t, err)
	b := newBox()
	l, err := s.Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "everything"}, Properties: all})
	require.NoError(t, err)
	assert.Equal(t, want, fmt.Sprint(sorted(p.await(t, "attach").Properties)))
	assertEverything(t, l.Attached().Properties)
	cfg := b.receiver("everything")
	cfg.Properties = all
	r, err := s.Receiver(t.Context(), cfg)
	require.NoError(t, err)
	assert.Equal(t, want, fmt.Sprint(sorted(p.await(t, "attach").Properties)))
	assertEverything(t, r.Attached().Properties)
	require.NoError(t, l.Detach(t.Context()))
	require.NoError(t, r.Detach(t.Context()))
	require.NoError(t, c.Close(t.Context()))
	assert.Equal(t, "connection", lastEnd(p, t).Scope)

	c, err = p.engine(t, "lists=1", amqp.Config{})
	require.NoError(t, err)
	assert.Equal(t, []frames.Symbol{"one", "two"}, c.Peer().Capabilities, "proton makes a list of a Python list, which isn't AMQP's form")
}

// lastEnd passes over the ends of links and sessions.
func lastEnd(p *peer, t *testing.T) happening {
	t.Helper()
	for {
		if h := p.await(t, "end"); h.Scope == "connection" {
			return h
		}
	}
}

// SASL's mechanisms: the right and the wrong password, and a mechanism that the peer lacks.
func TestEngineLogsInAtProton(t *testing.T) {
	t.Parallel()
	p := startPeer(t)
	_, err := p.engine(t, "", amqp.Config{})
	require.NoError(t, err)
	assert.Equal(t, "anonymous", p.await(t, "open").User)
	_, err = p.engine(t, "", amqp.Config{Mechanism: "PLAIN", Response: []byte("\x00user\x00password")})
	require.NoError(t, err)
	assert.Equal(t, "user", p.await(t, "login").User)
	p.await(t, "open")
	for what, cfg := range map[string]amqp.Config{
		"a wrong password":    {Mechanism: "PLAIN", Response: []byte("\x00user\x00wrong")},
		"no such mechanism":   {Mechanism: "EXTERNAL"},
		"an unknown name too": {Mechanism: "PLAIN", Response: []byte("\x00nobody\x00password")},
	} {
		_, err = p.engine(t, "", cfg)
		var refused *amqp.HandshakeError
		require.ErrorAs(t, err, &refused, what)
		assert.True(t, refused.Refused, "%s: %v", what, err)
		assert.Equal(t, amqp.PhaseSASL, refused.Phase, what)
	}
	// A peer that refuses a connection opens it first, as AMQP wants it.
	c, err := p.engine(t, "refuse=1", amqp.Config{})
	require.NoError(t, err)
	soon(t, c.Done(), "the peer's close")
	var e *amqp.Error
	require.ErrorAs(t, c.Err(), &e)
	require.NotNil(t, e.Remote, "%v", e)
	assert.Equal(t, frames.Symbol("amqp:not-allowed"), e.Remote.Condition)
}

// Messages of all sizes around the borders of frames, with small frames and with large ones, both
// ways.
func TestEngineAndProtonSplitMessagesIntoFrames(t *testing.T) {
	t.Parallel()
	p := startPeer(t)
	for _, frame := range []int{512, 4096, 65536} {
		sizes := []int{0, 1, 2, 255, 256, 1 << 20}
		for _, at := range []int{frame - 64, 2*frame - 128, frame} { // 64 is what a transfer may take
			for d := -40; d <= 40; d++ {
				if frame < 65536 || d%5 == 0 {
					sizes = append(sizes, at+d)
				}
			}
		}
		s := p.session(t, fmt.Sprint("frame=", frame), amqp.Config{MaxFrameSize: uint32(frame)})
		assert.Equal(t, uint32(frame), p.await(t, "open").Frame)
		b := newBox()
		l := b.sender(t, s, "accept:7")
		for i, size := range sizes {
			b.send(t, l, payload(i, max(size, 0)))
		}
		for i, size := range sizes {
			h := p.await(t, "message")
			sum := sha256.Sum256(payload(i, size))
			require.Equal(t, size, h.Size)
			require.Equal(t, hex.EncodeToString(sum[:]), h.Sum, "%d bytes", size)
			a := soon(t, b.answers, "an answer")
			require.NoError(t, a.Err)
			require.IsType(t, &frames.Accepted{}, a.State)
		}
		// From proton: each message a byte larger than the last, and a large one.
		for _, from := range []int{0, frame - 150, 2*frame - 150} {
			r, err := s.Receiver(t.Context(), b.receiver(fmt.Sprintf("count:160:%d:1", from)))
			require.NoError(t, err)
			require.NoError(t, r.AddCredit(160))
			for i := range 160 {
				d := soon(t, b.deliveries, "a delivery")
				require.Equal(t, string(payload(i, from+i)), string(d.Payload))
				require.Equal(t, fmt.Sprint(i), string(d.Tag))
				require.NoError(t, r.Settle(d.ID, d.ID, amqp.Accepted))
			}
			require.NoError(t, r.Detach(t.Context()))
		}
		r, err := s.Receiver(t.Context(), b.receiver("count:3:1000000"))
		require.NoError(t, err)
		require.NoError(t, r.AddCredit(3))
		for i := range 3 {
			d := soon(t, b.deliveries, "a large delivery")
			require.Equal(t, string(payload(i, 1_000_000)), string(d.Payload))
			assert.GreaterOrEqual(t, int(d.Size), 1_000_000)
		}
		require.NoError(t, s.Conn().Close(t.Context()))
	}
}

// The outcomes that proton gives arrive with all that is in them, and so do the engine's, alone and
// in ranges.
func TestEngineAndProtonSettle(t *testing.T) {
	t.Parallel()
	p := startPeer(t)
	s := p.session(t, "", amqp.Config{})
	b := newBox()
	l := b.sender(t, s, "outcomes")
	for i := range 10 {
		b.send(t, l, payload(i, 50))
	}
	for range 10 { // proton says first that one was rejected, and later that others were accepted
		a := soon(t, b.answers, "an answer")
		switch a.number % 5 {
		case 0:
			assert.IsType(t, &frames.Accepted{}, a.State)
		case 1:
			rejected := a.State.(*frames.Rejected)
			require.NotNil(t, rejected.Error)
			assert.Equal(t, frames.Symbol("amqp:precondition-failed"), rejected.Error.Condition)
			assert.Equal(t, "refused", rejected.Error.Description)
			assertEverything(t, rejected.Error.Info)
		case 2:
			assert.IsType(t, &frames.Released{}, a.State)
		case 3:
			modified := a.State.(*frames.Modified)
			assert.True(t, modified.DeliveryFailed)
			assert.True(t, modified.UndeliverableHere)
			assertEverything(t, modified.Annotations)
		case 4:
			assert.Equal(t, &frames.Modified{}, a.State)
		}
	}

	// A receiver that settles second waits for the engine's.
	l = b.sender(t, s, "second")
	for i := range 5 {
		b.send(t, l, payload(i, 50))
		assert.IsType(t, &frames.Accepted{}, soon(t, b.answers, "accepted").State)
		assert.Equal(t, "ACCEPTED", p.await(t, "settled").State)
	}
	// Ranges, in order and backwards.
	for _, order := range []string{"forwards:100", "backwards:100"} {
		l = b.sender(t, s, order)
		for i := range 300 {
			b.send(t, l, payload(i, 50))
		}
		for range 300 {
			assert.IsType(t, &frames.Accepted{}, soon(t, b.answers, "accepted").State)
		}
		all, queued := l.Unanswered()
		assert.Zero(t, all+queued)
	}

	p.settledBy(t, s, b)
	assert.Empty(t, b.ended)
}

// settledBy has the engine settle deliveries of proton's.
func (p *peer) settledBy(t *testing.T, s *amqp.Session, b *box) {
	t.Helper()
	info := frames.Map{{Key: frames.Symbol("x-why"), Value: frames.List{"a", int64(7)}}}
	outcomes := []struct {
		outcome amqp.Outcome
		want    happening
	}{
		{amqp.Accepted, happening{State: "ACCEPTED"}},
		{amqp.Released, happening{State: "RELEASED"}},
		{amqp.Modified(true, false, nil), happening{State: "MODIFIED", Failed: true}},
		{amqp.Modified(false, true, nil), happening{State: "MODIFIED", Undeliverable: true}},
		{amqp.Modified(false, false, nil), happening{State: "MODIFIED"}},
		{amqp.Modified(true, true, info), happening{State: "MODIFIED", Failed: true, Undeliverable: true, Annotations: noteOf(info)}},
		{amqp.Rejected(nil), happening{State: "REJECTED"}},
		{amqp.Rejected(&frames.Error{Condition: "x:y", Description: "no", Info: info}), happening{State: "REJECTED", Condition: "x:y", Description: "no", Info: noteOf(info)}},
	}
	r, err := s.Receiver(t.Context(), b.receiver("count:1000:20"))
	require.NoError(t, err)
	require.NoError(t, r.AddCredit(1000))
	settled := map[string]happening{}
	ids := make([]uint32, 1000)
	for i := range ids {
		ids[i] = soon(t, b.deliveries, "a delivery").ID
	}
	// In any order, so that all kinds of ranges are on the way.
	for _, i := range rand.Perm(1000 / 20) {
		for j := range 20 {
			o := outcomes[i%len(outcomes)]
			id := ids[i*20+j]
			settled[fmt.Sprint(i*20+j)] = o.want
			require.NoError(t, r.Settle(id, id, o.outcome))
		}
	}
	for range 1000 {
		got := p.await(t, "outcome")
		want := settled[got.Tag]
		assert.True(t, got.Settled)
		assert.Equal(t, [5]any{want.State, want.Failed, want.Undeliverable, want.Condition, want.Description}, [5]any{got.State, got.Failed, got.Undeliverable, got.Condition, got.Description}, got.Tag)
		if want.Annotations != nil {
			assert.Equal(t, sorted(noted(want.Annotations)), sorted(got.Annotations))
		}
		if want.Info != nil {
			assert.Equal(t, sorted(noted(want.Info)), sorted(got.Info))
		}
		delete(settled, got.Tag)
	}
	assert.Empty(t, settled)
}

// Credit, and drains from either side; deliveries that are settled as they come; and deliveries
// that are taken back half-way.
func TestEngineAndProtonGiveAndDrainCredit(t *testing.T) {
	t.Parallel()
	p := startPeer(t)
	for _, frame := range []uint32{512, 65536} {
		s := p.session(t, fmt.Sprint("frame=", frame), amqp.Config{MaxFrameSize: frame})
		b := newBox()
		// More credit than there are messages: a drain takes it back.
		r, err := s.Receiver(t.Context(), b.receiver("count:10:100"))
		require.NoError(t, err)
		require.NoError(t, r.AddCredit(3))
		for i := range 3 {
			require.Equal(t, string(payload(i, 100)), string(soon(t, b.deliveries, "a delivery").Payload))
		}
		count, err := r.Drain(20)
		require.NoError(t, err)
		assert.Equal(t, count, soon(t, b.drained, "the end of the drain"))
		assert.Len(t, b.deliveries, 7, "they come before")
		assert.Zero(t, r.Credit())
		for i := range 7 {
			require.Equal(t, string(payload(3+i, 100)), string(soon(t, b.deliveries, "a delivery").Payload))
		}
		assert.Equal(t, 13, p.await(t, "drained").Credit)
		require.NoError(t, r.Detach(t.Context()))

		r, err = s.Receiver(t.Context(), b.receiver("settled:50:1000"))
		require.NoError(t, err)
		require.NoError(t, r.AddCredit(50))
		for i := range 50 {
			d := soon(t, b.deliveries, "a delivery")
			assert.True(t, d.Settled)
			require.Equal(t, string(payload(i, 1000)), string(d.Payload))
		}
		require.NoError(t, r.Detach(t.Context()))

		r, err = s.Receiver(t.Context(), b.receiver("aborted:40:3000"))
		require.NoError(t, err)
		require.NoError(t, r.AddCredit(40))
		for i := range 20 {
			d := soon(t, b.deliveries, "a delivery")
			require.Equal(t, fmt.Sprint(2*i+1), string(d.Tag))
			require.Equal(t, string(payload(2*i+1, 3000)), string(d.Payload))
		}
		assert.Zero(t, r.Credit(), "what was taken back has used up credit")
		require.NoError(t, r.Detach(t.Context()))

		// The peer drains a sender, which drops its credit: of two more messages one can go.
		l := b.sender(t, s, "drain:10")
		b.send(t, l, payload(0, 10))
		assert.IsType(t, &frames.Accepted{}, soon(t, b.answers, "accepted").State)
		assert.Equal(t, 9, p.await(t, "emptied").Credit)
		b.send(t, l, payload(1, 10))
		b.send(t, l, payload(2, 10))
		assert.Equal(t, 1, soon(t, b.answers, "accepted with the next credit").number)
		all, queued := l.Unanswered()
		assert.Equal(t, [2]int{1, 1}, [2]int{all, queued})
		require.NoError(t, l.Detach(t.Context()))
		last := soon(t, b.answers, "the end of what never went")
		require.ErrorIs(t, last.Err, amqp.ErrClosed)
		assert.False(t, last.Sent)
		require.NoError(t, s.Conn().Close(t.Context()))
	}
}

// A detach, an end and a close with an error, from either side, in the midst of sending and
// receiving.
func TestEngineAndProtonEndWithErrors(t *testing.T) {
	t.Parallel()
	p := startPeer(t)
	scopes := map[string]amqp.Scope{"end-link": amqp.ScopeLink, "end-session": amqp.ScopeSession, "end-connection": amqp.ScopeConnection}
	for address, scope := range scopes {
		for _, receives := range []bool{true, false} {
			name := fmt.Sprint(address, ", the engine receives: ", receives)
			c, err := p.engine(t, "", amqp.Config{})
			require.NoError(t, err)
			ended := make(chan error, 1)
			s, err := c.Begin(t.Context(), amqp.SessionConfig{OnEnd: func(err error) { ended <- err }})
			require.NoError(t, err)
			b := newBox()
			var over <-chan struct{}
			if receives {
				r, err := s.Receiver(t.Context(), b.receiver(address))
				require.NoError(t, err)
				require.NoError(t, r.AddCredit(10))
				over = r.Done()
			} else {
				l := b.sender(t, s, address)
				over = l.Done()
				for i := range 20 { // the peer has given credit for ten
					b.send(t, l, payload(i, 100))
				}
				maybe := 0
				for range 20 {
					a := soon(t, b.answers, "an answer")
					require.Error(t, a.Err, name)
					if a.Sent {
						maybe++
					}
				}
				assert.LessOrEqual(t, maybe, 10, name)
				assert.Positive(t, maybe, name)
				b.ended <- l.Err()
			}
			err = soon(t, b.ended, name)
			var e *amqp.Error
			require.ErrorAs(t, err, &e, name)
			assert.Equal(t, scope, e.Scope, name)
			require.NotNil(t, e.Remote, "%s: %v", name, err)
			assert.Equal(t, frames.Symbol("amqp:internal-error"), e.Remote.Condition)
			assert.Equal(t, "on purpose", e.Remote.Description)
			assertEverything(t, e.Remote.Info)
			soon(t, over, name)
			switch scope {
			case amqp.ScopeLink:
				require.NoError(t, s.Err(), name)
				require.NoError(t, s.End(t.Context()))
			case amqp.ScopeSession:
				require.ErrorIs(t, soon(t, ended, name), e.Remote)
				require.NoError(t, c.Err(), name)
			case amqp.ScopeConnection:
				soon(t, c.Done(), name)
			}
			if scope != amqp.ScopeConnection { // the others live on
				s, err = c.Begin(t.Context(), amqp.SessionConfig{})
				require.NoError(t, err)
				b.send(t, b.sender(t, s, "accept"), payload(1, 10))
				assert.IsType(t, &frames.Accepted{}, soon(t, b.answers, "accepted").State)
				require.NoError(t, c.Close(t.Context()))
			}
			assert.Equal(t, "", lastEnd(p, t).Condition, name)
		}
	}
	// A link that the peer refuses.
	c, err := p.engine(t, "", amqp.Config{})
	require.NoError(t, err)
	s, err := c.Begin(t.Context(), amqp.SessionConfig{})
	require.NoError(t, err)
	for range 2 {
		_, err = s.Receiver(t.Context(), newBox().receiver("refuse"))
		assertRefused(t, err)
		_, err = s.Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "refuse"}})
		assertRefused(t, err)
	}
	require.NoError(t, s.End(t.Context()))
	require.NoError(t, c.Close(t.Context()))
	assert.Empty(t, lastEnd(p, t).Condition)
}

func assertRefused(t *testing.T, err error) {
	t.Helper()
	var e *amqp.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, amqp.ScopeLink, e.Scope)
	require.NotNil(t, e.Remote, "%v", err)
	assert.Equal(t, frames.Symbol("amqp:not-found"), e.Remote.Condition)
	why, _ := e.Remote.Info.Get("why")
	assert.Equal(t, frames.List{"because", int64(1)}, why)
}

// Sessions and links: many at once, and again on the same numbers. What one sends, the others
// don't see.
func TestEngineHasManySessionsAndLinksAtProton(t *testing.T) {
	t.Parallel()
	p := startPeer(t)
	c, err := p.engine(t, "channels=9", amqp.Config{})
	require.NoError(t, err)
	assert.Equal(t, 10, c.Peer().Sessions)
	for range 3 {
		var sessions []*amqp.Session
		for range 10 {
			s, err := c.Begin(t.Context(), amqp.SessionConfig{})
			require.NoError(t, err)
			sessions = append(sessions, s)
		}
		_, err = c.Begin(t.Context(), amqp.SessionConfig{})
		require.ErrorIs(t, err, amqp.ErrTooManySessions)
		out, in := newBox(), map[string]*box{}
		for i, s := range sessions {
			for j := range 5 {
				l := out.sender(t, s, "accept:3")
				for k := range 10 {
					out.send(t, l, payload(k, 30))
				}
				b := newBox()
				in[fmt.Sprint(i, " ", j)] = b
				r, err := s.Receiver(t.Context(), b.receiver(fmt.Sprintf("count:10:%d", 100*i+10*j)))
				require.NoError(t, err)
				require.NoError(t, r.AddCredit(10))
			}
		}
		for range 10 * 5 * 10 {
			a := soon(t, out.answers, "an answer")
			require.NoError(t, a.Err)
			require.IsType(t, &frames.Accepted{}, a.State)
		}
		for i := range sessions {
			for j := range 5 {
				for k := range 10 {
					require.Equal(t, string(payload(k, 100*i+10*j)), string(soon(t, in[fmt.Sprint(i, " ", j)].deliveries, "a delivery").Payload))
				}
			}
		}
		for i, s := range sessions {
			if i%2 == 0 {
				require.NoError(t, s.DetachAll(t.Context()))
			}
			require.NoError(t, s.End(t.Context()))
		}
	}
}

// Both ends keep a connection alive on which nothing happens, each as often as the other one asks.
// A peer that hangs is noticed.
func TestEngineAndProtonStayInTouch(t *testing.T) {
	t.Parallel()
	p, mute := startPeer(t), startPeer(t)
	c, err := p.engine(t, "idle=2.4", amqp.Config{IdleTimeout: 2 * time.Second})
	require.NoError(t, err)
	assert.InDelta(t, 1.0, p.await(t, "open").Idle, 0.01, "half of it")
	assert.Equal(t, 1200*time.Millisecond, c.Peer().IdleTimeout, "proton says half of it, too")
	hung, err := mute.engine(t, "silent=1", amqp.Config{IdleTimeout: 2 * time.Second})
	require.NoError(t, err)
	mute.await(t, "silence")
	soon(t, hung.Done(), "a peer that hangs is lost")
	require.ErrorIs(t, hung.Err(), amqp.ErrSilent)
	// That took longer than the other two would have waited for each other.
	require.NoError(t, c.Err())
	s, err := c.Begin(t.Context(), amqp.SessionConfig{})
	require.NoError(t, err)
	b := newBox()
	b.send(t, b.sender(t, s, "accept"), payload(0, 10))
	assert.IsType(t, &frames.Accepted{}, soon(t, b.answers, "accepted").State)
	require.NoError(t, c.Close(t.Context()))
	if err := mute.cmd.Process.Kill(); err != nil && !errors.Is(err, net.ErrClosed) {
		require.NoError(t, err)
	}
}
