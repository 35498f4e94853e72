package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/broker"
	"github.com/hopback/hopback/retry"
)

// patience is how long a test waits for what should come soon. It is long, since
// the machine may be busy with everything else.
const patience = 30 * time.Second

// site is a virtual host of one broker that one test has to itself, so that
// tests can run at once with the default names.
type site struct {
	*broker.Broker
	vhost string
}

var siteCount atomic.Int64

func newSite(t *testing.T, b *broker.Broker) *site {
	t.Helper()
	s := &site{Broker: b, vhost: fmt.Sprintf("it-%x-%d", time.Now().UnixMilli(), siteCount.Add(1))}
	s.http(t, http.MethodPut, "/vhosts/"+s.vhost, nil, nil)
	t.Cleanup(func() { s.remove(t) })
	return s
}

// removing has, by the broker's version, what is held by whoever removes a virtual
// host.
var removing sync.Map

// remove deletes the virtual host, and its queues one by one before that. On
// RabbitMQ 4.0.5 a queue that is deleted while it dead-letters at least once can
// make its worker crash a few times over; many of them at once use up the restarts
// of their supervisor, which ends for good and takes all such queues of the node
// with it.
func (s *site) remove(t *testing.T) {
	t.Helper()
	lock, _ := removing.LoadOrStore(s.Version, new(sync.Mutex))
	lock.(*sync.Mutex).Lock()
	defer lock.(*sync.Mutex).Unlock()
	var queues []struct{ Name string }
	s.http(t, http.MethodGet, "/queues/"+s.vhost+"?disable_stats=true", nil, &queues)
	for _, q := range queues {
		s.http(t, http.MethodDelete, "/queues/"+s.vhost+"/"+url.PathEscape(q.Name), nil, nil)
	}
	s.http(t, http.MethodDelete, "/vhosts/"+s.vhost, nil, nil)
}

// newer says whether the broker is 4.3 or later.
func (s *site) newer() bool { return s.Version != "4.0" }

// url is the AMQP URL of the virtual host.
func (s *site) url() string { return s.urlOf(func(*url.URL) {}) }

// urlOf is the same with something else in it.
func (s *site) urlOf(edit func(*url.URL)) string {
	u, err := url.Parse(s.URL)
	if err != nil {
		panic(err)
	}
	u.Path = "/" + s.vhost
	edit(u)
	return u.String()
}

// host is the broker's host:port.
func (s *site) host() string {
	u, err := url.Parse(s.URL)
	if err != nil {
		panic(err)
	}
	return u.Host
}

// http calls the HTTP API; path begins behind /api. 204 and 404 to a DELETE are
// as good as 200.
func (s *site) http(t *testing.T, method, path string, body, reply any) {
	t.Helper()
	status, text, err := s.httpStatus(method, path, body)
	require.NoError(t, err)
	require.True(t, status/100 == 2 || method == http.MethodDelete && status == http.StatusNotFound, "%s %s: %d %s", method, path, status, text)
	if reply != nil {
		require.NoError(t, json.Unmarshal(text, reply), "%s %s: %s", method, path, text)
	}
}

