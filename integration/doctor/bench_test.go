package doctor_test

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/doctor"
)

// args are the arguments of a queue.
type args = map[string]any

// bench is a virtual host in which a fault is built, with a foreign client: nothing here uses
// hopback to declare, publish, or consume.
type bench struct {
	*testing.T
	*suite.Site
	peer *suite.Peer
	conn *client.Conn // only to count
	olds []*old
}

func newBench(t *testing.T, s *suite.Site) *bench {
	t.Helper()
	site := suite.NewSite(t, s.Broker)
	conn, _ := site.Connect(t)
	return &bench{T: t, Site: site, peer: site.Peer(t), conn: conn}
}

// quorum and classic declare a queue. policy arguments come in pairs.
func (b *bench) quorum(name string, a args)  { b.declare(name, "quorum", a) }
func (b *bench) classic(name string, a args) { b.declare(name, "classic", a) }

func (b *bench) declare(name, kind string, a args) {
	b.Helper()
	all := args{"x-queue-type": kind}
	for k, v := range a {
		all[k] = v
	}
	b.DeclareQueue(b.T, name, all)
}

func (b *bench) exchange(name, kind string) { b.DeclareExchange(b.T, name, kind, true, nil) }

func (b *bench) bind(source, queue, key string) { b.Bind(b.T, source, queue, key) }

func (b *bench) unbind(source, queue, key string) {
	b.Helper()
	// The HTTP API calls a binding by its key, and one without a key "~".
	b.HTTP(b.T, http.MethodDelete, "/bindings/"+b.VHost+"/e/"+source+"/q/"+queue+"/"+cmp.Or(key, "~"), nil, nil)
}

// setPolicy sets a policy, and waits until the broker applies it.
func (b *bench) setPolicy(name, pattern, applyTo string, definition args) {
	b.Helper()
	b.HTTP(b.T, http.MethodPut, "/policies/"+b.VHost+"/"+name, args{"pattern": pattern, "apply-to": applyTo, "definition": definition}, nil)
}

// put publishes texts to a queue.
func (b *bench) put(queue string, texts ...string) {
	b.Helper()
	for _, text := range texts {
		b.peer.Put(queue, amqp.NewMessage([]byte(text)))
	}
}

// putFor publishes a message with an expiration.
func (b *bench) putFor(queue string, ttl time.Duration, text string) {
	b.Helper()
	m := amqp.NewMessage([]byte(text))
	m.Header = &amqp.MessageHeader{Durable: true, Priority: 4, TTL: ttl}
	b.peer.Put(queue, m)
}

// publish publishes to an exchange. stored reports whether the broker says that it is.
func (b *bench) publish(exchange, key, text string) (stored bool) {
	b.Helper()
	_, stored = b.peer.Send(address.Exchange(exchange, key), amqp.NewMessage([]byte(text))).(*amqp.StateAccepted)
	return stored
}

// settle receives n messages of a queue, one after the other, and settles each.
func (b *bench) settle(queue string, n int, by func(r *amqp.Receiver, m *amqp.Message) error) (texts []string) {
	b.Helper()
	r := b.peer.Receiver(queue, 1)
	for i := range n {
		m := b.peer.Next(r)
		texts = append(texts, string(m.GetData()))
		require.NoError(b, by(r, m))
		if i+1 < n {
			require.NoError(b, r.IssueCredit(1))
		}
	}
	require.NoError(b, r.Close(b.Context()))
	return texts
}

// reject rejects n messages, as basic.reject without requeue does.
func (b *bench) reject(queue string, n int) []string {
	b.Helper()
	return b.settle(queue, n, func(r *amqp.Receiver, m *amqp.Message) error { return r.RejectMessage(b.Context(), m, nil) })
}

// fail returns a message n times as failed, as a crash does.
func (b *bench) fail(queue string, n int) {
	b.Helper()
	b.settle(queue, n, func(r *amqp.Receiver, m *amqp.Message) error {
		return r.ModifyMessage(b.Context(), m, &amqp.ModifyMessageOptions{DeliveryFailed: true})
	})
}

// has waits until a queue has n ready messages.
func (b *bench) has(queue string, n int) {
	b.Helper()
	suite.Poll(b.T, fmt.Sprintf("%d messages in %q", n, queue), func() bool { return suite.Ready(b.T, b.conn, queue) == n })
}

// gone waits until none of the queues has a message: they were lost.
func (b *bench) gone(queues ...string) {
	b.Helper()
	for _, q := range queues {
		b.has(q, 0)
	}
	for _, q := range queues { // it isn't on its way from one to the other
		require.Zero(b, suite.Ready(b.T, b.conn, q), q)
	}
}

// held waits until so many messages of a queue wait for their dead-letter target.
func (b *bench) held(queue string, least int) {
	b.Helper()
	suite.Poll(b.T, fmt.Sprintf("%d stuck dead letters in %q", least, queue), func() bool {
		var q struct {
			DLX int `json:"messages_dlx"`
		}
		b.HTTP(b.T, http.MethodGet, "/queues/"+b.VHost+"/"+queue, nil, &q)
		return q.DLX >= least
	})
}

func (b *bench) examine() doctor.Report {
	b.Helper()
	r, err := doctor.From(b.Context(), b.API(b.T), doctor.Options{VHost: b.VHost})
	require.NoError(b, err)
	return r
}

// undrawn are rules that say nothing about the path of a message: what an argument or a policy means
// for it differs from key to key.
var undrawn = map[string]bool{"ill-typed-argument": true, "unknown-argument": true, "policy-conflict": true, "policy-not-applied": true}

// named waits until doctor names a fault: the broker shows counts some seconds late. what is such
// as `error dead-letter queue "orders"`.
func (b *bench) named(what string) {
	b.Helper()
	var last doctor.Report
	suite.Poll(b.T, what, func() bool {
		last = b.examine()
		return slices.Contains(suite.Found(last), what)
	})
	for _, g := range last.Groups {
		for _, f := range g.Findings {
			if rule := strings.Fields(what)[1]; f.Rule == rule && (f.Resource.Kind == "queue" || f.Resource.Kind == "exchange") && !undrawn[rule] {
				require.Greater(b, len(f.Path), 1, "the path of a message is drawn")
			}
		}
	}
	text := last.String()
	require.Contains(b, text, strings.Fields(what)[1], "the text names the rule")
	require.Contains(b, string(last.HTML()), strings.Fields(what)[1], "the page names the rule")
}
