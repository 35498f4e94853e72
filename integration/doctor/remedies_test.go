package doctor_test

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/doctor"
)

// remedies apply what doctor advises about a fault, after its harm was shown. doctor then doesn't name
// it any more.
var remedies = map[string]func(b *bench){
	`error ill-typed-argument queue "orders"`: func(b *bench) { b.again("orders", "quorum", args{"x-delivery-limit": 1}) },
	`note unknown-argument queue "orders"`:    func(b *bench) { b.again("orders", "classic", args{"x-message-ttl": soon}) },
	`error dead-letter queue "orders"`:        deadLettered,
	`warning dead-letter queue "orders"`:      deadLettered,
	`warning at-most-once queue "orders"`: func(b *bench) {
		b.setPolicy("fix", "^orders$", "quorum_queues", args{"dead-letter-strategy": "at-least-once", "overflow": "reject-publish", "dead-letter-exchange": "dlx"})
	},
	`error drop-head-at-least-once queue "orders"`: func(b *bench) { b.setPolicy("fix", "^orders$", "quorum_queues", args{"overflow": "reject-publish"}) },
	`error dead-letter-exchange queue "orders"`: func(b *bench) {
		b.exchange("nowhere", "fanout")
		b.parking("nowhere")
	},
	`error dead-letter-route queue "orders"`: func(b *bench) { b.bind("dlx", "dead", "orders") },
	`error dead-letter-route queue "stuck"`: func(b *bench) {
		b.quorum("dead", args{"x-delivery-limit": -1})
		b.bind("dlx", "dead", "k")
	},
	`warning alternate-exchange exchange "dlx"`: func(b *bench) {
		b.exchange("unrouted", "fanout")
		b.parking("unrouted")
		b.setPolicy("fix", "^dlx$", "exchanges", args{"alternate-exchange": "unrouted"})
	},
	`error alternate-exchange-missing exchange "shop"`: func(b *bench) {
		b.exchange("nowhere", "fanout")
		b.parking("nowhere")
	},
	`error alternate-exchange-route exchange "shop"`: func(b *bench) { b.parking("unrouted") },
	`warning delivery-limit queue "dead"`:            func(b *bench) { b.again("dead", "quorum", args{"x-delivery-limit": -1}) },
	`warning max-length queue "dead"`:                func(b *bench) { b.again("dead", "quorum", args{"x-delivery-limit": -1}) },
	`error stuck-dead-letters queue "orders"`:        func(b *bench) { b.bind("dlx", "dead", "bad") },
	`warning overflow queue "orders"`:                func(b *bench) { b.setPolicy("fix", "^orders$", "queues", args{"overflow": "reject-publish"}) },
	`error expires queue "delay"`: func(b *bench) {
		b.again("delay", "quorum", args{"x-message-ttl": later, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
	},
	`error expiry-cycle queue "a"`: func(b *bench) { b.again("b", "classic", nil) },
	`error dead-letter-cycle queue "orders"`: func(b *bench) {
		b.quorum("dead", args{"x-delivery-limit": -1})
		b.again("orders", "quorum", args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
	},
	`warning no-delivery-limit queue "orders"`: func(b *bench) {
		b.exchange("dlx", "fanout")
		b.parking("dlx")
		b.setPolicy("fix", "^orders$", "quorum_queues", args{"delivery-limit": 20, "dead-letter-exchange": "dlx"})
	},
	`warning per-message-ttl queue "retry"`: func(b *bench) {
		b.drop("retry")
		b.quorum("retry.10s", args{"x-message-ttl": 10_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "retry.back"})
	},
	`error delay-without-ttl queue "delay_50ms"`: func(b *bench) { b.setPolicy("fix", "^delay_50ms$", "queues", args{"message-ttl": soon}) },
	`error delay-mismatch queue "delay_1h"`: func(b *bench) {
		b.again("delay_1h", "classic", args{"x-message-ttl": later, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"})
		b.bind("retry", "delay_1h", "delay.3600000.#")
	},
	`warning unread-dead-letters queue "dead"`: func(b *bench) { b.HTTP(b.T, http.MethodDelete, "/queues/"+b.VHost+"/dead/contents", nil, nil) },
	`note unread-queue queue "orders"`:         func(b *bench) { b.peer.Receiver("orders", 0) },
	`note unbound-exchange exchange "shop"`:    func(b *bench) { b.parking("shop") },
	`warning unrouted-exchange exchange "shop"`: func(b *bench) {
		b.exchange("unrouted", "fanout")
		b.parking("unrouted")
		b.setPolicy("fix", "^shop$", "exchanges", args{"alternate-exchange": "unrouted"})
	},
	`note several-ways-back queue "delay"`: func(b *bench) {
		b.HTTP(b.T, http.MethodDelete, "/exchanges/"+b.VHost+"/back", nil, nil)
		b.exchange("back", "direct")
		for _, q := range []string{"orders", "invoices"} {
			b.bind("back", q, q)
		}
	},
	`error foreign-binding exchange "retries"`: func(b *bench) { b.unbind("retries", "audit", "%23") },
	`error foreign-binding exchange "dlx"`:     func(b *bench) { b.unbind("dlx", "audit", "") },
	`warning wildcard-name queue "#"`:          func(b *bench) { b.drop("#") },
	`error shared-ladder exchange "level"`:     func(b *bench) { b.drop("other") },
	`warning policy-conflict queue "orders"`: func(b *bench) {
		b.HTTP(b.T, http.MethodDelete, "/policies/"+b.VHost+"/short", nil, nil)
	},
	`warning policy-tie policy "one"`: func(b *bench) {
		b.HTTP(b.T, http.MethodPut, "/policies/"+b.VHost+"/one", args{"pattern": "^orders$", "apply-to": "queues", "priority": 10, "definition": args{"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}}, nil)
	},
	`warning policy-not-applied queue "orders"`: func(b *bench) {
		b.setPolicy("all", ".*", "quorum_queues", args{"delivery-limit": 5, "dead-letter-exchange": "", "dead-letter-routing-key": "dead"})
	},
	`note policy-unmatched policy "dlx"`: func(b *bench) {
		b.setPolicy("dlx", "^orders$", "queues", args{"dead-letter-exchange": "", "dead-letter-routing-key": "dead"})
	},
	`warning transient-exchange exchange "shop"`: func(b *bench) {
		b.HTTP(b.T, http.MethodDelete, "/exchanges/"+b.VHost+"/shop", nil, nil)
		b.exchange("shop", "fanout")
		b.bind("shop", "orders", "")
	},
	`warning transient-queue queue "orders"`: func(b *bench) { b.again("orders", "classic", nil) },
	`warning unacked-pile-up queue "orders"`: func(b *bench) { b.drop("orders") },
	`warning stream-retention queue "events"`: func(b *bench) {
		b.setPolicy("fix", "^events$", "streams", args{"max-age": "7D", "max-length-bytes": 10_000_000_000})
	},
	`warning work-queue-ttl queue "orders"`:       func(b *bench) { b.setPolicy("brief", "^other$", "queues", args{"message-ttl": 8_000}) },
	`error delayed-retry queue "orders"`:          func(b *bench) { b.again("orders", "quorum", nil) },
	`warning no-prefetch-limit queue "orders"`:    acknowledging,
	`warning auto-ack queue "orders"`:             acknowledging,
	`warning returned-without-end queue "orders"`: acknowledging,
	`note default-queue-type queue "brief"`:       func(b *bench) { b.again("brief", "quorum", nil) },
}

// noRemedy are the rules whose remedy TestDoctorNamesWhatDoesHarm doesn't apply, and why.
var noRemedy = map[string]string{
	"memory-alarm": "TestDoctorNamesAlarms ends the alarm", "disk-alarm": "TestDoctorNamesAlarms ends the alarm",
	"disabled-feature-flags": "TestDoctorNamesDisabledFeatureFlags enables them",
	"policy-pattern":         "TestPatternsOfPoliciesMatchAsOnABroker examines the live broker, as the remedy says",
	"impossible-queue":       "TestAFileIsWhatTheBrokerReads imports the file, and no broker keeps such a queue",
	"endless-retry":          "a consumer that counts looks like one that doesn't",
	"disk-limit":             "it is a setting of the shared broker",
	"deprecated-feature":     "other tests use the feature on the shared broker",
	"unsupported-version":    "it takes an upgrade", "broker-version": "it takes an upgrade",
	"delayed-drop-head": "4.4 only: TestPublishersForLaterHangAQueueThatDropsItsHead declares the queue as the remedy says, too", "delayed-message-plugin": "it takes another way to delay, in the clients",
	"oversized-queue": "its counts are multiplied: TestDoctorNamesAQueueThatGrowsIntoAnAlarm",
	"not-replicated":  "it takes a cluster", "replicas": "it takes a cluster", "replicas-down": "it takes a cluster", "queue-down": "it takes a cluster",
	"node-down": "it takes a cluster", "two-nodes": "it takes a cluster", "leaders-on-one-node": "it takes a cluster", "partition": "it takes a cluster",
}

// Each rule has a remedy that is applied to a broker, after which doctor is satisfied, or a reason.
func TestEveryRemedyIsApplied(t *testing.T) {
	t.Parallel()
	applied := map[string]bool{}
	for _, f := range faults {
		rule := strings.Fields(f.finds)[1]
		_, has := remedies[f.finds]
		assert.True(t, has || noRemedy[rule] != "", "%s: no remedy, and no reason", f.finds)
		applied[rule] = applied[rule] || has
	}
	for _, r := range doctor.Rules() {
		assert.True(t, applied[r.ID] != (noRemedy[r.ID] != ""), "%s: a remedy, or a reason", r.ID)
	}
	for finds := range remedies {
		assert.True(t, slices.ContainsFunc(faults, func(f fault) bool { return f.finds == finds }), finds)
	}
}

func deadLettered(b *bench) {
	b.exchange("dlx", "fanout")
	b.parking("dlx")
	b.setPolicy("fix", "^orders$", "queues", args{"dead-letter-exchange": "dlx", "dead-letter-routing-key": "orders"})
}

// acknowledging replaces the consumers of AMQP 0-9-1 by one with a prefetch limit, which
// acknowledges.
func acknowledging(b *bench) {
	for _, o := range b.olds {
		o.close()
	}
	o := dialOld(b)
	o.limit(10)
	o.consume("orders", false)
}

// drop deletes a queue, and again declares it once more with other arguments.
func (b *bench) drop(queue string) {
	b.Helper()
	b.HTTP(b.T, http.MethodDelete, "/queues/"+b.VHost+"/"+url.PathEscape(queue), nil, nil)
}

func (b *bench) again(queue, kind string, a args) {
	b.Helper()
	b.drop(queue)
	b.declare(queue, kind, a)
}

// parking binds a queue to a fanout exchange, or with a key that matches everything.
func (b *bench) parking(exchange string) {
	b.Helper()
	b.quorum("parking", args{"x-delivery-limit": -1})
	b.bind(exchange, "parking", "#")
}

// cured waits until doctor doesn't name a fault any more.
func (b *bench) cured(what string) {
	b.Helper()
	remedy := remedies[what]
	if remedy == nil {
		return
	}
	remedy(b)
	suite.Poll(b.T, "an end of "+what, func() bool { return !slices.Contains(suite.Found(b.examine()), what) })
}