func (s *site) httpStatus(method, path string, body any) (int, []byte, error) {
	base, err := url.Parse(s.ManagementURL)
	if err != nil {
		return 0, nil, err
	}
	user := base.User
	base.User = nil
	var text []byte
	if body != nil {
		if text, err = json.Marshal(body); err != nil {
			return 0, nil, err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(base.String(), "/")+"/api"+path, bytes.NewReader(text))
	if err != nil {
		return 0, nil, err
	}
	password, _ := user.Password()
	req.SetBasicAuth(user.Username(), password)
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

// user makes a user with the given permissions (regular expressions) on the
// virtual host, and returns the URL with which it logs in.
func (s *site) user(t *testing.T, configure, write, read string) string {
	t.Helper()
	name := fmt.Sprintf("%s-u%d", s.vhost, siteCount.Add(1))
	s.http(t, http.MethodPut, "/users/"+name, map[string]string{"password": "secret-" + name, "tags": ""}, nil)
	t.Cleanup(func() { s.http(t, http.MethodDelete, "/users/"+name, nil, nil) })
	s.http(t, http.MethodPut, "/permissions/"+s.vhost+"/"+name, map[string]string{"configure": configure, "write": write, "read": read}, nil)
	return s.urlOf(func(u *url.URL) { u.User = url.UserPassword(name, "secret-"+name) })
}

// connect opens a connection of ours that ends with the test, and whose log goes
// to the logbook that is returned.
func (s *site) connect(t *testing.T, edit ...func(*client.Config)) (*client.Conn, *logbook) {
	t.Helper()
	return connectTo(t, s.url(), edit...)
}

func connectTo(t *testing.T, url string, edit ...func(*client.Config)) (*client.Conn, *logbook) {
	t.Helper()
	log := newLogbook(t)
	cfg := client.Config{Logger: slog.New(log)}
	for _, e := range edit {
		e(&cfg)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := client.Connect(ctx, url, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn, log
}

// apply declares a topology.
func apply(t *testing.T, conn *client.Conn, topology declare.Topology) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := declare.Apply(ctx, conn.Management(), topology)
	require.NoError(t, err)
}

// applyRetry declares what policy needs for the work queues.
func applyRetry(t *testing.T, conn *client.Conn, policy retry.Policy, work ...declare.QuorumQueue) {
	t.Helper()
	topology, err := retry.Topology(policy, work...)
	require.NoError(t, err)
	apply(t, conn, topology)
}

// queueOf is a topology of one queue, whose dead are dropped unless it says
// otherwise.
func queueOf(q declare.QuorumQueue) declare.Topology {
	if q.DeadLetter.IsZero() {
		q.DeadLetter = declare.Drop()
	}
	return declare.Topology{Queues: []declare.Queue{q}}
}

// publisher opens one that ends with the test.
func publisher[T any](t *testing.T, conn *client.Conn, to address.Address) *client.Publisher[T] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p, err := client.NewPublisher[T](ctx, conn, to, client.PublisherConfig{})
	require.NoError(t, err)
	return p
}

// publish sends one value and wants it accepted.
func publish[T any](t *testing.T, p *client.Publisher[T], v T, edit ...func(*client.Message)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, p.Publish(ctx, v, edit...))
}

// consume runs a consumer until the test ends, or stop is called, which returns
// what Consume returned.
func consume(t *testing.T, conn *client.Conn, queue string, h client.Handler, cfg client.ConsumerConfig) (stop func() error) {
	t.Helper()
	return consumeBy(context.Background(), t, conn, queue, h, cfg)
}

// consumeBy is consume with a ctx.
func consumeBy(ctx context.Context, t *testing.T, conn *client.Conn, queue string, h client.Handler, cfg client.ConsumerConfig) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- conn.Consume(ctx, queue, h, cfg) }()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(2 * patience):
			return fmt.Errorf("the consumer of %q doesn't end", queue)
		}
	})
	t.Cleanup(func() {
		if err := stop(); err != nil && !errors.Is(err, client.ErrClosed) {
			t.Errorf("consumer of %q: %v", queue, err)
		}
	})
	return stop
}

// await takes a value from c, or fails the test after patience.
func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	return awaitFor(t, patience, c, what)
}

// awaitFor is await for what may take longer.
func awaitFor[T any](t *testing.T, limit time.Duration, c <-chan T, what string) T {
	t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case v := <-c:
		return v
	case <-timer.C:
		require.FailNow(t, "nothing came within "+limit.String(), what)
		panic("unreachable")
	}
}

