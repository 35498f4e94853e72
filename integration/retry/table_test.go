package retry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// outcomeRow is what is to become of one message: how often it is handled, and
// which reason it is dead-lettered for, if it is.
type outcomeRow struct {
	name     string
	attempts int
	reason   client.Reason
	handle   func(attempt int) error
}

// outcomeRows are every end that a message can come to, with a policy of 3 retries
// and a delivery limit of 2.
var outcomeRows = []outcomeRow{
	{"succeeds at once", 1, "", func(int) error { return nil }},
	{"succeeds after 1", 2, "", failUntil(2)},
	{"succeeds after 3", 4, "", failUntil(4)},
	{"exhausted", 4, retry.ReasonExhausted, failUntil(99)},
	{"permanent", 1, retry.ReasonPermanent, func(int) error { return retry.Permanent(errors.New("no use")) }},
	{"permanent later", 2, retry.ReasonPermanent, func(n int) error {
		if n == 2 {
			return retry.Permanent(errors.New("no use"))
		}
		return errors.New("not yet")
	}},
	{"undecodable", 0, client.ReasonUndecodable, nil},
	{"panics", 1, client.ReasonPanicked, func(int) error { panic("boo") }},
	{"delivery limit", 3, retry.ReasonDeliveryLimit, func(int) error { return client.Requeue{Failed: true} }},
	{"expired", 0, retry.ReasonExpired, nil},
	{"discarded", 1, "", func(int) error { return retry.Discard(errors.New("not wanted")) }},
}

func failUntil(attempt int) func(int) error {
	return func(n int) error {
		if n < attempt {
			return fmt.Errorf("attempt %d", n)
		}
		return nil
	}
}

// The table of every strategy, broker and outcome, with exact counts.
func TestEveryOutcomeOfEveryStrategy(t *testing.T) {
	var mu sync.Mutex
	cells := map[string]map[string]string{} // row, column
	columns := map[string]bool{}
	set := func(row, column, cell string) {
		mu.Lock()
		defer mu.Unlock()
		if cells[row] == nil {
			cells[row] = map[string]string{}
		}
		cells[row][column], columns[column] = cell, true
	}
	t.Cleanup(func() {
		names := make([]string, 0, len(columns))
		for c := range columns {
			names = append(names, c)
		}
		slices.Sort(names)
		t.Logf("REPORT attempts, and where it ended: %-17s%s", "", strings.Join(pad(names), ""))
		for _, r := range outcomeRows {
			line := make([]string, len(names))
			for i, c := range names {
				line[i] = cells[r.name][c]
			}
			t.Logf("REPORT %-18s%s", r.name, strings.Join(pad(line), ""))
		}
	})
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			for _, r := range outcomeRows {
				set(r.name, "native 4.0", "refused") // TestNativeIsRefusedWhereItWouldSpin
			}
		}
		for name, edit := range suite.Strategies(s) {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(60 * time.Millisecond)}
				edit(&policy)
				conn, _ := s.Connect(t)
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "work", DeliveryLimit: 2}, declare.QuorumQueue{Name: "idle", DeliveryLimit: 2})

				var mu sync.Mutex
				attempts := map[string]int{}
				handled := make(chan string, 100)
				suite.Consume(t, conn, "work", retry.With(policy)(client.JSON(func(_ context.Context, name string) error {
					i := slices.IndexFunc(outcomeRows, func(r outcomeRow) bool { return r.name == name })
					mu.Lock()
					attempts[name]++
					n := attempts[name]
					mu.Unlock()
					err := outcomeRows[i].handle(n)
					if err == nil || strings.HasPrefix(name, "discard") {
						handled <- name
					}
					return err
				})), client.ConsumerConfig{Concurrency: 4})
				dead := make(chan *client.Message, 100)
				for _, q := range []string{"work.dead", "idle.dead"} {
					suite.Consume(t, conn, q, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
						dead <- d.Message()
						return nil
					}), client.ConsumerConfig{})
				}

				raw := suite.Publisher[*client.Message](t, conn, address.Queue("work"))
				idle := suite.Publisher[*client.Message](t, conn, address.Queue("idle"))
				alive := 0
				for _, r := range outcomeRows {
					m := client.NewMessage(fmt.Appendf(nil, "%q", r.name))
					m.Properties.MessageID = r.name
					switch r.name {
					case "undecodable":
						m.Data = [][]byte{[]byte("{broken")}
						suite.Publish(t, raw, m)
					case "expired":
						m.Header.TTL = 100 * time.Millisecond
						suite.Publish(t, idle, m) // nobody handles this queue's messages
					default:
						suite.Publish(t, raw, m)
					}
					if r.reason == "" {
						alive++
					}
				}
				ended := map[string]client.Reason{}
				for range alive {
					ended[suite.Await(t, handled, "a message that succeeds")] = ""
				}
				for range len(outcomeRows) - alive {
					m := suite.Await(t, dead, "a dead letter")
					id, _ := m.Properties.MessageID.(string)
					_, twice := ended[id]
					assert.False(t, twice, "%s is dead twice, or succeeded and is dead", id)
					ended[id] = retry.DeadLetterOf(m).Reason
				}
				for _, q := range []string{"work", "idle", "parking_queue"} {
					suite.Poll(t, q+" is empty", func() bool { return suite.Ready(t, conn, q) == 0 })
				}
				mu.Lock()
				defer mu.Unlock()
				for _, r := range outcomeRows {
					reason, ok := ended[r.name]
					require.True(t, ok, "%s came to no end", r.name)
					assert.Equal(t, r.reason, reason, r.name)
					assert.Equal(t, r.attempts, attempts[r.name], "attempts of %s", r.name)
					where := string(reason)
					if where == "" {
						where = "done"
					}
					set(r.name, name+" "+s.Version, fmt.Sprintf("%d %s", attempts[r.name], where))
				}
			})
		}
	})
}

