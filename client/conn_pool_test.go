package client

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// manyConns is a Conn with a server that allows few sessions on a connection: 8, with 4 kept for the Conn.
type manyConns struct {
	*Conn
	t        *testing.T
	events   chan Event
	sessions atomic.Int64 // that a connection made from now on has
	refuse   atomic.Bool  // further connections
	dialling atomic.Int64

	mu      sync.Mutex
	names   []string
	sockets map[string]net.Conn // the client's, by the connection's name
}

// further returns the names of the connections next to the first, which may be lost at any time, because the
// server doesn't answer its requests.
func (m *manyConns) further() (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range m.names {
		if name != "orders" {
			names = append(names, name)
		}
	}
	return names
}

func newManyConns(t *testing.T, cfg Config) *manyConns {
	m := &manyConns{t: t, events: make(chan Event, 10_000), sockets: map[string]net.Conn{}}
	m.sessions.Store(8)
	addr := serveEach(t, func(c net.Conn) *hostilePeer { return &hostilePeer{Conn: c, sessions: int(m.sessions.Load())} })
	cfg.Logger, cfg.Name, cfg.OnEvent = quiet, "orders", func(e Event) { m.events <- e }
	cfg.Reconnect = ReconnectBackoff{Min: time.Millisecond, Max: 5 * time.Millisecond}
	cfg, err := cfg.withDefaults()
	require.NoError(t, err)
	eps, err := cfg.endpoints("amqp://u:p@" + addr + "/")
	require.NoError(t, err)
	m.Conn = newConn(cfg, eps)
	m.pool.IdleAfter = 50 * time.Millisecond
	m.pool.Connect = func(ctx context.Context, ep link.Endpoint, cfg link.DialConfig) (*link.Wire, error) {
		m.mu.Lock()
		rebuilt := slices.Contains(m.names, cfg.Name)
		m.names = append(m.names, cfg.Name)
		m.mu.Unlock()
		if !rebuilt {
			assert.EqualValues(t, 1, m.dialling.Add(1), "one at a time")
			defer m.dialling.Add(-1)
		}
		if m.refuse.Load() {
			time.Sleep(50 * time.Millisecond)
			return nil, &failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrVirtualHost}
		}
		w, err := link.Dial(ctx, ep, cfg)
		if err == nil {
			m.mu.Lock()
			m.sockets[cfg.Name] = w.Net
			m.mu.Unlock()
		}
		return w, err
	}
	w, at, err := m.pool.Dial(t.Context(), 0, m.pool.Conns[0].Cfg)
	require.NoError(t, err)
	m.pool.Conns[0].Run(w, at)
	t.Cleanup(func() { assert.NoError(t, m.Close(within(t, time.Minute))) })
	return m
}

func (m *manyConns) publisher() (*Publisher[string], error) {
	return NewPublisher[string](within(m.t, time.Minute), m.Conn, address.Queue("q"), PublisherConfig{})
}

// publishers opens n at once.
func (m *manyConns) publishers(n int) []*Publisher[string] {
	all := make([]*Publisher[string], n)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() {
			var err error
			all[i], err = m.publisher()
			assert.NoError(m.t, err)
		})
	}
	wg.Wait()
	return all
}

func (m *manyConns) work(ps []*Publisher[string]) {
	m.t.Helper()
	for _, p := range ps {
		require.NoError(m.t, p.Publish(within(m.t, time.Minute), "m"))
	}
}

func (m *manyConns) await(kind EventKind, op string) Event {
	m.t.Helper()
	timeout := time.After(time.Minute)
	for {
		select {
		case e := <-m.events:
			if e.Kind == kind && e.Op == op {
				return e
			}
		case <-timeout:
			require.FailNow(m.t, "no such event", "%s %v", op, kind)
		}
	}
}

func (m *manyConns) taken() (all []int) {
	m.pool.Mu.Lock()
	defer m.pool.Mu.Unlock()
	for _, l := range m.pool.Conns {
		all = append(all, l.Taken)
	}
	return all
}

