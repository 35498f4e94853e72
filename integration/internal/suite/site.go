package suite

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
	"os"
	"regexp"
	"slices"
	"strconv"
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
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// Patience is how long a test waits for what should come soon. It is long, since
// the machine may be busy with everything else.
const Patience = 2 * time.Minute

// Site is a virtual host of one broker that one test has to itself, so that
// tests can run at once with the default names.
type Site struct {
	*rabbitmq.Broker
	VHost string
}

var SiteCount atomic.Int64

func NewSite(t *testing.T, b *rabbitmq.Broker) *Site {
	t.Helper()
	s := &Site{Broker: b, VHost: fmt.Sprintf("it-%x-%d-%d", time.Now().UnixMilli(), os.Getpid(), SiteCount.Add(1))}
	s.HTTP(t, http.MethodPut, "/vhosts/"+s.VHost, nil, nil)
	t.Cleanup(func() { s.Remove(t) })
	return s
}

// removing has, by the broker's version, a lock that is held while a virtual host is
// removed.
var removing sync.Map

// Remove deletes the virtual host, and its queues one by one before that. On
// RabbitMQ 4.0.5 a queue that is deleted while it dead-letters at least once can
// make its worker crash a few times over; many of them at once use up the restarts
// of their supervisor, which ends for good and takes all such queues of the node
// with it.
func (s *Site) Remove(t *testing.T) {
	t.Helper()
	lock, _ := removing.LoadOrStore(s.Version, new(sync.Mutex))
	lock.(*sync.Mutex).Lock()
	defer lock.(*sync.Mutex).Unlock()
	var queues []struct{ Name string }
	s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
	for _, q := range queues {
		s.HTTP(t, http.MethodDelete, "/queues/"+s.VHost+"/"+url.PathEscape(q.Name), nil, nil)
	}
	s.HTTP(t, http.MethodDelete, "/vhosts/"+s.VHost, nil, nil)
}

// Newer says whether the broker is 4.3 or later.
func (s *Site) Newer() bool { return s.AtLeast("4.3") }

// AtLeast says whether the broker is of this series, such as "4.1", or a later one.
func (s *Site) AtLeast(series string) bool { return s.Version >= series }

// HoldsPublished says whether the broker is 4.4 or later: its quorum queues hold published
// messages until their x-opt-delivery-time.
func (s *Site) HoldsPublished() bool { return s.Newer() && s.Version != "4.3" }

// AMQPURL is the AMQP URL of the virtual host.
func (s *Site) AMQPURL() string { return s.AMQPURLWith(func(*url.URL) {}) }

// AMQPURLWith is the same with something else in it.
func (s *Site) AMQPURLWith(edit func(*url.URL)) string {
	u, err := url.Parse(s.URL)
	if err != nil {
		panic(err)
	}
	u.Path = "/" + s.VHost
	edit(u)
	return u.String()
}

// Host is the broker's host:port.
func (s *Site) Host() string {
	u, err := url.Parse(s.URL)
	if err != nil {
		panic(err)
	}
	return u.Host
}

// HTTP calls the HTTP API; path begins behind /api. 204 and 404 to a DELETE are
// as good as 200.
//
// What a busy broker couldn't do within 5 s, it is asked again: it keeps nothing of a quorum queue that
// has no leader by then (TestApplyRepeatsAQueueThatHadNoLeaderInTime). An import of
// definitions continues without the queue. It fails at the queue's bindings, if there are any.
func (s *Site) HTTP(t *testing.T, method, path string, body, reply any) {
	t.Helper()
	var status int
	var text []byte
	for range 10 {
		began := time.Now()
		var err error
		status, text, err = s.HTTPStatus(method, path, body)
		require.NoError(t, err)
		imports := method == http.MethodPost && strings.HasPrefix(path, "/definitions")
		if !bytes.Contains(text, []byte("cluster_not_formed")) && !(imports && time.Since(began) >= 5*time.Second) {
			break
		}
	}
	require.True(t, status/100 == 2 || method == http.MethodDelete && status == http.StatusNotFound, "%s %s: %d %s", method, path, status, text)
	if reply != nil {
		require.NoError(t, json.Unmarshal(text, reply), "%s %s: %s", method, path, text)
	}
}

