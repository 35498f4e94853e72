package claim

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
)

func TestAClaimReturnsWhatIsParkedAndLeavesTheBacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("a", time.Hour, "a1", "a2", "a3")
		q.park("b", time.Hour, "b1")
		q.publish(message("ready", nil, nil))
		c := q.claims(t)
		found := claim(t, c, "a")
		assert.Equal(t, []string{"a1", "a2", "a3"}, names(found))
		for _, m := range found {
			require.NoError(t, m.Settle(t.Context(), accept))
		}
		assert.Empty(t, claim(t, c, "a"))
		assert.Empty(t, claim(t, c, "unknown"))
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, []string{"b1"}, []string{"ready"}, []string{"a1", "a2", "a3"})
	})
}

// Tokens of any kind fit into flows, and reach the callers that asked for them.
func TestManyAndLongTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		var tokens []string
		for i := range 2 * engine.MaxClaims {
			tokens = append(tokens, fmt.Sprintf("%03d%s", i, strings.Repeat("x", i%2*509)))
		}
		tokens = append(tokens, "", "\x00", "\xff\xfe", "a\"b", strings.Repeat("y", 2*maxTokenBytes))
		for _, token := range tokens {
			q.park(token, time.Hour, token)
		}
		c := q.claims(t)
		var callers sync.WaitGroup
		for _, token := range tokens {
			for range 2 { // one of them gets it
				callers.Go(func() {
					for _, m := range claim(t, c, token) {
						assert.Equal(t, token, body(m.Message))
						assert.NoError(t, m.Settle(t.Context(), accept))
					}
				})
			}
		}
		callers.Wait()
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, nil, nil, tokens)
		for _, flow := range q.flows {
			n := len(strings.Join(flow, ""))
			assert.True(t, n <= maxTokenBytes || len(flow) == 1, "%d bytes in %d tokens", n, len(flow))
		}
		assert.LessOrEqual(t, q.most, maxFrames, "settlements between two flows")
	})
}

// A sender's annotations never make a message a claimed one.
func TestForgedAnnotationsInTheBacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		now := time.Now().UnixMilli()
		var all []string
		for name, at := range map[string]any{
			"none": nil, "zero": int64(0), "past": now - 1, "now": now, "negative": int64(-1 << 63),
			"text": "tomorrow", "unsigned": uint64(1 << 63), "time": time.Now().Add(time.Hour),
		} {
			q.publish(message(name, "t", at))
			all = append(all, name)
		}
		for name, token := range map[string]any{"other": "u", "symbol": amqp.Symbol("t"), "binary": []byte("t"), "number": int64(1)} {
			q.publish(message(name, token, now+int64(time.Hour/time.Millisecond)))
			all = append(all, name)
		}
		c := q.claims(t)
		for range len(all) + 1 {
			assert.Empty(t, claim(t, c, "t"))
		}
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, nil, all, nil)
	})
}

func TestAMessageThatIsDueSoonIsParkedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("t", near-time.Millisecond, "soon")
		q.park("u", near+10*time.Millisecond, "later")
		c := q.claims(t)
		assert.Empty(t, claim(t, c, "t"))
		assert.Len(t, claim(t, c, "u"), 1)
		synctest.Wait()
		require.ErrorIs(t, c.Close(within(t, time.Minute)), failure.ErrOutcomeUnknown, "a claimed message isn't settled")
		q.holds(t, []string{"soon"}, []string{"later"}, nil)
	})
}

// The broker's clock decides what is due. Without it, everything with a token is taken.
func TestWhatIsDueIsByTheBrokersClock(t *testing.T) {
	for name, test := range map[string]struct {
		ahead time.Duration
		known bool
		taken bool
	}{
		"same":    {known: true, taken: true},
		"ahead":   {ahead: 2 * time.Hour, known: true},
		"unknown": {ahead: 2 * time.Hour, taken: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := &fakeQueue{}
				q.park("t", time.Hour, "m")
				known := test.known
				c := q.claims(t, func(s *Settings) {
					s.Observer = clock(func() (time.Time, bool) { return time.Now().Add(test.ahead), known })
				})
				if test.known { // and is remembered
					claim(t, c, "unknown")
					known = false
				}
				found := claim(t, c, "t")
				assert.Equal(t, test.taken, len(found) == 1)
				for _, m := range found {
					require.NoError(t, m.Settle(t.Context(), accept))
				}
				require.NoError(t, c.Close(t.Context()))
			})
		})
	}
}

// More messages than one call returns under one token.
func TestATokenOfManyMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		var all []string
		for i := range maxHeld + 2*moreCredit {
			all = append(all, fmt.Sprint(i))
		}
		q.park("t", time.Hour, all...)
		c := q.claims(t)
		found, more, err := c.Claim(t.Context(), "t")
		require.NoError(t, err)
		assert.True(t, more)
		assert.Less(t, len(found), len(all))
		for more {
			var rest []*Message
			rest, more, err = c.Claim(t.Context(), "t")
			require.NoError(t, err)
			found = append(found, rest...)
		}
		assert.Len(t, found, len(all))
		var settling sync.WaitGroup
		for _, m := range found {
			settling.Go(func() { assert.NoError(t, m.Settle(t.Context(), accept)) })
		}
		settling.Wait()
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, nil, nil, all)
	})
}