// Many that start at once get the connections that they need, one after the other, and
// no more. Those that are empty for a while are closed, but for the first.
func TestConnOpensAsManyConnectionsAsAreNeeded(t *testing.T) {
	m := newManyConns(t, Config{})
	ps := m.publishers(10)
	assert.Equal(t, []string{"orders-2", "orders-3"}, m.further())
	assert.Equal(t, []int{4, 4, 2}, m.taken())
	assert.Equal(t, 3, m.State().Connections)
	assert.EqualValues(t, 3, m.State().Generation)
	m.work(ps)
	_, _, err := m.Management().Request(within(t, time.Second), "GET", "/queues/q", nil)
	require.ErrorIs(t, err, failure.ErrOutcomeUnknown, "it was sent: there is a session left for it; the server knows no answer")

	for _, p := range ps {
		require.NoError(t, p.Close(within(t, time.Minute)))
	}
	ended := []uint64{m.await(EventEnded, "connection").Generation, m.await(EventEnded, "connection").Generation}
	slices.Sort(ended)
	assert.Equal(t, []uint64{2, 3}, ended)
	assert.Equal(t, []int{0}, m.taken())
	assert.True(t, m.State().Connected)
	m.work(m.publishers(5))
	assert.Equal(t, "orders-2", m.further()[2], "the number is free again")
}

// A consumer reserves two sessions when it starts, so that its forwards find one.
func TestConsumersReserveASessionForTheirForwards(t *testing.T) {
	m := newManyConns(t, Config{MaxConnections: 1})
	nothing := HandlerFunc(func(context.Context, *Delivery) error { return nil })
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	for range 2 {
		go func() { ended <- m.Consume(ctx, "q", nothing, ConsumerConfig{}) }()
		m.await(EventUp, "consume")
	}
	assert.Equal(t, []int{4}, m.taken())
	err := m.Consume(ctx, "q", nothing, ConsumerConfig{})
	require.ErrorIs(t, err, failure.ErrSessionLimit)
	assert.NotErrorIs(t, err, failure.ErrConnectionLost)
	assert.True(t, failure.SafeToRetry(err))
	assert.Equal(t, 1, strings.Count(err.Error(), failure.ErrSessionLimit.Error()), err.Error())
	_, err = m.publisher()
	require.ErrorIs(t, err, failure.ErrSessionLimit)
	assert.ErrorContains(t, err, "MaxConnections", "it says what to do")
	stop()
	for range 2 {
		require.NoError(t, <-ended)
	}
	m.work(m.publishers(4))
}

// A reservation opens what it has reserved and, while an old session lasts, one beyond that.
func TestReservationsOpenWhatTheyReserved(t *testing.T) {
	m := newManyConns(t, Config{})
	m.pool.IdleAfter = time.Hour // no connection closes while this counts
	b, other := m.pool.Reserve(2), m.pool.Reserve(2)
	open := func(b *link.Reservation) link.Session {
		s, err := b.Open(within(t, time.Minute))
		require.NoError(t, err)
		return s
	}
	first := open(b)
	assert.Equal(t, []int{2}, m.taken())
	open(other)
	assert.Equal(t, []int{4}, m.taken())
	open(b)
	open(other)
	assert.Equal(t, []int{4}, m.taken(), "both had been reserved")
	third := open(b)
	assert.Equal(t, []int{4, 1}, m.taken())
	link.CloseSession(third)
	assert.Equal(t, []int{4, 0}, m.taken())
	link.CloseSession(first)
	assert.Equal(t, []int{4, 0}, m.taken(), "it stays reserved")
	open(b)
	b.Release()
	assert.Equal(t, []int{4, 0}, m.taken(), "both of its sessions are open")
	_, err := b.Open(t.Context())
	require.ErrorIs(t, err, failure.ErrClosed)

	// Neither one that waits for its connection nor one whose ctx has ended takes a slot.
	c := m.pool.Reserve(1)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		_, err := c.Open(ended)
		require.ErrorIs(t, err, context.Canceled)
	}
	c.Release()
	assert.Equal(t, []int{4, 0}, m.taken())
}

// A further connection that is refused is one attempt for all that wait for it. Those
// that have sessions don't notice.
func TestRefusedFurtherConnectionsHurtNobodyElse(t *testing.T) {
	m := newManyConns(t, Config{})
	ps := m.publishers(4)
	m.refuse.Store(true)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			_, err := m.publisher()
			assert.ErrorIs(t, err, failure.ErrSessionLimit)
			assert.True(t, failure.SafeToRetry(err))
			assert.ErrorContains(t, err, "refuses another connection")
		})
	}
	wg.Wait()
	assert.LessOrEqual(t, len(m.further()), 4, "not one for each")
	assert.Zero(t, m.await(EventRefused, "connection").Generation)
	assert.True(t, m.State().Connected)
	m.work(ps)
	m.refuse.Store(false)
	var first *Publisher[string]
	for began := time.Now(); first == nil; {
		m.pool.Mu.Lock()
		m.pool.Refusal = nil // it holds for Reconnect.Min; and an attempt that ends now sets it again
		m.pool.Mu.Unlock()
		var err error
		if first, err = m.publisher(); err != nil {
			first = nil
			require.ErrorIs(t, err, failure.ErrSessionLimit)
			require.Less(t, time.Since(began), time.Minute)
		}
	}
	m.work(append(m.publishers(3), first))
	assert.Equal(t, []int{4, 4}, m.taken())
}

