package topology_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
)

// trial is one queue with an argument and a policy of the same key, and a peer that finds
// out which of them the broker goes by.
type trial struct {
	*testing.T
	*suite.Site
	peer  *suite.Peer
	ask   declare.Requester
	queue string
}

const (
	short   = int64(700)       // ms
	lasting = int64(3_600_000) // ms
)

// counts waits until the queue has n ready messages.
func (w trial) counts(queue string, n int) bool {
	return w.within(func() bool { return w.count(queue) == n })
}

func (w trial) count(queue string) int {
	info, err := declare.Inspect(w.Context(), w.ask, queue) // the HTTP API's counts are seconds old
	require.NoError(w, err)
	return int(info.Messages)
}

func (w trial) within(is func() bool) bool {
	for began := time.Now(); time.Since(began) < suite.Patience; time.Sleep(20 * time.Millisecond) {
		if is() {
			return true
		}
	}
	return false
}

// send publishes n messages of 100 bytes, and returns how many were accepted.
func (w trial) send(n int) (accepted int) {
	for range n {
		if isAccepted(w.peer.Send(address.Queue(w.queue), amqp.NewMessage(make([]byte, 100)))) {
			accepted++
		}
	}
	return accepted
}

// overflow is what a queue with a max-length of 1 does.
func (w trial) overflow() any {
	switch w.send(6) {
	case 6:
		return "drop-head"
	case 1, 2:
		return "reject-publish"
	}
	return nil
}

// arrival rejects a message, and says in which queue it arrives.
func (w trial) arrival() any {
	queues := []string{w.queue + ".a", w.queue + ".b"}
	w.send(1)
	r := w.peer.Receiver(w.queue, 1)
	require.NoError(w, r.RejectMessage(w.Context(), w.peer.Next(r), nil))
	var at any
	w.within(func() bool {
		for _, q := range queues {
			if w.count(q) == 1 {
				at = q
			}
		}
		return at != nil
	})
	return at
}

