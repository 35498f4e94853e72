package differ

import (
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// found are sequences that once differed, as they were shrunk.
var found = []sequence{
	{send{Link: "s0", On: "c1.1"}},
	{send{Link: "s0", On: "c1.0", To: "/queues/@q1/more"}},
	{receive{Link: "r0", On: "c1.2"}},
	{receive{Link: "r2", On: "c0.2", From: "/queues/@q1/more"}},
	{
		declareExchange{Exchange: "@x1", Type: "fanout"},
		send{Link: "s1", On: "c0.2", To: "/exchanges/@x1/a"},
		publish{Link: "s1", Message: message{Annotations: args{"x-cc": []any{int64(1)}}}},
	},
	{
		declare{Queue: "@q1", Kind: "none"},
		send{Link: "s1", On: "c1.2", Anonymous: true},
		publish{Link: "s1", Message: message{To: "/queues/@q1"}},
	},
	// Claims of parked messages: with too little credit, by a link that goes, and by another one.
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c0.0", To: "/queues/@q0"},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0"},
		receive{Link: "r1", On: "c1.1", From: "/queues/@q0"},
		publish{Link: "s0", Count: 4},
		credit{Link: "r0", N: 4},
		settle{Link: "r0", First: 0, Last: 2, Outcome: outcome{Kind: "modified", Annotations: args{"x-opt-delivery-time": after(long), "x-opt-deferral-token": "t"}}},
		publish{Link: "s0", Count: 2},
		credit{Link: "r1", N: 1, Tokens: []any{"none", "t"}},
		credit{Link: "r0", N: 2, Tokens: []any{"t"}},
		detach{Link: "r1"},
		credit{Link: "r0", N: 2, Tokens: []any{"t"}},
		settle{Link: "r0", First: 1, Last: 2, Outcome: outcome{Kind: "released"}},
		credit{Link: "r0", N: 5, Drain: true},
	},
	// A claimed message is dead-lettered while its time is ahead: at least once it waits there, too.
	{
		declare{Queue: "@q0", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q1", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}},
		declare{Queue: "@q1"},
		declare{Queue: "@q2", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q1"}},
		send{Link: "s0", On: "c0.0", To: "/queues/@q0"},
		send{Link: "s1", On: "c0.0", To: "/queues/@q2"},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0"},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q2"},
		publish{Link: "s0"},
		publish{Link: "s1"},
		credit{Link: "r0", N: 1},
		credit{Link: "r1", N: 1},
		settle{Link: "r0", Outcome: outcome{Kind: "modified", Annotations: args{"x-opt-delivery-time": after(long), "x-opt-deferral-token": "t"}}},
		settle{Link: "r1", Outcome: outcome{Kind: "modified", Annotations: args{"x-opt-delivery-time": after(long), "x-opt-deferral-token": "t"}}},
		credit{Link: "r0", N: 1, Tokens: []any{"t"}},
		credit{Link: "r1", N: 1, Tokens: []any{"t"}},
		settle{Link: "r0", Outcome: outcome{Kind: "rejected"}},
		settle{Link: "r1", Outcome: outcome{Kind: "rejected"}},
		inspect{Queue: "@q1"},
	},
	// The type of an exchange with a dash is printed in quotes.
	{
		declareExchange{Exchange: "@x0", Type: "direct"},
		declareExchange{Exchange: "@x0", Type: "x-modulus-hash"},
		declareExchange{Exchange: "@x1", Type: "x-modulus-hash"},
		declareExchange{Exchange: "@x1", Type: "fanout"},
	},
	// Published for later, with each type of number.
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c0.0", To: "/queues/@q0"},
		publish{Link: "s0", Message: message{Annotations: args{"x-opt-delivery-time": after(long)}}},
		publish{Link: "s0", Message: message{Annotations: args{"x-opt-delivery-time": after(-long)}}},
		publish{Link: "s0", Message: message{Annotations: args{"x-opt-delivery-time": uint64(1 << 63)}}},
		publish{Link: "s0", Message: message{Annotations: args{"x-opt-delivery-time": 4e12}}},
		publish{Link: "s0", Message: message{Annotations: args{"x-opt-delivery-time": true}}},
		publish{Link: "s0", Message: message{Annotations: args{"x-opt-delivery-time": int64(1 << 62), "x-opt-deferral-token": "t"}}},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r0", N: 9, Tokens: []any{"t"}},
		purge{Queue: "@q0"},
	},
	{declare{Queue: "@q0", Kind: "classic", Arguments: args{"x-single-active-consumer": true}}},
	{
		declare{Queue: "@q0", Arguments: args{"x-single-active-consumer": true}},
		receive{Link: "r0", On: "c1.0", From: "/queues/@q0"},
		receive{Link: "r1", On: "c0.2", From: "/queues/@q0"},
		credit{Link: "r1", Drain: true},
		hangUp{Conn: "c1"},
	},
	{
		declare{Queue: "@q2"},
		send{Link: "s1", On: "c0.1", To: "/queues/@q2"},
		receive{Link: "r2", On: "c1.1", From: "/queues/@q2"},
		credit{Link: "r2", N: 4},
		publish{Link: "s1", Message: message{Annotations: args{"x-k": nil}}},
	},
	{
		send{Link: "s0", On: "c1.0", Anonymous: true},
		publish{Link: "s0", Settled: true, Frames: 3},
	},
	{
		declare{Queue: "@q1", Arguments: args{"x-max-length-bytes": int64(163)}},
		send{Link: "s0", On: "c1.2", To: "/queues/@q1"},
		publish{Link: "s0", Count: 3, Message: message{Annotations: args{"x-opt-delivery-time": after(-1000)}}},
	},
	{
		declare{Queue: "@q0"},
		declareExchange{Exchange: "@x1", Type: "topic"},
		bind{Source: "@x1", Queue: "@q0", Key: "*"},
		send{Link: "s0", On: "c0.1", To: "/exchanges/@x1"},
		publish{Link: "s0"},
	},
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c0.0", To: "/queues/@q0"},
		publish{Link: "s0"},
		purge{Queue: "@q0"},
		publish{Link: "s0"},
		publish{Link: "s0", Message: message{Priority: 6}},
		publish{Link: "s0"},
		publish{Link: "s0", Message: message{Priority: 6}},
	},
	{declare{Queue: "@q1", Transient: true, AutoDelete: true, Exclusive: true}},
	{declare{Queue: "@q1", Transient: true, Exclusive: true}},
	{declare{Queue: "@q2", Kind: "none", Arguments: args{"x-queue-mode": "2"}}},
	{
		declare{Queue: "@q1", Kind: "classic"},
		send{Link: "s0", On: "c1.2", To: "/queues/@q1"},
		receive{Link: "r1", On: "c1.1", From: "/queues/@q1", Presettled: true},
		credit{Link: "r1", N: 1},
		publish{Link: "s0"},
		receive{Link: "r2", On: "c1.1", From: "/queues/@q1"},
		credit{Link: "r2", N: 5},
		publish{Link: "s0", Count: 2},
		settle{Link: "r2", First: 1, Last: 1, Outcome: outcome{Kind: "modified"}},
	},
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c0.0", To: "/queues/@q0"},
		publish{Link: "s0", Message: message{Raw: []byte("\x00Su")}},
	},
	{
		declare{Queue: "@q2", Kind: "classic"},
		send{Link: "s1", On: "c1.0", To: "/queues/@q2"},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q2"},
		credit{Link: "r1", N: 5},
		publish{Link: "s1"},
		detach{Link: "r1"},
	},
	{
		declare{Queue: "@q1", Kind: "classic"},
		send{Link: "s0", On: "c1.1", To: "/queues/@q1"},
		publish{Link: "s0", Count: 2},
		publish{Link: "s0", Message: message{Annotations: args{"x-k": nil}}},
		receive{Link: "r0", On: "c0.0", From: "/queues/@q1"},
		credit{Link: "r0", N: 5},
	},
	{
		declare{Queue: "@q1", Arguments: args{"x-dead-letter-exchange": ""}},
		send{Link: "s1", On: "c1.1", To: "/queues/@q1"},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q1"},
		credit{Link: "r1", N: 5},
		publish{Link: "s1"},
		settle{Link: "r1", Outcome: outcome{Kind: "rejected"}},
	},
	{
		declare{Queue: "@q0", Kind: "classic", Arguments: args{"x-max-length-bytes": int64(49), "x-overflow": "reject-publish"}},
		send{Link: "s0", On: "c1.1", To: "/queues/@q0"},
		publish{Link: "s0", Message: message{Annotations: args{"x-k": int64(5)}}},
	},
	{
		declare{Queue: "@q0", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q1", "x-delivery-limit": int64(0)}},
		declare{Queue: "@q1", Kind: "classic"},
		send{Link: "s0", On: "c0.0", To: "/queues/@q0"},
		receive{Link: "r0", On: "c0.0", From: "/queues/@q0"},
		credit{Link: "r0", N: 1},
		publish{Link: "s0"},
		settle{Link: "r0", Outcome: outcome{Kind: "modified", Failed: true}},
	},
	{
		declare{Queue: "@q0", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q1", "x-max-length": int64(0)}},
		declare{Queue: "@q1"},
		send{Link: "s0", On: "c0.0", To: "/queues/@q0"},
		receive{Link: "r0", On: "c0.0", From: "/queues/@q0"},
		credit{Link: "r0", N: 4},
		publish{Link: "s0", Count: 4},
	},
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c0.1", To: "/queues/@q0"},
		send{Link: "s1", On: "c0.0", To: "/queues/@q0"},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0"},
		deleteQueue{Queue: "@q0"},
	},
	{
		declare{Queue: "@q0"},
		declareExchange{Exchange: "@x0", Type: "fanout"},
		bind{Source: "@x0", Queue: "@q0"},
		send{Link: "s0", On: "c0.1", To: "/queues/@q0"},
		send{Link: "s1", On: "c0.1", To: "/exchanges/@x0"},
		publish{Link: "s1"},
		deleteQueue{Queue: "@q0"},
	},
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c0.1", To: "/queues/@q0"},
		publish{Link: "s0"},
		publish{Link: "s0", Message: message{Annotations: args{"x-k": nil}}},
		publish{Link: "s0"},
		receive{Link: "r0", On: "c1.1", From: "/queues/@q0", Presettled: true},
		credit{Link: "r0", N: 5},
	},
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c0.1", To: "/queues/@q0"},
		publish{Link: "s0"},
		publish{Link: "s0", Message: message{Priority: 10, Annotations: args{"x-k": nil}}},
		publish{Link: "s0"},
		receive{Link: "r0", On: "c1.1", From: "/queues/@q0"},
		credit{Link: "r0", N: 2},
		receive{Link: "r0", On: "c1.1", From: "/queues/@q0", Presettled: true},
		credit{Link: "r0", N: 1},
	},
	{
		declareExchange{Exchange: "@x0", Type: "fanout", Internal: true},
		send{Link: "s0", On: "c1.0", Anonymous: true},
		publish{Link: "s0", Settled: true, Message: message{To: "/exchanges/@x0/a"}},
	},
	{
		declareExchange{Exchange: "@x0", Type: "fanout", Internal: true},
		send{Link: "s0", On: "c1.0", Anonymous: true},
		publish{Link: "s0", Settled: true, Frames: 2, Message: message{To: "/exchanges/@x0/a"}},
	},
	{ // what is left of r0 takes a message
		declare{Queue: "@q1", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s0", On: "c0.1", To: "/queues/@q1"},
		receive{Link: "r0", On: "c1.1", From: "/queues/@q1"},
		credit{Link: "r0", N: 4},
		publish{Link: "s0", Count: 3},
		receive{Link: "r1", On: "c1.1", From: "/queues/@q1", Priority: 2},
		endSession{"c1.1"},
	},
	{
		declare{Queue: "@q1", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s0", On: "c0.1", To: "/queues/@q1"},
		receive{Link: "r0", On: "c1.1", From: "/queues/@q1"},
		credit{Link: "r0", N: 4},
		publish{Link: "s0", Count: 3},
		receive{Link: "r1", On: "c1.0", From: "/queues/@q1", Priority: 2},
		detach{Link: "r0"},
		detach{Link: "r1"},
		endSession{"c1.1"},
	},
	{ // the grant overtakes the settled message, unless that is waited for
		declare{Queue: "@q0", Arguments: args{"x-max-length": int64(2)}},
		send{Link: "s0", On: "c0.1", To: "/queues/@q0"},
		publish{Link: "s0", Count: 4},
		receive{Link: "r2", On: "c1.1", From: "/queues/@q0"},
		publish{Link: "s0", Settled: true},
		credit{Link: "r2", N: 3},
	},
	{
		declare{Queue: "@q0", Arguments: args{"x-max-length": int64(3)}},
		send{Link: "s1", On: "c1.2", To: "/queues/@q0", Presettled: true},
		publish{Link: "s1", Count: 3},
		receive{Link: "r2", On: "c1.1", From: "/queues/@q0"},
		publish{Link: "s1"},
		credit{Link: "r2", N: 2},
	},
	{ // four of the large messages don't go in one portion with the first
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c1.2", To: "/queues/@q0"},
		publish{Link: "s0", Message: message{Annotations: args{"x-k": nil}}},
		publish{Link: "s0", Count: 4, Message: message{Size: 70_000}},
	},
	{
		declare{Queue: "@q0"},
		send{Link: "s0", On: "c1.1", To: "/queues/@q0"},
		publish{Link: "s0", Count: 4, Message: message{Size: 70_000}},
		publish{Link: "s0", Message: message{Annotations: args{"x-k": nil}}},
		publish{Link: "s0", Count: 3, Message: message{Size: 70_000}},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0", Presettled: true},
		credit{Link: "r0", N: 10},
	},
	{ // what has expired is next once the head is dropped
		declare{Queue: "@q1", Arguments: args{"x-max-length": int64(3)}},
		send{Link: "s1", On: "c1.1", To: "/queues/@q1"},
		publish{Link: "s1"},
		publish{Link: "s1", Message: message{TTL: brief}},
		publish{Link: "s1", Message: message{TTL: brief}},
		publish{Link: "s1"},
	},
	{
		declare{Queue: "@q1", Kind: "classic", Arguments: args{"x-max-length": int64(3)}},
		send{Link: "s1", On: "c1.1", To: "/queues/@q1"},
		publish{Link: "s1"},
		publish{Link: "s1", Message: message{TTL: brief}},
		publish{Link: "s1", Message: message{TTL: brief}},
		publish{Link: "s1"},
	},
	{ // a classic queue drops what comes back, rather than deliver it
		declare{Queue: "@q0", Kind: "classic", Arguments: args{"x-max-length": int64(1), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q1"}},
		declare{Queue: "@q1"},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0"},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r0", N: 2},
		credit{Link: "r1", N: 2},
		send{Link: "s1", On: "c1.0", To: "/queues/@q0"},
		publish{Link: "s1", Count: 4},
		receive{Link: "r2", On: "c1.1", From: "/queues/@q0"},
		credit{Link: "r2", N: 2},
		endSession{"c0.1"},
	},
	{
		declare{Queue: "@q0", Kind: "classic", Arguments: args{"x-max-length-bytes": int64(33)}},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r0", N: 3},
		send{Link: "s1", On: "c0.0", To: "/queues/@q0"},
		publish{Link: "s1", Count: 2, Message: message{To: "/exchanges/@x1/a.b.c"}},
		credit{Link: "r0", N: 1},
		settle{Link: "r0", Last: 2, Outcome: outcome{Kind: "released"}},
	},
	{ // each dead letter is dropped by itself
		declare{Queue: "@q0"},
		declare{Queue: "@q1", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q2"}},
		declare{Queue: "@q2", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q0", "x-max-length": int64(1)}},
		send{Link: "s0", On: "c0.1", To: "/queues/@q1"},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q1"},
		credit{Link: "r1", N: 5},
		publish{Link: "s0", Count: 5},
		settle{Link: "r1", Last: 4, Outcome: outcome{Kind: "rejected"}},
	},
	{
		declare{Queue: "@q0"},
		declare{Queue: "@q1", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q2", "x-max-length": int64(3)}},
		declare{Queue: "@q2", Arguments: args{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "@q0", "x-max-length-bytes": int64(3)}},
		send{Link: "s0", On: "c0.1", To: "/queues/@q1"},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q1"},
		credit{Link: "r1", N: 5},
		publish{Link: "s0", Count: 5},
	},
	{ // with the last message requeued, 4.0 forgets whose turn it is
		declare{Queue: "@q0", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s1", On: "c1.0", Anonymous: true},
		receive{Link: "r2", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r2", N: 1},
		publish{Link: "s1", Message: message{To: "/queues/@q0"}},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q0", Priority: 1},
		settle{Link: "r2", Outcome: outcome{Kind: "modified"}},
		credit{Link: "r1", N: 1},
		detach{Link: "r2"},
	},
	{
		declare{Queue: "@q0", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s1", On: "c1.0", Anonymous: true},
		receive{Link: "r2", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r2", N: 1},
		publish{Link: "s1", Message: message{To: "/queues/@q0"}},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q0", Priority: 1},
		credit{Link: "r1", N: 1},
		settle{Link: "r2", Outcome: outcome{Kind: "modified"}},
		endSession{"c1.0"},
	},
	{
		declare{Queue: "@q0", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s1", On: "c1.0", Anonymous: true},
		receive{Link: "r2", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r2", N: 1},
		publish{Link: "s1", Message: message{To: "/queues/@q0"}},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q0", Priority: 1},
		settle{Link: "r2", Outcome: outcome{Kind: "modified"}},
		receive{Link: "r0", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r0", N: 1},
		detach{Link: "r1"},
	},
	{
		declare{Queue: "@q0", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s1", On: "c1.0", To: "/queues/@q0"},
		receive{Link: "r2", On: "c0.1", From: "/queues/@q0"},
		credit{Link: "r2", N: 4},
		publish{Link: "s1", Count: 4},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q0", Priority: 1},
		credit{Link: "r1", N: 4},
		settle{Link: "r2", Last: 1},
		settle{Link: "r2", Last: 3, Outcome: outcome{Kind: "released"}},
	},
	{ // those that wait their turn in a classic queue know what is in it
		declare{Queue: "@q2", Kind: "classic", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s1", On: "c1.1", Anonymous: true},
		receive{Link: "r0", On: "c1.1", From: "/queues/@q2"},
		receive{Link: "r2", On: "c0.2", From: "/queues/@q2"},
		publish{Link: "s1", Message: message{To: "/queues/@q2"}},
		credit{Link: "r2"},
	},
	{ // the active one stays
		declare{Queue: "@q2", Kind: "classic", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s1", On: "c1.0", To: "/queues/@q2"},
		receive{Link: "r0", On: "c0.0", From: "/queues/@q2"},
		credit{Link: "r0", N: 1},
		receive{Link: "r2", On: "c0.2", From: "/queues/@q2", Priority: 2},
		credit{Link: "r2", N: 2},
		publish{Link: "s1", Count: 3},
		settle{Link: "r0", Last: 3, Outcome: outcome{Kind: "released"}},
		endSession{"c0.0"},
	},
	{
		declare{Queue: "@q2", Kind: "classic", Arguments: args{"x-single-active-consumer": true}},
		send{Link: "s1", On: "c1.0", To: "/queues/@q2"},
		receive{Link: "r0", On: "c0.0", From: "/queues/@q2"},
		credit{Link: "r0", N: 1},
		receive{Link: "r1", On: "c0.1", From: "/queues/@q2"},
		receive{Link: "r2", On: "c0.2", From: "/queues/@q2"},
		credit{Link: "r2", N: 2},
		detach{Link: "r0"},
		publish{Link: "s1", Count: 3},
		credit{Link: "r1", N: 2},
	},
}

func TestFoundSequencesComeToTheSame(t *testing.T) {
	forEachVersion(t, func(t *testing.T, v *versus) {
		var wait sync.WaitGroup
		todo := make(chan sequence)
		for range *atOnce {
			wait.Go(func() {
				for s := range todo {
					r := v.compare(t, s, 30*time.Second)
					if known(v.version, r) == nil && assert.NoError(t, r.err) {
						assert.Negative(t, r.at, "RabbitMQ %s and the one in memory differ:\n%s", v.version, r)
					}
				}
			})
		}
		for _, s := range found {
			todo <- s
		}
		close(todo)
		wait.Wait()
	})
}

// It takes seconds, in which nothing else can be done with the broker.
func TestAQueueWithMoreDelayedThanItMayHoldHangs(t *testing.T) {
	if os.Getenv("HOPBACK_LONG") == "" {
		t.Skip("HOPBACK_LONG is not set")
	}
	forEachVersion(t, func(t *testing.T, v *versus) {
		v.hang = true
		r := v.compare(t, sequence{
			declare{Queue: "@q0", Arguments: args{"x-max-length": int64(0)}},
			send{Link: "s0", On: "c0.1", To: "/queues/@q0"},
			receive{Link: "r0", On: "c1.0", From: "/queues/@q0"},
			credit{Link: "r0", N: 1},
			publish{Link: "s0"},
			settle{Link: "r0", Outcome: outcome{Kind: "modified", Annotations: args{"x-opt-delivery-time": after(long)}}},
		}, 10*time.Second)
		require.NoError(t, r.err)
		assert.Negative(t, r.at, "RabbitMQ %s and the one in memory differ:\n%s", v.version, r)
		assert.Equal(t, v.version != "4.0.5", r.memory[len(r.memory)-1].counts["@q0"] == hung)
	})
}

// A difference that isn't there any more isn't known any more.
func TestKnownDifferencesAreStillThere(t *testing.T) {
	forEachVersion(t, func(t *testing.T, v *versus) {
		for _, k := range knownDifferences {
			if k.version == v.version {
				r := v.compare(t, k.shows, time.Second)
				assert.Same(t, k, known(v.version, r), "%s:\n%s", k.reason, r)
			}
		}
	})
}
