package publish_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/phash2"
)

// Keys of each length up to four blocks of the hash, and some that are long.
func keysToHash(n int) []string {
	r := rand.New(rand.NewPCG(1, 30))
	alphabet := []rune("abcxyzABC019-._~/%+ *#\t\"'äß€😀")
	keys := map[string]bool{"": true, "a": true, "customer-42": true}
	for i := 0; len(keys) < n; i++ {
		length := i % 49
		if i%500 == 0 {
			length = 255
		}
		var b strings.Builder
		for b.Len() < length {
			b.WriteRune(alphabet[r.IntN(len(alphabet))])
		}
		keys[b.String()] = true
	}
	return slices.Sorted(maps.Keys(keys))
}

// The queues of x-modulus-hash are sorted by name, byte by byte, a binding's key and arguments don't
// matter, and a queue with several bindings counts several times.
func TestModulusHashRoutesAsComputed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		x := declare.Topology{Exchanges: []declare.Exchange{{Name: "orders", Type: declare.ExchangeModulusHash}}}
		if !s.Newer() {
			_, err := declare.Apply(t.Context(), conn.Management(), x)
			require.ErrorContains(t, err, "unknown exchange type 'x-modulus-hash'")
			return
		}
		queues := []string{"orders.9", "orders.10", "orders.1", "Orders", "ä", "orders", "z", "orders."}
		for i, name := range queues {
			x.Queues = append(x.Queues, suite.Quorum(name, declare.Drop()))
			x.Bindings = append(x.Bindings, declare.Binding{Source: "orders", Queue: name, Key: fmt.Sprint(i)})
		}
		x.Bindings = append(x.Bindings,
			declare.Binding{Source: "orders", Queue: "z", Key: "again"},
			declare.Binding{Source: "orders", Queue: "z", Key: "again", Arguments: map[string]any{"a": "b"}},
		)
		suite.Apply(t, conn, x)
		sorted := append(slices.Clone(queues), "z", "z")
		slices.Sort(sorted)

		var items [][]string // the keys of each message
		for i, key := range keysToHash(4000) {
			keys := []string{key}
			if i%10 == 0 {
				keys = append(keys, "cc", fmt.Sprint(i), "")[:2+i%20/10*2]
			}
			items = append(items, keys)
		}
		ids := make([]int, len(items))
		for i := range ids {
			ids[i] = i
		}
		p := suite.Publisher[int](t, conn, address.Address{})
		require.NoError(t, p.PublishAll(t.Context(), ids, func(id int, m *client.Message) {
			client.PublishTo(address.Exchange("orders", items[id][0]))(m)
			if more := items[id][1:]; len(more) > 0 {
				client.CC(more...)(m)
			}
		}))

		var mu sync.Mutex
		got, all := map[int]string{}, make(chan struct{})
		for _, name := range queues {
			suite.Consume(t, conn, name, client.JSON(func(_ context.Context, id int) error {
				mu.Lock()
				defer mu.Unlock()
				if got[id] = name; len(got) == len(items) {
					close(all)
				}
				return nil
			}), client.ConsumerConfig{})
		}
		suite.Await(t, all, "every message comes")
		mu.Lock()
		defer mu.Unlock()
		counts := map[string]int{}
		for id, keys := range items {
			counts[got[id]]++
			want := sorted[phash2.Strings(keys...)%uint32(len(sorted))]
			if got[id] != want {
				assert.Failf(t, "another queue", "%q is in %s, not in %s", keys, got[id], want)
			}
		}
		suite.Report(t, s, "%d keys over %d bindings of a modulus-hash exchange: %v", len(items), len(sorted), counts)
	})
}