// Messages that nobody wanted are parked again before their token is claimed again, however many there are.
func TestUnwantedMessagesAreFoundAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		var all []string
		for i := range 20 * maxFrames {
			all = append(all, fmt.Sprint(i))
		}
		q.park("t", time.Hour, all...)
		resume := make(chan struct{})
		c := q.claims(t)
		q.answered = func([]string) error { <-resume; return nil }
		_, _, err := c.Claim(within(t, time.Second), "t")
		require.ErrorIs(t, err, failure.ErrNotSent)
		found := make(chan []*Message)
		go func() { found <- claim(t, c, "t") }()
		synctest.Wait()
		close(resume)
		again := <-found
		assert.Len(t, again, len(all))
		for _, m := range again {
			go func() { _ = m.Settle(t.Context(), accept) }()
		}
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, nil, nil, all)
	})
}

// A caller that takes no further messages leaves none of them with the link.
func TestWhatACallerLeavesIsParkedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		var all []string
		for i := range maxHeld + 2*moreCredit {
			all = append(all, fmt.Sprint(i))
		}
		q.park("t", time.Hour, all...)
		c := q.claims(t)
		found, more, err := c.Claim(t.Context(), "t")
		require.NoError(t, err)
		require.True(t, more)
		var settling sync.WaitGroup
		for _, m := range found {
			settling.Go(func() { assert.NoError(t, m.Settle(t.Context(), accept)) })
		}
		settling.Wait()
		require.NoError(t, c.Close(t.Context()))
		assert.Len(t, q.parked, len(all)-len(found))
		assert.Empty(t, q.ready)
	})
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A claim whose caller has gone changes nothing.
func TestAClaimEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("t", time.Hour, "m")
		resume := make(chan struct{})
		c := q.claims(t)
		q.answered = func([]string) error { <-resume; return nil }
		_, _, err := c.Claim(within(t, time.Second), "t")
		require.ErrorIs(t, err, failure.ErrNotSent)
		_, _, err = c.Claim(within(t, time.Second), "t") // and one that isn't written yet
		require.ErrorIs(t, err, failure.ErrNotSent)
		ended, end := context.WithCancel(t.Context())
		end()
		_, _, err = c.Claim(ended, "t")
		require.ErrorIs(t, err, failure.ErrNotSent)
		close(resume)
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, []string{"m"}, nil, nil)
	})
}

func TestASettlementEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("t", time.Hour, "m")
		c := q.claims(t)
		m := claim(t, c, "t")[0]
		resume := make(chan struct{})
		q.answered = func([]string) error { <-resume; return nil }
		require.ErrorIs(t, m.Settle(within(t, time.Second), accept), failure.ErrOutcomeUnknown)
		close(resume)
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, nil, nil, []string{"m"})
	})
}

// A lost link leaves a claim's answer open only if the queue may have carried it out.
func TestALinkIsLostWhileATokenIsClaimed(t *testing.T) {
	for name, test := range map[string]struct {
		before, token, parked bool
		ready                 []string
	}{
		"before the queue has read the flow": {before: true, token: true},
		"after it":                           {token: true, ready: []string{"m"}},
		"nothing was parked":                 {},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := &fakeQueue{}
				if test.token {
					q.park("t", time.Hour, "m")
				}
				for range 3 { // more than a claim reads, before what becomes ready
					q.publish(message("ready", nil, nil))
				}
				c := q.claims(t)
				fail := func(tokens []string) error {
					if len(tokens) == 0 || len(q.links) > 1 {
						return nil
					}
					return errLost
				}
				if test.before {
					q.flow = fail
				} else {
					q.answered = fail
				}
				found, _, err := c.Claim(t.Context(), "t")
				if test.before {
					require.NoError(t, err)
					require.Len(t, found, 1, "the next link claims it again")
					require.NoError(t, found[0].Settle(t.Context(), accept))
					require.NoError(t, c.Close(t.Context()))
					return
				}
				require.ErrorIs(t, err, failure.ErrConnectionLost)
				assert.Empty(t, found)
				require.NoError(t, c.Close(t.Context()))
				q.holds(t, nil, append(test.ready, "ready", "ready", "ready"), nil)
			})
		})
	}
}

func TestALinkIsLostBeforeASettlement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("t", time.Hour, "m")
		c := q.claims(t)
		m := claim(t, c, "t")[0]
		q.last().lose()
		synctest.Wait()
		require.ErrorIs(t, m.Settle(t.Context(), accept), failure.ErrConnectionLost)
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, nil, []string{"m"}, nil)
	})
}