// strategy is at-most-once if a dead letter is stored in a full queue, and at-least-once
// if it is kept for as long as that is full.
func (w trial) strategy() any {
	w.HTTP(w.T, http.MethodPut, "/queues/"+w.VHost+"/"+w.queue+".full", map[string]any{"durable": true, "arguments": map[string]any{
		"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "reject-publish"}}, nil)
	to := address.Queue(w.queue + ".full")
	n := 0
	for isAccepted(w.peer.Send(to, amqp.NewMessage(nil))) {
		n++
	}
	w.send(1)
	r := w.peer.Receiver(w.queue, 1)
	require.NoError(w, r.RejectMessage(w.Context(), w.peer.Next(r), nil))
	var came any
	w.within(func() bool {
		var q struct {
			DLX int `json:"messages_dlx"`
		}
		w.HTTP(w.T, http.MethodGet, "/queues/"+w.VHost+"/"+w.queue, nil, &q)
		switch {
		case q.DLX == 1:
			came = "at-least-once"
		case w.count(w.queue+".full") > n:
			came = "at-most-once"
		}
		return came != nil
	})
	return came
}

// isAccepted reports whether a message was stored.
func isAccepted(s amqp.DeliveryState) bool {
	_, ok := s.(*amqp.StateAccepted)
	return ok
}

// deliveries fails a message until it is gone, at most 9 times: the delivery limit, or -1.
func (w trial) deliveries() any {
	w.send(1)
	r := w.peer.Receiver(w.queue, 1)
	for n := range int64(9) {
		ctx, cancel := context.WithTimeout(w.Context(), suite.Patience)
		go func() { // it is gone once it is in the dead-letter queue
			if w.within(func() bool {
				info, err := declare.Inspect(ctx, w.ask, w.queue+".dead")
				return ctx.Err() != nil || err == nil && info.Messages == 1
			}) {
				cancel()
			}
		}()
		m, err := r.Receive(ctx, nil)
		cancel()
		if err != nil {
			return n - 1
		}
		require.NoError(w, r.ModifyMessage(w.Context(), m, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		require.NoError(w, r.IssueCredit(1))
	}
	return int64(-1)
}

// expired waits until a message is dead-lettered, and returns the short time.
func (w trial) expired() any {
	w.send(1)
	if w.counts(w.queue+".dead", 1) {
		return short
	}
	return nil
}

// deleted waits until the queue is gone, and returns the short time.
func (w trial) deleted() any {
	if w.within(func() bool {
		status, _, err := w.HTTPStatus(http.MethodGet, "/queues/"+w.VHost+"/"+w.queue, nil)
		return err == nil && status == http.StatusNotFound
	}) {
		return short
	}
	return nil
}

// left publishes 6 messages, and returns how many the queue keeps.
func (w trial) left() any {
	w.send(6)
	kept := -1
	w.within(func() bool {
		n := w.count(w.queue)
		stable := n == kept && n > 0 && n < 6
		kept = n
		return stable
	})
	return int64(kept)
}

// kept says in bytes which of 350 and 850 bounds the queue.
func (w trial) kept() any {
	if n, _ := w.left().(int64); n <= 3 {
		return int64(350)
	}
	return int64(850)
}

// returned fails a message, and returns late if the next delivery is, else soon.
func (w trial) returned(late, soon any) any {
	w.send(1)
	r := w.peer.Receiver(w.queue, 2)
	m := w.peer.Next(r)
	began := time.Now()
	require.NoError(w, r.ModifyMessage(w.Context(), m, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
	w.peer.Next(r)
	if time.Since(began) > 2*time.Second {
		return late
	}
	return soon
}

// revoked holds a message until the broker gives it to another consumer, and returns
// the short time.
func (w trial) revoked() any {
	w.send(1)
	w.peer.Next(w.peer.Receiver(w.queue, 1))
	other := w.Site.Peer(w.T)
	other.Next(other.Receiver(w.queue, 1))
	return short
}

// precedence is a key with its argument and its policy, further arguments, how to find out
// which of both counts, and the value that does.
type precedence struct {
	key         string
	arg, policy any
	with        map[string]any
	find        func(w trial) any
	want        any
	types       []string
	newer       bool // only 4.3 knows it
}

func precedences() []precedence {
	both, quorum := []string{"quorum", "classic"}, []string{"quorum"}
	with := func(pairs ...any) map[string]any {
		m := map[string]any{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i].(string)] = pairs[i+1]
		}
		return m
	}
	var all []precedence
	// either adds a key with two values, each as the argument and as the policy.
	either := func(p precedence, a, b any, want func(arg, policy any) any) {
		for _, v := range [][2]any{{a, b}, {b, a}} {
			p.arg, p.policy, p.want = v[0], v[1], want(v[0], v[1])
			all = append(all, p)
		}
	}
	argument := func(arg, _ any) any { return arg }
	policy := func(_, policy any) any { return policy }
	smaller := func(arg, policy any) any { return min(arg.(int64), policy.(int64)) }
	larger := func(arg, policy any) any { return max(arg.(int64), policy.(int64)) }
	either(precedence{key: "overflow", with: with("x-max-length", 1), find: trial.overflow, types: quorum}, "drop-head", "reject-publish", policy)
	either(precedence{key: "overflow", with: with("x-max-length", 1), find: trial.overflow, types: []string{"classic"}}, "drop-head", "reject-publish", argument)
	either(precedence{key: "dead-letter-exchange", find: trial.arrival, types: both}, "a", "b", argument)
	either(precedence{key: "dead-letter-routing-key", with: with("x-dead-letter-exchange", ""), find: trial.arrival, types: both}, "a", "b", argument)
	either(precedence{key: "dead-letter-strategy", with: with("x-overflow", "reject-publish"), find: trial.strategy, types: quorum}, "at-most-once", "at-least-once", argument)
	either(precedence{key: "message-ttl", find: trial.expired, types: both}, short, lasting, smaller)
	either(precedence{key: "expires", find: trial.deleted, types: both}, short, lasting, smaller)
	either(precedence{key: "max-length", find: trial.left, types: both}, int64(2), int64(4), smaller)
	either(precedence{key: "max-length-bytes", find: trial.kept, types: both}, int64(350), int64(850), smaller)
	either(precedence{key: "delivery-limit", find: trial.deliveries, types: quorum}, int64(1), int64(3), smaller)
	either(precedence{key: "delivery-limit", find: trial.deliveries, types: quorum}, int64(-1), int64(3), larger)
	either(precedence{key: "consumer-timeout", find: trial.revoked, types: quorum, newer: true}, short, lasting, smaller)
	either(precedence{key: "delayed-retry-type", with: with("x-delayed-retry-min", 3000, "x-delayed-retry-max", 3000), types: quorum, newer: true,
		find: func(w trial) any { return w.returned("all", "disabled") }}, "all", "disabled", policy)
	either(precedence{key: "delayed-retry-min", with: with("x-delayed-retry-type", "all", "x-delayed-retry-max", 3000), types: quorum, newer: true,
		find: func(w trial) any { return w.returned(int64(3000), int64(100)) }}, int64(3000), int64(100), smaller)
	either(precedence{key: "delayed-retry-max", with: with("x-delayed-retry-type", "all", "x-delayed-retry-min", 3000), types: quorum, newer: true,
		find: func(w trial) any { return w.returned(int64(4000), int64(200)) }}, int64(4000), int64(200), smaller)
	return all
}

// Which of a queue's argument and a policy counts, key by key, as the broker goes by it
// and as package audit takes it.
func TestWhichOfArgumentAndPolicyCounts(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for i, p := range precedences() {
			if p.newer && !s.Newer() {
				continue
			}
			for _, kind := range p.types {
				t.Run(fmt.Sprintf("%s/%s/%v over %v", kind, p.key, p.policy, p.arg), func(t *testing.T) {
					t.Parallel()
					trial{t, s, s.Peer(t), conn.Management(), fmt.Sprintf("q%d-%s", i, kind)}.run(kind, p)
				})
			}
		}
	})
}

func (w trial) run(kind string, p precedence) {
	args := map[string]any{"x-queue-type": kind, "x-" + p.key: p.arg}
	definition := map[string]any{p.key: p.policy}
	want := p.want
	to := func(queue string) {
		args["x-dead-letter-exchange"], args["x-dead-letter-routing-key"] = "", w.queue+queue
	}
	switch p.key {
	case "message-ttl", "delivery-limit":
		w.Site.DeclareQueue(w.T, w.queue+".dead", map[string]any{"x-queue-type": "classic"})
		to(".dead")
	case "dead-letter-strategy":
		to(".full")
	case "delayed-retry-type":
		definition["delayed-retry-min"] = 3000 // the broker wants it
	case "dead-letter-exchange", "dead-letter-routing-key":
		own := func(v any) string { return w.queue + "." + v.(string) }
		for _, name := range []string{own("a"), own("b")} {
			w.DeclareExchange(w.T, name, "fanout", true, nil)
			w.Site.DeclareQueue(w.T, name, map[string]any{"x-queue-type": "classic"})
			w.Bind(w.T, name, name, "")
		}
		args["x-"+p.key], definition[p.key], want = own(p.arg), own(p.policy), own(p.want)
	}
	maps.Copy(args, p.with)
	w.Policy(w.T, "policies", w.queue, definition)
	w.Site.DeclareQueue(w.T, w.queue, args)
	snapshot, err := check.Read(w.Context(), check.Sources{HTTP: w.API(w.T)}, declare.Topology{})
	require.NoError(w, err)
	for _, q := range snapshot.Queues {
		if q.Name == w.queue {
			assert.Equal(w, want, snapshot.Effective(q)["x-"+p.key], "package audit")
		}
	}
	if found := p.find(w); found != nil {
		assert.Equal(w, want, found, "the broker")
	} else {
		assert.Fail(w, "the broker shows nothing")
	}
}

// RabbitMQ 4.3 refuses a policy that delays retries and doesn't say for how long.
func TestAPolicyThatDelaysRetriesSaysForHowLong(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		status, text, err := s.HTTPStatus(http.MethodPut, "/policies/"+s.VHost+"/p", map[string]any{"pattern": "^q$", "definition": map[string]any{"delayed-retry-type": "all"}})
		require.NoError(t, err)
		assert.Equal(t, http.StatusBadRequest, status)
		if s.Newer() {
			assert.Contains(t, string(text), "delayed-retry-min is required when delayed-retry-type is all")
		}
	})
}

// What the broker makes of two policies, a user's and an operator's, and that package
// audit makes the same of them.
func TestWhichOfTwoPoliciesCounts(t *testing.T) {
	type pair struct{ user, operator, want any }
	pairs := map[string][]pair{"overflow": {{"drop-head", "reject-publish", "reject-publish"}, {"reject-publish", "drop-head", "drop-head"}}}
	for _, key := range []string{"message-ttl", "expires", "max-length", "max-length-bytes", "delivery-limit"} {
		low, high := int64(100_000), int64(200_000)
		pairs[key] = []pair{{low, high, low}, {high, low, low}}
	}
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		want := map[string]map[string]any{}
		for key, values := range pairs {
			for i, v := range values {
				name := fmt.Sprintf("%s-%d", key, i)
				s.Policy(t, "policies", name, map[string]any{key: v.user, "dead-letter-exchange": "theirs"})
				s.Policy(t, "operator-policies", name, map[string]any{key: v.operator})
				suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: name}))
				want[name] = map[string]any{key: v.want, "dead-letter-exchange": "theirs"}
			}
		}
		snapshot, err := check.Read(t.Context(), check.Sources{HTTP: s.API(t)}, declare.Topology{})
		require.NoError(t, err)
		for _, q := range snapshot.Queues {
			effective := snapshot.Effective(q)
			for key, v := range want[q.Name] {
				assert.Equal(t, v, effective["x-"+key], "package audit: %s of %s", key, q.Name)
			}
			suite.Poll(t, "the broker has both policies of "+q.Name, func() bool {
				var q2 struct {
					Effective map[string]any `json:"effective_policy_definition"`
				}
				s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/"+q.Name, nil, &q2)
				for key, v := range want[q.Name] {
					if fmt.Sprint(v) != fmt.Sprintf("%v", plainNumber(q2.Effective[key])) {
						return false
					}
				}
				return len(q2.Effective) == len(want[q.Name])
			})
		}
	})
}

// plainNumber is a number of JSON as an integer.
func plainNumber(v any) any {
	if f, ok := v.(float64); ok {
		return int64(f)
	}
	return v
}

// Of an exchange's alternate exchange and a policy's, its own counts.
func TestAnExchangesOwnAlternateExchangeCounts(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, name := range []string{"own", "policys"} {
			s.DeclareExchange(t, name, "fanout", true, nil)
			s.DeclareQueue(t, name, map[string]any{"x-queue-type": "quorum"})
			s.Bind(t, name, name, "")
		}
		s.Policy(t, "policies", "x", map[string]any{"alternate-exchange": "policys"})
		s.DeclareExchange(t, "x", "direct", true, map[string]any{"alternate-exchange": "own"})
		p := s.Peer(t)
		require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Exchange("x", "nobody"), amqp.NewMessage(nil)))
		p.Take("own", 1)
	})
}
