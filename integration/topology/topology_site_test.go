package topology_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/retry"
)

// shopTopology has every kind of thing: all strategies of retries, work queues, and
// exchanges that publishers use.
func shopTopology(t *testing.T) declare.Topology {
	t.Helper()
	topology, err := retry.Topology(
		retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, 2*time.Second), Strategy: retry.StrategyAuto},
		declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}, declare.QuorumQueue{Name: "invoices"},
	)
	require.NoError(t, err)
	topology, err = declare.Merge(topology, declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: "shop", Type: declare.ExchangeTopic, AlternateExchange: "parking_exchange"},
			{Name: "shop.eu", Type: declare.ExchangeHeaders, Internal: true},
		},
		Bindings: []declare.Binding{
			{Source: "shop", Queue: "orders", Key: "order.*"},
			{Source: "shop", Exchange: "shop.eu", Key: "#"},
			{Source: "shop.eu", Queue: "invoices", Match: declare.MatchAll, Headers: map[string]any{"country": "DE", "vat": 19}},
		},
	})
	require.NoError(t, err)
	return topology
}

// plan plans, and wants it to work.
func plan(t *testing.T, src check.Sources, topology declare.Topology) audit.Diff {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
	defer cancel()
	d, err := planned(ctx, src, topology)
	require.NoError(t, err)
	return d
}

// planned is what Apply would do to the live broker.
func planned(ctx context.Context, src check.Sources, topology declare.Topology) (audit.Diff, error) {
	s, err := check.Read(ctx, src, topology)
	if err != nil {
		return audit.Diff{}, err
	}
	return audit.Compare(s, topology), nil
}

var errCut = errors.New("the process has ended here")

// cutAt is a management whose process ends at a request: that one is sent or not,
// its reply never comes, and nothing is sent after it.
type cutAt struct {
	declare.Requester
	n    int64 // the first request is 1
	sent bool  // whether the n-th request reaches the broker
	seen atomic.Int64
}

func (c *cutAt) Request(ctx context.Context, method, path string, body any) (int, any, error) {
	n := c.seen.Add(1)
	if n < c.n || n == c.n && c.sent {
		status, reply, err := c.Requester.Request(ctx, method, path, body)
		if n < c.n {
			return status, reply, err
		}
	}
	return 0, nil, errCut
}