func (s *Site) HTTPStatus(method, path string, body any) (int, []byte, error) {
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
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
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

// User makes a user with the given permissions (regular expressions) on the
// virtual host, and returns the URL with which it logs in.
func (s *Site) User(t *testing.T, configure, write, read string) string {
	t.Helper()
	name := fmt.Sprintf("%s-u%d", s.VHost, SiteCount.Add(1))
	s.HTTP(t, http.MethodPut, "/users/"+name, map[string]string{"password": "secret-" + name, "tags": ""}, nil)
	t.Cleanup(func() { s.HTTP(t, http.MethodDelete, "/users/"+name, nil, nil) })
	s.HTTP(t, http.MethodPut, "/permissions/"+s.VHost+"/"+name, map[string]string{"configure": configure, "write": write, "read": read}, nil)
	return s.AMQPURLWith(func(u *url.URL) { u.User = url.UserPassword(name, "secret-"+name) })
}

// Connect opens a connection of ours that ends with the test, and whose log goes
// to the logbook that is returned.
func (s *Site) Connect(t *testing.T, edit ...func(*client.Config)) (*client.Conn, *Logbook) {
	t.Helper()
	return ConnectTo(t, s.AMQPURL(), edit...)
}

// ConnectTo is Connect to a URL. A busy broker may take longer for a first connection than a
// test's short ConnectTimeout, so it tries again.
func ConnectTo(t *testing.T, url string, edit ...func(*client.Config)) (*client.Conn, *Logbook) {
	t.Helper()
	log := NewLogbook(t)
	cfg := client.Config{Logger: slog.New(log)}
	for _, e := range edit {
		e(&cfg)
	}
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	conn, err := client.Connect(ctx, url, cfg)
	for errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		conn, err = client.Connect(ctx, url, cfg)
	}
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn, log
}

// Apply declares a topology.
func Apply(t *testing.T, conn *client.Conn, topology declare.Topology) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	_, err := declare.Apply(ctx, conn.Management(), topology)
	for ctx.Err() == nil {
		if busy, ok := errors.AsType[*declare.Error](err); !ok || !busy.WorthRetrying() {
			break
		}
		_, err = declare.Apply(ctx, conn.Management(), topology)
	}
	require.NoError(t, err)
}

// ApplyRetry declares what policy needs for the work queues.
func ApplyRetry(t *testing.T, conn *client.Conn, policy retry.Policy, work ...declare.QuorumQueue) {
	t.Helper()
	topology, err := retry.Topology(policy, work...)
	require.NoError(t, err)
	Apply(t, conn, topology)
}

// ApplyGroup declares a group whose partitions are like work, and the queue "dead" for its dead
// letters.
func ApplyGroup(t *testing.T, conn *client.Conn, g partition.Group, work declare.QuorumQueue) {
	t.Helper()
	work.DeadLetter, work.DeliveryLimit = declare.ToQueue("dead"), declare.Unlimited
	topology, err := g.Topology(work)
	require.NoError(t, err)
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
	Apply(t, conn, topology)
}

// QueueOf is a topology of one queue, whose dead are dropped unless it says
// otherwise.
func QueueOf(q declare.QuorumQueue) declare.Topology {
	if q.DeadLetter.IsZero() {
		q.DeadLetter = declare.Drop()
	}
	return declare.Topology{Queues: []declare.Queue{q}}
}

// Publisher opens one that ends with the test.
func Publisher[T any](t *testing.T, conn *client.Conn, to address.Address) *client.Publisher[T] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	p, err := client.NewPublisher[T](ctx, conn, to, client.PublisherConfig{})
	require.NoError(t, err)
	return p
}

// Publish sends one value and wants it accepted.
func Publish[T any](t *testing.T, p *client.Publisher[T], v T, edit ...func(*client.Message)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	require.NoError(t, p.Publish(ctx, v, edit...))
}

// Consume runs a consumer until the test ends, or stop is called, which returns
// what Consume returned.
func Consume(t *testing.T, conn *client.Conn, queue string, h client.Handler, cfg client.ConsumerConfig) (stop func() error) {
	t.Helper()
	return ConsumeBy(context.Background(), t, conn, queue, h, cfg)
}

// ConsumeBy is consume with a ctx.
func ConsumeBy(ctx context.Context, t *testing.T, conn *client.Conn, queue string, h client.Handler, cfg client.ConsumerConfig) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- conn.Consume(ctx, queue, h, cfg) }()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(2 * Patience):
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

// Await takes a value from c, or fails the test after patience.
func Await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	return awaitFor(t, Patience, c, what)
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

