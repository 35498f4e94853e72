package web

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/httpapi"
	"github.com/hopback/hopback/retry"
)

// stage is a broker in memory with a desk, and a page that a browser without scripts uses.
type stage struct {
	t       *testing.T
	broker  *hopbacktest.Broker
	conn    *client.Conn
	desk    *desk.Desk
	handler *Handler
	server  *httptest.Server
	log     *logged
	prefix  string
}

const testPatience = time.Minute

func newStage(t *testing.T, cfg Config, versions ...string) *stage {
	return stageUnder(t, cfg, "/", versions...)
}

func stageUnder(t *testing.T, cfg Config, prefix string, versions ...string) *stage {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, hopbacktest.Config{Version: strings.Join(versions, "")})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	api := httptest.NewServer(broker.HTTPHandler())
	t.Cleanup(api.Close)
	reader, err := httpapi.New(strings.Replace(api.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
	require.NoError(t, err)
	d, err := desk.New(conn, desk.Config{HTTP: reader, Logger: quiet})
	require.NoError(t, err)
	s := &stage{t: t, broker: broker, conn: conn, desk: d, log: &logged{}, prefix: prefix}
	cfg.Logger = slog.New(slog.NewTextHandler(s.log, nil))
	s.handler, err = New(d, cfg)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle(prefix, http.StripPrefix(strings.TrimSuffix(prefix, "/"), s.handler))
	s.server = httptest.NewServer(mux)
	t.Cleanup(func() {
		s.server.Close()
		ctx, cancel := context.WithTimeout(context.Background(), testPatience)
		defer cancel()
		assert.NoError(t, s.handler.Shutdown(ctx))
	})
	return s
}

type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

var policyOfTests = retry.Policy{MaxRetries: retry.NoRetries}

// declare declares work queues with their retry topology.
func (s *stage) declare(queues ...string) {
	s.t.Helper()
	for _, q := range queues {
		topology, err := retry.Topology(policyOfTests, declare.QuorumQueue{Name: q, DeliveryLimit: 20})
		require.NoError(s.t, err)
		_, err = declare.Apply(s.t.Context(), s.conn.Management(), topology)
		require.NoError(s.t, err)
	}
}

// deadLetter is a message that is to die.
type deadLetter struct {
	id, body   string
	err        error
	properties map[string]any
	kind       string
}

// die has the messages die in the queue.
func (s *stage) die(queue string, deadLetters ...deadLetter) {
	s.t.Helper()
	p, err := client.NewPublisher[deadLetter](s.t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{Codec: rawCodec{}})
	require.NoError(s.t, err)
	fails := map[string]error{}
	for _, l := range deadLetters {
		fails[l.id] = l.err
	}
	require.NoError(s.t, p.PublishAll(s.t.Context(), deadLetters, func(l deadLetter, m *client.Message) {
		m.Properties.MessageID = l.id
		m.ApplicationProperties = l.properties
		if l.kind != "" {
			m.Properties.ContentType = &l.kind
		}
	}))
	s.work(queue, len(deadLetters), func(id string) error { return fails[id] })
}

// fail has n messages of the queue fail.
func (s *stage) fail(queue string, err error, n int) {
	s.t.Helper()
	s.work(queue, n, func(string) error { return err })
}

// work handles messages until n of them are dead-lettered.
func (s *stage) work(queue string, n int, handle func(id string) error) {
	s.t.Helper()
	before := s.broker.Queue(queue + ".dead").Counts().Ready
	ctx, stop := context.WithCancel(s.t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- s.conn.Consume(ctx, queue, retry.With(policyOfTests)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			id, _ := d.Message().Properties.MessageID.(string)
			return handle(id)
		})), client.ConsumerConfig{})
	}()
	waiting, cancel := context.WithTimeout(s.t.Context(), testPatience)
	defer cancel()
	require.NoError(s.t, s.broker.Queue(queue+".dead").Await(waiting, func(c hopbacktest.Counts) bool { return c.Ready >= before+n }))
	stop()
	require.NoError(s.t, <-ended)
}

// orders has n orders die of two errors, alternately.
func (s *stage) orders(n int) {
	s.t.Helper()
	s.declare("orders")
	var all []deadLetter
	for i := range n {
		err := fmt.Errorf("connect to 10.0.0.%d:443: timed out", i%250)
		if i%2 == 1 {
			err = client.DeadLetter{Reason: "fraud", Err: errors.New("score is too high")}
		}
		all = append(all, deadLetter{id: fmt.Sprintf("o-%d", i), body: fmt.Sprintf(`{"order":%d}`, i), err: err, properties: map[string]any{"shop": "s1"}, kind: "application/json"})
	}
	s.die("orders", all...)
}