// poll asks until it is told yes, or fails the test after patience.
func poll(t *testing.T, what string, yes func() bool) {
	t.Helper()
	for began := time.Now(); !yes(); {
		if time.Since(began) > patience {
			require.FailNow(t, "not so within "+patience.String(), what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// ready is how many messages are ready in a queue.
func ready(t *testing.T, conn *client.Conn, queue string) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	info, err := declare.Inspect(ctx, conn.Management(), queue)
	require.NoError(t, err)
	return int(info.Messages)
}

// awaitConsumers waits until a queue has n consumers.
func awaitConsumers(t *testing.T, conn *client.Conn, queue string, n int) {
	t.Helper()
	poll(t, fmt.Sprintf("%d consumers of %q", n, queue), func() bool {
		info, err := declare.Inspect(t.Context(), conn.Management(), queue)
		require.NoError(t, err)
		return int(info.Consumers) == n
	})
}

// peer is go-amqp itself: what isn't hopback, to send and look at messages with.
type peer struct {
	t    *testing.T
	conn *amqp.Conn
	s    *amqp.Session
}

func (s *site) peer(t *testing.T) *peer {
	t.Helper()
	return s.peerAt(t, s.URL)
}

// peerAt is peer with the login of a URL.
func (s *site) peerAt(t *testing.T, login string) *peer {
	t.Helper()
	u, err := url.Parse(login)
	require.NoError(t, err)
	password, _ := u.User.Password()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := amqp.Dial(ctx, "amqp://"+u.Host, &amqp.ConnOptions{
		HostName: "vhost:" + s.vhost, SASLType: amqp.SASLTypePlain(u.User.Username(), password),
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	p := &peer{t: t, conn: conn}
	p.session()
	return p
}

// session begins a new session, for what follows.
func (p *peer) session() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	var err error
	p.s, err = p.conn.NewSession(ctx, nil)
	require.NoError(p.t, err)
}

// send sends to an address and returns the broker's answer.
func (p *peer) send(to address.Address, m *amqp.Message) amqp.DeliveryState {
	p.t.Helper()
	target, err := to.Build()
	require.NoError(p.t, err)
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	l, err := p.s.NewSender(ctx, target, nil)
	require.NoError(p.t, err)
	r, err := l.SendWithReceipt(ctx, m, nil)
	require.NoError(p.t, err)
	state, err := r.Wait(ctx)
	require.NoError(p.t, err)
	require.NoError(p.t, l.Close(ctx))
	return state
}

// put sends to a queue and wants it accepted.
func (p *peer) put(queue string, m *amqp.Message) {
	p.t.Helper()
	require.IsType(p.t, &amqp.StateAccepted{}, p.send(address.Queue(queue), m))
}

// receiver attaches to a queue, with manual credit.
func (p *peer) receiver(queue string, credit uint32) *amqp.Receiver {
	p.t.Helper()
	source, err := address.Queue(queue).Build()
	require.NoError(p.t, err)
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	r, err := p.s.NewReceiver(ctx, source, &amqp.ReceiverOptions{Credit: -1})
	require.NoError(p.t, err)
	require.NoError(p.t, r.IssueCredit(credit))
	return r
}

// next receives a message without settling it.
func (p *peer) next(r *amqp.Receiver) *amqp.Message {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	m, err := r.Receive(ctx, nil)
	require.NoError(p.t, err)
	return m
}

// take receives n messages from a queue and accepts them.
func (p *peer) take(queue string, n int) []*amqp.Message {
	p.t.Helper()
	r := p.receiver(queue, uint32(n))
	ms := make([]*amqp.Message, n)
	for i := range ms {
		ms[i] = p.next(r)
		require.NoError(p.t, r.AcceptMessage(p.t.Context(), ms[i]))
	}
	require.NoError(p.t, r.Close(p.t.Context()))
	return ms
}

// logbook keeps what is logged, so that a test can look at it and wait for it.
type logbook struct {
	*sharedLog
	attrs []slog.Attr
}

type sharedLog struct {
	mu    sync.Mutex
	lines []string
}

func newLogbook(t *testing.T) *logbook {
	b := &logbook{sharedLog: &sharedLog{}}
	t.Cleanup(func() {
		if t.Failed() {
			lines := b.all()
			t.Logf("log of the client, the last of %d lines:\n%s", len(lines), strings.Join(lines[max(len(lines)-40, 0):], "\n"))
		}
	})
	return b
}

// Enabled is always true.
func (b *logbook) Enabled(context.Context, slog.Level) bool { return true }

// Handle keeps a record as one line.
func (b *logbook) Handle(_ context.Context, r slog.Record) error {
	var line strings.Builder
	fmt.Fprintf(&line, "%s %s %s", r.Time.Format("15:04:05.000"), r.Level, r.Message)
	write := func(a slog.Attr) bool {
		if text := a.Value.String(); a.Key != "stack" {
			fmt.Fprintf(&line, " %s=%s", a.Key, text)
		}
		return true
	}
	for _, a := range b.attrs {
		write(a)
	}
	r.Attrs(write)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = append(b.lines, line.String())
	return nil
}

// WithAttrs returns a handler that writes into the same book.
func (b *logbook) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &logbook{b.sharedLog, slices.Concat(b.attrs, attrs)}
}

// WithGroup leaves groups out.
func (b *logbook) WithGroup(string) slog.Handler { return b }

func (b *sharedLog) all() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.lines)
}

// with are the lines that hold every one of texts.
func (b *sharedLog) with(texts ...string) []string {
	return slices.DeleteFunc(b.all(), func(line string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) })
	})
}

// report prints a measured figure.
func report(t *testing.T, s *site, format string, args ...any) {
	t.Helper()
	fmt.Printf("REPORT %s %s: %s\n", t.Name(), s.FullVersion, fmt.Sprintf(format, args...))
}

// spread is the median and the maximum.
func spread(ds []time.Duration) string {
	if len(ds) == 0 {
		return "none"
	}
	ds = slices.Clone(ds)
	slices.Sort(ds)
	return fmt.Sprintf("p50 %v, max %v, n %d", ds[len(ds)/2].Round(100*time.Microsecond), ds[len(ds)-1].Round(100*time.Microsecond), len(ds))
}