func pad(cells []string) []string {
	padded := make([]string, len(cells))
	for i, c := range cells {
		padded[i] = fmt.Sprintf("%-17s", c)
	}
	return padded
}

// A long delay in front doesn't block a short one behind it, with any strategy.
func TestShortDelayIsNotHeldUpByALongOneWithAnyStrategy(t *testing.T) {
	suite.ForEachStrategy(t, func(t *testing.T, s *suite.Site, policy retry.Policy) {
		const long, short = 8 * time.Second, 200 * time.Millisecond
		policy.Backoff = retry.Delays(short, long) // so that there are queues for both
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "work", DeliveryLimit: 2})
		type back struct {
			delay time.Duration
			after time.Duration
		}
		var mu sync.Mutex
		failed := map[time.Duration]time.Time{}
		came := make(chan back, 10)
		suite.Consume(t, conn, "work", retry.With(policy)(client.JSON(func(ctx context.Context, delay time.Duration) error {
			mu.Lock()
			defer mu.Unlock()
			if retry.Attempt(ctx) == 1 {
				failed[delay] = time.Now()
				return retry.After(delay, nil)
			}
			came <- back{delay, time.Since(failed[delay])}
			return nil
		})), client.ConsumerConfig{})
		p := suite.Publisher[time.Duration](t, conn, address.Queue("work"))
		suite.Publish(t, p, long)
		suite.Publish(t, p, short)
		first, second := suite.Await(t, came, "the short one"), suite.Await(t, came, "the long one")
		assert.Equal(t, short, first.delay, "it doesn't wait for the long one in front")
		assert.GreaterOrEqual(t, first.after, short-5*time.Millisecond)
		assert.GreaterOrEqual(t, second.after, long-5*time.Millisecond)
		t.Logf("REPORT %s: asked %v behind %v, had %v and %v", t.Name(), short, long, first.after.Round(time.Millisecond), second.after.Round(time.Millisecond))
	})
}