// Poll calls yes until it returns true, or fails the test after patience.
func Poll(t *testing.T, what string, yes func() bool) {
	t.Helper()
	for began := time.Now(); !yes(); {
		if time.Since(began) > Patience {
			require.FailNow(t, "not so within "+Patience.String(), what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Ready is how many messages are ready in a queue.
func Ready(t *testing.T, conn *client.Conn, queue string) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	info, err := declare.Inspect(ctx, conn.Management(), queue)
	require.NoError(t, err)
	return int(info.Messages)
}

// AwaitConsumers waits until a queue has n consumers.
func AwaitConsumers(t *testing.T, conn *client.Conn, queue string, n int) {
	t.Helper()
	Poll(t, fmt.Sprintf("%d consumers of %q", n, queue), func() bool {
		info, err := declare.Inspect(t.Context(), conn.Management(), queue)
		require.NoError(t, err)
		return int(info.Consumers) == n
	})
}

// Peer is go-amqp itself: what isn't hopback, to send and look at messages with.
type Peer struct {
	t    *testing.T
	Conn *amqp.Conn
	Site *amqp.Session
}

func (s *Site) Peer(t *testing.T) *Peer {
	t.Helper()
	return s.PeerAt(t, s.URL)
}

// PeerAt is peer with the login of a URL.
func (s *Site) PeerAt(t *testing.T, login string) *Peer {
	t.Helper()
	u, err := url.Parse(login)
	require.NoError(t, err)
	password, _ := u.User.Password()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	conn, err := amqp.Dial(ctx, "amqp://"+u.Host, &amqp.ConnOptions{
		HostName: "vhost:" + s.VHost, SASLType: amqp.SASLTypePlain(u.User.Username(), password),
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	p := &Peer{t: t, Conn: conn}
	p.session()
	return p
}

// session begins a new session, for what follows.
func (p *Peer) session() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	var err error
	p.Site, err = p.Conn.NewSession(ctx, nil)
	require.NoError(p.t, err)
}

// Send sends to an address and returns the broker's answer.
func (p *Peer) Send(to address.Address, m *amqp.Message) amqp.DeliveryState {
	p.t.Helper()
	target, err := to.Build()
	require.NoError(p.t, err)
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	l, err := p.Site.NewSender(ctx, target, nil)
	require.NoError(p.t, err)
	r, err := l.SendWithReceipt(ctx, m, nil)
	require.NoError(p.t, err)
	state, err := r.Wait(ctx)
	require.NoError(p.t, err)
	require.NoError(p.t, l.Close(ctx))
	return state
}

// Put sends to a queue and wants it accepted.
func (p *Peer) Put(queue string, m *amqp.Message) {
	p.t.Helper()
	require.IsType(p.t, &amqp.StateAccepted{}, p.Send(address.Queue(queue), m))
}

// Receiver attaches to a queue, with manual credit.
func (p *Peer) Receiver(queue string, credit uint32) *amqp.Receiver {
	p.t.Helper()
	source, err := address.Queue(queue).Build()
	require.NoError(p.t, err)
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	r, err := p.Site.NewReceiver(ctx, source, &amqp.ReceiverOptions{Credit: -1})
	require.NoError(p.t, err)
	require.NoError(p.t, r.IssueCredit(credit))
	return r
}

// Next receives a message without settling it.
func (p *Peer) Next(r *amqp.Receiver) *amqp.Message {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	m, err := r.Receive(ctx, nil)
	require.NoError(p.t, err)
	return m
}

// Take receives n messages from a queue and accepts them.
func (p *Peer) Take(queue string, n int) []*amqp.Message {
	p.t.Helper()
	r := p.Receiver(queue, uint32(n))
	ms := make([]*amqp.Message, n)
	for i := range ms {
		ms[i] = p.Next(r)
		require.NoError(p.t, r.AcceptMessage(p.t.Context(), ms[i]))
	}
	require.NoError(p.t, r.Close(p.t.Context()))
	return ms
}

// Logbook keeps what is logged, so that a test can look at it and wait for it.
type Logbook struct {
	*sharedLog
	attrs []slog.Attr
}

type sharedLog struct {
	mu    sync.Mutex
	lines []string
}

func NewLogbook(t *testing.T) *Logbook {
	b := &Logbook{sharedLog: &sharedLog{}}
	t.Cleanup(func() {
		if t.Failed() {
			lines := b.All()
			t.Logf("log of the client, the last of %d lines:\n%s", len(lines), strings.Join(lines[max(len(lines)-40, 0):], "\n"))
		}
	})
	return b
}

// Enabled is always true.
func (b *Logbook) Enabled(context.Context, slog.Level) bool { return true }

// Handle keeps a record as one line.
func (b *Logbook) Handle(_ context.Context, r slog.Record) error {
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
func (b *Logbook) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Logbook{b.sharedLog, slices.Concat(b.attrs, attrs)}
}

// WithGroup leaves groups out.
func (b *Logbook) WithGroup(string) slog.Handler { return b }

func (b *sharedLog) All() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.lines)
}

// With are the lines that hold every one of texts.
func (b *sharedLog) With(texts ...string) []string {
	return slices.DeleteFunc(b.All(), func(line string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) })
	})
}

// moreMessages is the attribute of a line that stands for several messages.
var moreMessages = regexp.MustCompile(` more=(\d+) in=`)

// Messages is for how many messages there are lines that hold every one of texts. A flood of lines is
// combined to one, up to 10 s later.
func (b *sharedLog) Messages(texts ...string) (n int) {
	for _, line := range b.With(texts...) {
		more := 1
		if m := moreMessages.FindStringSubmatch(line); m != nil {
			more, _ = strconv.Atoi(m[1])
		}
		n += more
	}
	return n
}

// Report prints a measured figure.
func Report(t *testing.T, s *Site, format string, args ...any) {
	t.Helper()
	fmt.Printf("REPORT %s %s: %s\n", t.Name(), s.FullVersion, fmt.Sprintf(format, args...))
}

// Spread is the median and the maximum.
func Spread(ds []time.Duration) string {
	if len(ds) == 0 {
		return "none"
	}
	ds = slices.Clone(ds)
	slices.Sort(ds)
	return fmt.Sprintf("p50 %v, max %v, n %d", ds[len(ds)/2].Round(100*time.Microsecond), ds[len(ds)-1].Round(100*time.Microsecond), len(ds))
}