func TestALinkIsLostBehindASettlement(t *testing.T) {
	for name, test := range map[string]func(q *fakeQueue){
		"with its write":    func(q *fakeQueue) { q.wrote = func() error { return errLost } },
		"before the answer": func(q *fakeQueue) { q.flow = func([]string) error { return errLost } },
		"with the answer":   func(q *fakeQueue) { q.answered = func([]string) error { return errLost } },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := &fakeQueue{}
				q.park("t", time.Hour, "m")
				c := q.claims(t)
				m := claim(t, c, "t")[0]
				test(q)
				err := m.Settle(t.Context(), accept)
				q.mu.Lock()
				q.wrote, q.flow, q.answered = nil, nil, nil
				q.mu.Unlock()
				require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
				require.NoError(t, c.Close(t.Context()))
				q.holds(t, nil, nil, []string{"m"})
			})
		})
	}
}

// What the broker has taken back after the consumer timeout can't be settled, and the link gets
// messages again.
func TestAClaimedMessageThatTheBrokerTakesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("t", time.Hour, "m", "n")
		c := q.claims(t)
		found := claim(t, c, "t")
		require.Len(t, found, 2)
		q.last().revoke(found[0].id)
		synctest.Wait()
		require.ErrorIs(t, found[0].Settle(t.Context(), accept), failure.ErrConnectionLost)
		require.NoError(t, found[1].Settle(t.Context(), accept))
		q.park("u", time.Hour, "o")
		require.NoError(t, claim(t, c, "u")[0].Settle(t.Context(), accept))
		require.NoError(t, c.Close(t.Context()))
		q.holds(t, nil, []string{"m"}, []string{"n", "o"})
	})
}

func TestCloseWaitsForClaimedMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("t", time.Hour, "m")
		c := q.claims(t)
		m := claim(t, c, "t")[0]
		closed := make(chan error)
		go func() { closed <- c.Close(t.Context()) }()
		synctest.Wait()
		_, _, err := c.Claim(t.Context(), "t")
		require.ErrorIs(t, err, failure.ErrClosed)
		require.NoError(t, m.Settle(t.Context(), accept))
		require.NoError(t, <-closed)
		require.NoError(t, c.Close(t.Context()), "again")
		assert.Equal(t, 1, q.closed, "its session")
		q.holds(t, nil, nil, []string{"m"})
	})
}

func TestCloseEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		q.park("t", time.Hour, "m")
		c := q.claims(t)
		m := claim(t, c, "t")[0]
		require.ErrorIs(t, c.Close(within(t, time.Second)), failure.ErrOutcomeUnknown)
		require.ErrorIs(t, m.Settle(t.Context(), accept), failure.ErrConnectionLost)
		q.holds(t, nil, []string{"m"}, nil)
	})
}

// Claims wait for a connection, until their context ends or the Claims is closed.
func TestClaimsWithoutAConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{}
		c := q.claims(t)
		var mu sync.Mutex
		down := true
		q.open = func() error {
			mu.Lock()
			defer mu.Unlock()
			if down {
				return errLost
			}
			return nil
		}
		q.last().lose()
		synctest.Wait()
		_, _, err := c.Claim(within(t, time.Minute), "t")
		require.ErrorIs(t, err, failure.ErrNotSent)
		q.park("t", time.Hour, "m")
		got := make(chan []*Message)
		go func() { got <- claim(t, c, "t") }()
		time.Sleep(time.Minute)
		mu.Lock()
		down = false
		mu.Unlock()
		for _, m := range <-got {
			require.NoError(t, m.Settle(t.Context(), accept))
		}
		q.holds(t, nil, nil, []string{"m"})
		mu.Lock()
		down = true
		mu.Unlock()
		q.last().lose()
		synctest.Wait()
		failed := make(chan error)
		go func() {
			_, _, err := c.Claim(t.Context(), "t")
			failed <- err
		}()
		synctest.Wait()
		require.Error(t, c.Close(within(t, time.Second)))
		require.ErrorIs(t, <-failed, failure.ErrClosed)
	})
}

func TestAQueueThatCanNotBeClaimedFrom(t *testing.T) {
	for name, test := range map[string]struct {
		q    *fakeQueue
		want error
	}{
		"no tokens":     {&fakeQueue{lacksTokens: true}, ErrNoTokens},
		"single active": {&fakeQueue{inert: true}, ErrSingleActive},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := New(Settings{
					Queue: "orders", Sessions: test.q, Backoff: backoff.Exponential{Min: time.Second, Max: time.Minute},
					Observer: ignore{},
				})
				err := c.Await(t.Context())
				require.ErrorIs(t, err, test.want)
				require.ErrorIs(t, err, failure.ErrRefused)
				_, _, err = c.Claim(t.Context(), "t")
				require.ErrorIs(t, err, test.want)
				require.NoError(t, c.Close(t.Context()))
				_, _, err = c.Claim(t.Context(), "t")
				require.ErrorIs(t, err, failure.ErrClosed)
			})
		})
	}
}

func TestAwaitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &fakeQueue{open: func() error { return errors.New("unreachable") }}
		c := New(Settings{
			Queue: "orders", Sessions: q, Backoff: backoff.Exponential{Min: time.Second, Max: time.Minute},
			Observer: ignore{},
		})
		require.ErrorIs(t, c.Await(within(t, time.Minute)), failure.ErrNotSent)
		require.NoError(t, c.Close(t.Context()))
		require.ErrorIs(t, c.Await(t.Context()), failure.ErrClosed)
	})
}