// A lost connection is its users' business alone. They are back on it when it is, but
// for those that it has no place for any more.
func TestUsersComeBackToTheirConnection(t *testing.T) {
	m := newManyConns(t, Config{})
	ps := m.publishers(8)
	cut := func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		_ = m.sockets["orders-2"].Close()
	}
	lost := func() {
		t.Helper()
		assert.EqualValues(t, 2, m.await(EventLost, "connection").Generation)
		for n := 0; n < 4; { // the first Up of some may not have been told yet
			if m.await(EventUp, "publish").Generation == 3 {
				n++
			}
		}
	}
	cut()
	lost()
	m.work(ps)
	assert.Equal(t, []int{4, 4}, m.taken())
	assert.EqualValues(t, 3, m.State().Generation)

	m.sessions.Store(2) // one for the machinery, one for others
	cut()
	assert.EqualValues(t, 3, m.await(EventLost, "connection").Generation)
	for range 4 {
		m.await(EventUp, "publish")
	}
	m.work(ps)
	assert.Equal(t, []int{4, 1, 1, 1, 1}, m.taken())
}

func TestConnClosesWhileItOpensAFurtherConnection(t *testing.T) {
	m := newManyConns(t, Config{})
	m.publishers(4)
	begun := make(chan struct{})
	m.pool.Connect = func(ctx context.Context, ep link.Endpoint, _ link.DialConfig) (*link.Wire, error) {
		close(begun)
		<-ctx.Done()
		return nil, &failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrUnreachable, Err: ctx.Err()}
	}
	opening := async(func() error {
		_, err := m.publisher()
		return err
	})
	<-begun
	require.NoError(t, m.Close(within(t, time.Minute)))
	require.ErrorIs(t, <-opening, failure.ErrClosed)
	assert.Equal(t, 0, m.State().Connections)
	assert.False(t, m.State().Connected)
}

// A caller that wants a session when the Conn is closed gets ErrClosed, no matter which connection its slot is on:
// Close doesn't wait for those that it has cut off.
func TestSessionWantedAfterCloseIsRefused(t *testing.T) {
	m := newManyConns(t, Config{})
	b := m.pool.Reserve(publisherSessions)
	s, err := b.Open(t.Context())
	require.NoError(t, err)
	s.Close(t.Context())
	require.NoError(t, m.Close(within(t, time.Minute)))
	refused := async(func() error {
		_, err := b.Open(context.Background())
		return err
	})
	select {
	case err := <-refused:
		require.ErrorIs(t, err, failure.ErrClosed)
	case <-time.After(time.Minute):
		t.Fatal("it looks for a connection forever")
	}
	b.Release()
}

// A broker that allows one session on a connection leaves none to publishers and consumers, however
// many connections there are. The error names the broker's settings, and not MaxConnections.
func TestABrokerWithOneSessionOnAConnection(t *testing.T) {
	addr := serveEach(t, func(c net.Conn) *hostilePeer { return &hostilePeer{Conn: c, sessions: 1} })
	conn, err := Connect(within(t, time.Minute), "amqp://u:p@"+addr+"/", Config{Logger: quiet})
	require.NoError(t, err)
	defer conn.Close(within(t, time.Minute))
	_, publish := NewPublisher[string](within(t, time.Minute), conn, address.Queue("q"), PublisherConfig{})
	consume := conn.Consume(within(t, time.Minute), "q", HandlerFunc(func(context.Context, *Delivery) error { return nil }), ConsumerConfig{})
	for _, err := range []error{publish, consume} {
		require.ErrorIs(t, err, ErrSessionLimit)
		require.ErrorContains(t, err, "session_max_per_connection")
		require.ErrorContains(t, err, "channel-max 0")
		assert.NotContains(t, err.Error(), "MaxConnections")
		assert.False(t, WorthRetrying(err))
		assert.True(t, SafeToRetry(err))
	}
}
