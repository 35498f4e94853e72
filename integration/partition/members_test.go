package partition_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/partition"
)

// shares counts what each of some workers has.
type shares struct {
	mu  sync.Mutex
	has map[string]int
}

func (s *shares) join(t *testing.T, on *suite.Site, g partition.Group, name string) (leave func()) {
	t.Helper()
	return consuming(t, on, g, &seen{}, partition.Config{Worker: name, OnAssigned: func(_ int, owned bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if owned {
			s.has[name]++
		} else {
			s.has[name]--
		}
	}})
}

func (s *shares) are(want ...int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []int
	for _, n := range s.has {
		all = append(all, n)
	}
	slices.Sort(all)
	return slices.Equal(want, all)
}

// The exchange for the workers' beats is deleted while they run, and with it the bindings of their
// queues, and declared again. They hear each other again, and workers that join get their share.
func TestWorkersHearEachOtherAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		const members = "hearing.1.members"
		g := partition.Group{Name: "hearing", Partitions: 8}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
		all := &shares{has: map[string]int{}}
		var leave []func()
		join := func() { leave = append(leave, all.join(t, s, g, fmt.Sprint("w", len(leave)))) }
		join()
		join()
		suite.Poll(t, "two workers have 4 each", func() bool { return all.are(4, 4) })
		require.NoError(t, declare.DeleteExchange(t.Context(), conn.Management(), members))
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
		join()
		join()
		suite.Poll(t, "four workers have 2 each", func() bool { return all.are(2, 2, 2, 2) })
		for _, l := range leave {
			l()
		}
		assert.True(t, all.are(0, 0, 0, 0), "%v", all.has)
	})
}
