package doctor_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
)

const (
	soon  = 50        // ms
	later = 3_600_000 // ms
)

// fault is a fault of a topology. harm builds it and shows what it does to a message. If proofs has
// an entry for the rule, that entry's tests show the harm, and this one builds the fault for doctor.
type fault struct {
	finds string // "severity rule resource"
	only  string // series: only a broker of it has the fault
	since string // series: no older broker has it
	harm  func(b *bench)
}

// faults are those that a shared broker can have. proofs has the others.
var faults = []fault{
	{finds: `error ill-typed-argument queue "orders"`, harm: func(b *bench) {
		b.quorum("orders", args{"x-delivery-limit": "1"})
		b.put("orders", "a")
		b.fail("orders", 5) // the limit should have ended it after two deliveries
		b.has("orders", 1)
	}},
	{finds: `note unknown-argument queue "orders"`, harm: func(b *bench) {
		b.classic("orders", args{"x-mesage-ttl": soon})
		b.classic("right", args{"x-message-ttl": soon})
		b.put("orders", "a")
		b.put("right", "a")
		b.has("right", 0)
		b.has("orders", 1) // stays
	}},
	{finds: `error dead-letter queue "orders"`, harm: func(b *bench) {
		b.quorum("orders", args{"x-delivery-limit": 1})
		b.put("orders", "a")
		b.fail("orders", 2)
		b.gone("orders")
	}},
	{finds: `warning dead-letter queue "orders"`, harm: func(b *bench) {
		b.quorum("orders", nil)
		b.put("orders", "a")
		b.fail("orders", 21) // the default limit of 20
		b.gone("orders")
	}},
	{finds: `warning at-most-once queue "orders"`, harm: func(b *bench) {
		b.exchange("dlx", "fanout")
		b.quorum("dead", args{"x-delivery-limit": -1})
		b.quorum("orders", args{"x-dead-letter-exchange": "dlx"})
		b.put("orders", "a", "b")
		b.reject("orders", 1) // while nothing is bound
		b.bind("dlx", "dead", "")
		b.reject("orders", 1)
		b.has("dead", 1) // only the second one
		b.gone("orders")
	}},
	{finds: `error drop-head-at-least-once queue "orders"`, harm: func(b *bench) {
		b.exchange("dlx", "fanout")
		b.quorum("orders", args{"x-dead-letter-exchange": "dlx", "x-dead-letter-strategy": "at-least-once"})
		b.put("orders", "a")
		b.reject("orders", 1)
		b.quorum("dead", args{"x-delivery-limit": -1})
		b.bind("dlx", "dead", "")
		b.gone("orders", "dead")
	}},
	{finds: `error dead-letter-exchange queue "orders"`, harm: func(b *bench) {
		b.quorum("orders", args{"x-dead-letter-exchange": "nowhere"})
		b.put("orders", "a")
		b.reject("orders", 1)
		b.gone("orders")
	}},
	{finds: `error dead-letter-route queue "orders"`, harm: func(b *bench) {
		b.exchange("dlx", "direct")
		b.quorum("dead", nil)
		b.bind("dlx", "dead", "another")
		b.quorum("orders", args{"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "orders"})
		b.put("orders", "a")
		b.reject("orders", 1)
		b.gone("orders", "dead")
	}},
	{finds: `error dead-letter-route queue "stuck"`, harm: func(b *bench) {
		b.exchange("dlx", "direct")
		b.quorum("stuck", args{"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "k", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"})
		b.put("stuck", "a")
		b.reject("stuck", 1)
		b.held("stuck", 1)
	}},
	{finds: `warning alternate-exchange exchange "dlx"`, harm: func(b *bench) {
		b.exchange("shop", "topic")
		b.exchange("dlx", "direct")
		b.quorum("dead", nil)
		b.bind("dlx", "dead", "known")
		b.quorum("orders", args{"x-dead-letter-exchange": "dlx"})
		b.bind("shop", "orders", "#")
		require.True(b, b.publish("shop", "new", "a"))
		b.reject("orders", 1)
		b.gone("orders", "dead")
	}},
	{finds: `error alternate-exchange-missing exchange "shop"`, harm: func(b *bench) {
		b.DeclareExchange(b.T, "shop", "topic", true, args{"alternate-exchange": "nowhere"})
		assert.False(b, b.publish("shop", "k", "a"))
	}},
	{finds: `error alternate-exchange-route exchange "shop"`, harm: func(b *bench) {
		b.exchange("unrouted", "fanout")
		b.DeclareExchange(b.T, "shop", "topic", true, args{"alternate-exchange": "unrouted"})
		assert.False(b, b.publish("shop", "k", "a"))
	}},
	{finds: `warning delivery-limit queue "dead"`, harm: func(b *bench) {
		b.quorum("dead", args{"x-delivery-limit": 1})
		b.quorum("orders", args{"x-delivery-limit": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
		b.put("orders", "a")
		b.fail("orders", 2)
		b.has("dead", 1)
		if b.Newer() {
			b.fail("dead", 1) // one look is too much: it brought its count along
		} else {
			b.fail("dead", 2)
		}
		b.gone("orders", "dead")
	}},
	{finds: `warning max-length queue "dead"`, harm: func(b *bench) {
		b.quorum("dead", args{"x-delivery-limit": -1, "x-max-length": 1, "x-overflow": "reject-publish"})
		b.quorum("orders", args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"})
		b.put("orders", "a", "b", "c", "d")
		b.reject("orders", 4)
		b.held("orders", 1)
	}},
	{finds: `error stuck-dead-letters queue "orders"`, harm: func(b *bench) {
		b.exchange("dlx", "direct")
		b.quorum("dead", args{"x-delivery-limit": -1})
		b.bind("dlx", "dead", "good")
		b.exchange("shop", "topic")
		b.quorum("orders", args{"x-dead-letter-exchange": "dlx", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"})
		b.bind("shop", "orders", "#")
		for range 32 {
			require.True(b, b.publish("shop", "bad", "a"))
		}
		b.reject("orders", 32)
		b.held("orders", 32)
		require.True(b, b.publish("shop", "good", "b"))
		b.reject("orders", 1)
		b.held("orders", 33) // it has a way, and waits behind the others
		b.has("dead", 0)
	}},
	{finds: `warning overflow queue "orders"`, harm: func(b *bench) {
		b.classic("orders", args{"x-max-length": 1})
		b.put("orders", "a", "b") // both are accepted
		b.has("orders", 1)
	}},
	{finds: `error expires queue "delay"`, harm: func(b *bench) {
		b.quorum("orders", nil)
		back := func(ttl, expires int) args {
			return args{"x-message-ttl": ttl, "x-expires": expires, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"}
		}
		b.quorum("brief", back(later, 3000))
		b.put("brief", "a")
		suite.Poll(b.T, "the queue to expire with its message", func() bool {
			status, _, err := b.HTTPStatus(http.MethodGet, "/queues/"+b.VHost+"/brief", nil)
			return err == nil && status == http.StatusNotFound
		})
		b.gone("orders")
		b.quorum("delay", back(later, later))
	}},
	{finds: `error expiry-cycle queue "a"`, harm: func(b *bench) {
		b.classic("a", args{"x-message-ttl": soon, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "b"})
		b.classic("b", args{"x-message-ttl": soon, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "a"})
		b.put("a", "1")
		suite.Poll(b.T, "the message to be dropped", func() bool {
			for range 20 { // it may be between the two
				if suite.Ready(b.T, b.conn, "a")+suite.Ready(b.T, b.conn, "b") > 0 {
					return false
				}
			}
			return true
		})
	}},
	{finds: `error dead-letter-cycle queue "orders"`, harm: func(b *bench) {
		b.quorum("orders", args{"x-delivery-limit": 3, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
		b.put("orders", "a")
		assert.Equal(b, slices.Repeat([]string{"a"}, 50), b.reject("orders", 50))
		b.has("orders", 1)
	}},
	{finds: `note endless-retry queue "orders"`, harm: func(b *bench) {
		b.classic("wait", args{"x-message-ttl": 5, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
		b.classic("orders", args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "wait"})
		b.put("orders", "a")
		b.reject("orders", 25)
		b.has("orders", 1)
	}},
	{finds: `warning no-delivery-limit queue "orders"`, harm: func(b *bench) {
		b.quorum("orders", args{"x-delivery-limit": -1})
		b.put("orders", "a")
		b.fail("orders", 50)
		b.has("orders", 1)
		b.peer.Receiver("orders", 0) // somebody works on it
	}},
	{finds: `warning per-message-ttl queue "retry"`, harm: func(b *bench) {
		b.classic("orders", nil)
		for _, q := range []string{"retry", "retry.control"} {
			b.classic(q, args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": q + ".back"})
			b.classic(q+".back", nil)
		}
		b.putFor("retry", time.Hour, "in an hour")
		b.putFor("retry", soon*time.Millisecond, "soon")
		b.putFor("retry.control", soon*time.Millisecond, "soon")
		b.has("retry.control.back", 1)
		b.has("retry", 2)
		b.gone("retry.back")
	}},
	{finds: `error delay-without-ttl queue "delay_50ms"`, harm: func(b *bench) {
		b.classic("orders", nil)
		b.classic("delay_50ms", args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
		b.classic("control", args{"x-message-ttl": soon, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "came"})
		b.classic("came", nil)
		b.put("delay_50ms", "a")
		b.put("control", "a")
		b.has("came", 1)
		b.has("delay_50ms", 1) // stuck
	}},
	{finds: `error delay-mismatch queue "delay_1h"`, harm: func(b *bench) {
		b.exchange("retry", "topic")
		b.classic("orders", nil)
		b.classic("delay_1h", args{"x-message-ttl": soon, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
		b.bind("retry", "delay_1h", "delay.3600000.#")
		require.True(b, b.publish("retry", "delay.3600000.orders", "a"))
		b.has("orders", 1) // an hour early
	}},
	{finds: `warning unread-dead-letters queue "dead"`, harm: func(b *bench) {
		b.quorum("dead", args{"x-delivery-limit": -1})
		b.quorum("orders", args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
		b.put("orders", "a", "b")
		b.reject("orders", 2)
		b.has("dead", 2)
	}},
	{finds: `note unread-queue queue "orders"`, harm: func(b *bench) {
		b.classic("orders", nil)
		b.put("orders", "a")
		b.has("orders", 1)
	}},
	{finds: `note unbound-exchange exchange "shop"`, harm: func(b *bench) {
		b.exchange("shop", "topic")
		assert.False(b, b.publish("shop", "k", "a"))
	}},
	{finds: `warning unrouted-exchange exchange "shop"`, harm: func(b *bench) {
		b.exchange("shop", "direct")
		b.classic("orders", nil)
		b.bind("shop", "orders", "right")
		o := dialOld(b)
		o.publish("shop", "wrong", "a") // AMQP 1.0 isn't counted, and its publishers get `released`
		o.publish("", "orders", "b")    // so the queue has statistics, and none of acknowledgements
		b.has("orders", 1)
		b.reject("orders", 1)
		b.gone("orders")
	}},
	{finds: `note several-ways-back queue "delay"`, harm: func(b *bench) {
		b.exchange("back", "fanout")
		for _, q := range []string{"orders", "invoices"} {
			b.classic(q, nil)
			b.bind("back", q, "")
		}
		b.classic("delay", args{"x-message-ttl": soon, "x-dead-letter-exchange": "back"})
		b.put("delay", "a")
		b.has("orders", 1)
		b.has("invoices", 1) // doubled
	}},
	{finds: `warning wildcard-name queue "#"`, harm: func(b *bench) {
		b.exchange("requeue", "topic")
		b.classic("orders", nil)
		b.DeclareQueue(b.T, "#", args{"x-queue-type": "classic"})
		b.bind("requeue", "orders", "*.*.orders")
		b.bind("requeue", "#", "*.*.#")
		require.True(b, b.publish("requeue", "delay.1000.orders", "a"))
		b.has("orders", 1)
		b.has("#", 1) // doubled
	}},
	{finds: `error foreign-binding exchange "retries"`, harm: func(b *bench) {
		b.exchange("retries", "topic")
		b.DeclareExchange(b.T, "requeue", "fanout", true, nil)
		b.quorum("orders", nil)
		b.bind("requeue", "orders", "")
		b.quorum("delay", args{"x-message-ttl": 3_600_000, "x-dead-letter-exchange": "requeue", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"})
		b.bind("retries", "delay", "delay.3600000.#")
		b.classic("audit", args{"x-max-length": 1, "x-overflow": "reject-publish"})
		b.bind("retries", "audit", "#")
		require.True(b, b.publish("retries", "delay.3600000.orders", "a"))
		require.False(b, b.publish("retries", "delay.3600000.orders", "b"))
		b.has("delay", 2) // refused, and stored
	}},
	{finds: `error foreign-binding exchange "dlx"`, harm: func(b *bench) {
		b.exchange("parking", "fanout")
		b.DeclareExchange(b.T, "given_up", "direct", true, args{"alternate-exchange": "parking"})
		b.DeclareExchange(b.T, "dlx", "headers", true, args{"alternate-exchange": "given_up"})
		b.quorum("orders.dead", args{"x-delivery-limit": -1})
		b.bind("given_up", "orders.dead", "orders")
		b.quorum("orders", args{"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "orders", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"})
		b.put("orders", "a", "b")
		b.reject("orders", 1)
		b.has("orders.dead", 1)
		b.quorum("audit", args{"x-delivery-limit": -1})
		b.bind("dlx", "audit", "")
		b.reject("orders", 1)
		b.has("audit", 1)
		b.has("orders.dead", 1) // not the second one
	}},
	{finds: `error shared-ladder exchange "level"`, harm: func(b *bench) {
		b.exchange("level", "topic")
		b.exchange("below", "fanout")
		for _, q := range []string{"hold", "other"} {
			b.classic(q, args{"x-message-ttl": later, "x-dead-letter-exchange": "below"})
		}
		b.classic("orders", nil)
		b.bind("below", "orders", "")
		b.bind("level", "hold", "1.#")
		b.HTTP(b.T, http.MethodPost, "/bindings/"+b.VHost+"/e/level/e/below", args{"routing_key": "0.#"}, nil)
		b.bind("level", "other", "*.1.#")
		require.True(b, b.publish("level", "1.1.orders", "a"))
		b.has("hold", 1)
		b.has("other", 1) // doubled
	}},
	{finds: `warning policy-conflict queue "orders"`, harm: func(b *bench) {
		b.setPolicy("short", "^orders$", "queues", args{"message-ttl": soon})
		b.classic("orders", args{"x-message-ttl": later})
		b.put("orders", "a")
		b.gone("orders") // the argument said an hour
	}},
	{finds: `warning policy-tie policy "one"`, harm: func(b *bench) {
		b.classic("dead", nil)
		b.setPolicy("one", "^orders$", "queues", args{"dead-letter-exchange": "", "dead-letter-routing-key": "dead"})
		b.setPolicy("two", "^orders$", "queues", args{"max-length": 1})
		b.classic("orders", nil)
		b.put("orders", "a", "b")
		limited := suite.Ready(b.T, b.conn, "orders") == 1
		b.reject("orders", 1)
		if limited {
			b.gone("dead") // so the other policy doesn't apply
		} else {
			b.has("dead", 1)
		}
	}},
	{finds: `warning policy-not-applied queue "orders"`, harm: func(b *bench) {
		b.classic("dead", nil)
		b.setPolicy("all", ".*", "all", args{"delivery-limit": 5, "dead-letter-exchange": "", "dead-letter-routing-key": "dead"})
		b.classic("orders", nil)
		b.quorum("others", nil)
		b.put("orders", "lost")
		b.put("others", "kept")
		b.reject("orders", 1)
		b.reject("others", 1)
		b.has("dead", 1)
		assert.Equal(b, []string{"kept"}, b.settle("dead", 1, func(r *amqp.Receiver, m *amqp.Message) error { return r.AcceptMessage(b.Context(), m) }))
		b.gone("orders", "dead")
	}},
	{finds: `note policy-unmatched policy "dlx"`, harm: func(b *bench) {
		b.classic("dead", nil)
		b.setPolicy("dlx", "^oders$", "queues", args{"dead-letter-exchange": "", "dead-letter-routing-key": "dead"})
		b.classic("orders", nil)
		b.put("orders", "a")
		b.reject("orders", 1)
		b.gone("orders", "dead")
	}},
	{finds: `warning transient-exchange exchange "shop"`, harm: func(b *bench) {
		b.classic("orders", nil)
		for _, x := range []string{"gone", "shop"} {
			b.HTTP(b.T, http.MethodPut, "/exchanges/"+b.VHost+"/"+x, args{"type": "fanout", "durable": true, "auto_delete": true, "arguments": args{}}, nil)
			b.bind(x, "orders", "")
		}
		b.unbind("gone", "orders", "~")
		status, _, err := b.HTTPStatus(http.MethodGet, "/exchanges/"+b.VHost+"/gone", nil)
		require.NoError(b, err)
		assert.Equal(b, http.StatusNotFound, status)
	}},
	{finds: `warning transient-queue queue "orders"`, harm: transient},
	{finds: `warning deprecated-feature broker "transient_nonexcl_queues"`, harm: transient},
	{finds: `warning unacked-pile-up queue "orders"`, harm: func(b *bench) {
		b.classic("orders", nil)
		suite.Load(b.T, b.conn, "orders", pile)
		r := b.peer.Receiver("orders", pile+100)
		for range pile {
			b.peer.Next(r)
		}
		b.gone("orders") // nothing is left for a second consumer
	}},
	{finds: `warning stream-retention queue "events"`, harm: func(b *bench) {
		b.declare("events", "stream", nil)
		for range 3 {
			b.put("events", "a")
		}
		b.has("events", 3) // and nothing removes them
	}},
	{finds: `warning unsupported-version broker "4.0.5"`, only: "4.0", harm: func(b *bench) {
		// What was fixed later: 4.0 counts a message that a consumer returns unhandled as failed.
		b.quorum("orders", args{"x-delivery-limit": 1})
		b.put("orders", "a")
		b.settle("orders", 2, func(r *amqp.Receiver, m *amqp.Message) error { return r.ReleaseMessage(b.Context(), m) })
		b.gone("orders")
	}},
	{finds: `note disk-limit node "rabbit@localhost"`, harm: func(*bench) {}},
	{finds: `warning work-queue-ttl queue "orders"`, since: "4.3", harm: func(b *bench) {
		b.exchange("retry", "headers")
		b.quorum("dead", args{"x-delivery-limit": -1})
		b.bind("retry", "dead", "")
		b.setPolicy("brief", "^orders$", "queues", args{"message-ttl": 8_000})
		b.quorum("orders", args{"x-dead-letter-exchange": "retry", "x-dead-letter-routing-key": "orders"})
		b.put("orders", "a")
		b.settle("orders", 1, func(r *amqp.Receiver, m *amqp.Message) error { // as StrategyNative does
			return r.ModifyMessage(b.Context(), m, &amqp.ModifyMessageOptions{Annotations: amqp.Annotations{"x-opt-delivery-time": time.Now().Add(12 * time.Second).UnixMilli()}})
		})
		b.has("dead", 1) // when its retry is due
	}},
	{finds: `error delayed-retry queue "orders"`, only: "4.0", harm: func(b *bench) {
		b.quorum("orders", args{"x-delayed-retry-type": "all", "x-delayed-retry-min": later})
		b.put("orders", "a")
		began := time.Now()
		b.fail("orders", 5)
		b.has("orders", 1)
		assert.Less(b, time.Since(began), time.Hour/2, "at once, and not after an hour")
	}},
	{finds: `warning no-prefetch-limit queue "orders"`, harm: func(b *bench) {
		b.classic("orders", nil)
		suite.Load(b.T, b.conn, "orders", pile)
		c := dialOld(b)
		c.consume("orders", false)
		b.gone("orders") // all of them are at one consumer, which hasn't acknowledged any
	}},
	{finds: `warning auto-ack queue "orders"`, harm: func(b *bench) {
		b.classic("orders", nil)
		b.put("orders", "a", "b", "c")
		c := dialOld(b)
		c.consume("orders", true)
		b.gone("orders")
		c.close() // without having read one
		b.gone("orders")
		dialOld(b).consume("orders", true)
	}},
	{finds: `warning returned-without-end queue "orders"`, since: "4.3", harm: func(b *bench) {
		b.quorum("orders", args{"x-delivery-limit": 2})
		b.put("orders", "a")
		c := dialOld(b)
		c.limit(1)
		c.consume("orders", false)
		suite.Await(b.T, c.returning(1000), "a thousand returns") // far beyond the limit
	}},
	{finds: `note default-queue-type queue "brief"`, harm: func(b *bench) {
		b.HTTP(b.T, http.MethodPut, "/vhosts/"+b.VHost, args{"default_queue_type": "quorum"}, nil)
		for name, autoDelete := range map[string]bool{"brief": true, "lasting": false} {
			b.HTTP(b.T, http.MethodPut, "/queues/"+b.VHost+"/"+name, args{"durable": true, "auto_delete": autoDelete, "arguments": args{}}, nil)
		}
		b.peer.Receiver("brief", 0) // or else it goes with its first consumer
		b.put("brief", "a")
		b.put("lasting", "a")
		b.fail("brief", 30)
		b.has("brief", 1) // no delivery limit
		b.fail("lasting", 21)
		b.gone("lasting")
	}},
}

const pile = 1000

func transient(b *bench) {
	b.HTTP(b.T, http.MethodPut, "/queues/"+b.VHost+"/orders", args{"durable": false, "arguments": args{"x-queue-type": "classic"}}, nil)
	b.put("orders", "a")
}

// For each rule, what it finds does harm on a real broker, and doctor names it, until its advice was
// followed.
func TestDoctorNamesWhatDoesHarm(t *testing.T) {
	suite.NeedReal(t)
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if s.HoldsPublished() {
			t.Skip("4.4 refuses transient queues")
		}
		for _, f := range faults {
			if f.only != "" && f.only != s.Version || !s.AtLeast(f.since) {
				continue
			}
			t.Run(strings.ReplaceAll(f.finds, " ", "_"), func(t *testing.T) {
				t.Parallel()
				b := newBench(t, s)
				f.harm(b)
				b.named(f.finds)
				b.cured(f.finds)
			})
		}
	})
}