type rawCodec struct{}

func (rawCodec) Encode(v any, m *client.Message) error {
	l := v.(deadLetter)
	m.Data = [][]byte{[]byte(l.body)}
	return nil
}

func (rawCodec) Decode(*client.Message, any) error { return errors.New("isn't needed") }

// browser is one without scripts.
type browser struct {
	s      *stage
	client *http.Client
	header http.Header // in place of a browser's own
	known  string      // the token
}

// browser has opened the page's link.
func (s *stage) browser() *browser {
	s.t.Helper()
	b := s.stranger()
	if link := s.handler.LoginURL(s.server.URL + s.prefix); s.handler.login != nil {
		b.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		require.Equal(s.t, http.StatusSeeOther, b.get(link).status)
		b.client.CheckRedirect = nil
	}
	return b
}

// stranger is a browser that hasn't.
func (s *stage) stranger() *browser {
	jar, err := cookiejar.New(nil)
	require.NoError(s.t, err)
	return &browser{s: s, client: &http.Client{Jar: jar, Timeout: testPatience, Transport: s.server.Client().Transport}, header: http.Header{}}
}

// answer is what the page has answered.
type answer struct {
	status int
	header http.Header
	text   string
	at     *url.URL
}

func (b *browser) do(method, path string, form url.Values) answer {
	b.s.t.Helper()
	target, err := url.Parse(b.s.server.URL + b.s.prefix)
	require.NoError(b.s.t, err)
	target, err = target.Parse(path)
	require.NoError(b.s.t, err)
	var body io.Reader
	if form != nil {
		body = strings.NewReader(form.Encode())
	}
	r, err := http.NewRequestWithContext(b.s.t.Context(), method, target.String(), body)
	require.NoError(b.s.t, err)
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	r.Header.Set("Sec-Fetch-Mode", "navigate")
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Origin", b.s.server.URL)
	}
	for k, v := range b.header {
		r.Header[k] = v
		if v == nil {
			r.Header.Del(k)
		}
	}
	if host := b.header.Get("Host"); host != "" {
		r.Host = host
	}
	w, err := b.client.Do(r)
	require.NoError(b.s.t, err)
	defer func() { _ = w.Body.Close() }()
	text, err := io.ReadAll(w.Body)
	require.NoError(b.s.t, err)
	return answer{w.StatusCode, w.Header, string(text), w.Request.URL}
}

func (b *browser) get(path string) answer { b.s.t.Helper(); return b.do(http.MethodGet, path, nil) }

// settled loads the page until it doesn't refresh itself any more.
func (b *browser) settled(path string) answer {
	b.s.t.Helper()
	for end := time.Now().Add(testPatience); ; {
		a := b.get(path)
		if !strings.Contains(a.text, "<noscript>") || strings.Contains(a.text, `data-refresh="5"`) || strings.HasSuffix(path, "workers") {
			return a
		}
		require.Less(b.s.t, time.Now(), end, "%s: %s", path, a.text)
		time.Sleep(20 * time.Millisecond)
	}
}

var tokenField = regexp.MustCompile(`name="token" value="([^"]+)"`)

// token is that of the overview, as every page with a form has it.
func (b *browser) token() string {
	b.s.t.Helper()
	if b.known != "" {
		return b.known
	}
	m := tokenField.FindStringSubmatch(b.get("./").text)
	require.NotNil(b.s.t, m)
	b.known = m[1]
	return m[1]
}

// post sends a form as the page would.
func (b *browser) post(path string, form url.Values) answer {
	b.s.t.Helper()
	if form == nil {
		form = url.Values{}
	}
	if !form.Has("token") {
		form.Set("token", b.token())
	}
	return b.do(http.MethodPost, path, form)
}

// run waits for the run of the page to end, and returns its page.
func (b *browser) run(a answer) answer {
	b.s.t.Helper()
	require.Equal(b.s.t, http.StatusOK, a.status, a.text)
	require.Contains(b.s.t, a.at.Path, "run")
	return b.settled(a.at.String())
}

var links = regexp.MustCompile(`(?:href|action)="([^"]*)"`)

// links are those of the page, as a browser follows them.
func (a answer) links() (all []string) {
	for _, m := range links.FindAllStringSubmatch(a.text, -1) {
		all = append(all, html.UnescapeString(m[1]))
	}
	return all
}

// link is the first one that begins so.
func (a answer) link(t *testing.T, begins string) string {
	t.Helper()
	for _, l := range a.links() {
		if strings.HasPrefix(l, begins) {
			return l
		}
	}
	require.Fail(t, "no link "+begins, a.text)
	return ""
}
