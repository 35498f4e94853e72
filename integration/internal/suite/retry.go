package suite

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// Strategies are all ways to wait, by name.
func Strategies(s *Site) map[string]func(*retry.Policy) {
	all := map[string]func(*retry.Policy){
		"republish":   func(p *retry.Policy) { p.Strategy = retry.StrategyRepublish },
		"dead-letter": func(p *retry.Policy) { p.Strategy = retry.StrategyDeadLetter },
		"ladder":      func(p *retry.Policy) { p.AnyDelay = &retry.Ladder{Unit: 50 * time.Millisecond, Levels: 8} },
		"auto":        func(p *retry.Policy) { p.Strategy = retry.StrategyAuto },
	}
	if s.Newer() {
		all["native"] = func(p *retry.Policy) { p.Strategy = retry.StrategyNative }
	}
	return all
}

// ForEachStrategy runs test with every strategy that the broker can do.
func ForEachStrategy(t *testing.T, test func(t *testing.T, s *Site, p retry.Policy)) {
	ForEachBroker(t, func(t *testing.T, s *Site) {
		for name, set := range Strategies(s) {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				p := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100*time.Millisecond, 200*time.Millisecond, 300*time.Millisecond), Worker: "tester"}
				set(&p)
				test(t, NewSite(t, s.Broker), p)
			})
		}
	})
}

// PublisherOf is a publisher of raw strings.
func PublisherOf(t *testing.T, conn *client.Conn, to address.Address) *client.Publisher[string] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	p, err := client.NewPublisher[string](ctx, conn, to, client.PublisherConfig{Codec: client.RawCodec{}})
	require.NoError(t, err)
	return p
}

// AssertEmpty waits until the queue has no message in any state.
func AssertEmpty(t *testing.T, s *Site, queue string) {
	t.Helper()
	var q struct{ Messages int }
	assert.Eventually(t, func() bool {
		status, text, err := s.HTTPStatus("GET", "/queues/"+s.VHost+"/"+queue, nil)
		if err != nil || status != 200 {
			return false
		}
		q.Messages = -1
		if i := strings.Index(string(text), `"messages":`); i >= 0 {
			_, _ = fmt.Sscanf(string(text)[i:], `"messages":%d`, &q.Messages)
		}
		return q.Messages == 0
	}, Patience, 200*time.Millisecond, "%s isn't empty", queue)
}

var Nop = client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })

// Several are the strategies that the broker can do.
func Several(s *Site) []retry.Strategy {
	if s.Newer() {
		return []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative}
	}
	return []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter}
}

// LateLimit is how late a hop may come back before a test fails. It guards
// against a delay that isn't kept at all; how late hops really are is reported.
const LateLimit = 15 * time.Second

type Order struct {
	ID int `json:"id"`
}
