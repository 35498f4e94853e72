package consume

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Nothing is lost, nothing is left behind, and each sender's order holds, however many
// send and receive at once.
func TestBacklogUnderConcurrentUse(t *testing.T) {
	const senders, receivers, each = 4, 4, 5000
	type item struct{ sender, n int }
	b := NewBacklog[item](3)
	var sending, receiving sync.WaitGroup
	for s := range senders {
		sending.Go(func() {
			for n := range each {
				b.Put(item{s, n})
			}
		})
	}
	got := make(chan []item, receivers)
	done := make(chan struct{})
	var total sync.WaitGroup
	total.Add(senders * each)
	for range receivers {
		receiving.Go(func() {
			var mine []item
			for {
				select {
				case v := <-b.C:
					b.Refill()
					mine = append(mine, v)
					total.Done()
				case <-done:
					got <- mine
					return
				}
			}
		})
	}
	sending.Wait()
	total.Wait()
	close(done)
	receiving.Wait()
	seen := map[item]bool{}
	for range receivers {
		last := [senders]int{-1, -1, -1, -1}
		for _, v := range <-got {
			require.False(t, seen[v])
			seen[v] = true
			require.Less(t, last[v.sender], v.n, "in order")
			last[v.sender] = v.n
		}
	}
	assert.Len(t, seen, senders*each)
	assert.Empty(t, b.Rest)
}

func TestBacklogTakesAnyNumber(t *testing.T) {
	b := NewBacklog[int](2)
	for i := range 1000 {
		b.Put(i)
	}
	for i := range 1000 {
		assert.Equal(t, i, <-b.C)
		b.Refill()
	}
	assert.Empty(t, b.C)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		b.Put(1)
		<-b.C
		b.Refill()
	}))
}
