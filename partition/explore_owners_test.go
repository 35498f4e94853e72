package partition

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/explore"
)

// assigning is assign, or one with a planted fault.
type assigning func(partitions int, has map[string][]int) []string

// claims is a small world in which all workers have the same view: any claims to partitions, and then
// workers that give up and take partitions one by one, in any order.
type claims struct {
	partitions, workers int
	assign              assigning
}

func (c claims) run(r *explore.Run) error {
	has := map[string][]int{}
	for w := range c.workers {
		has[fmt.Sprint("w", w)] = nil
	}
	names := slices.Sorted(maps.Keys(has))
	double := false
	for p := range c.partitions {
		claimed := r.Pick(1 << c.workers)
		for i, w := range names {
			if claimed>>i&1 == 1 {
				has[w] = append(has[w], p)
			}
		}
		double = double || claimed&(claimed-1) != 0
	}
	r.Say("%v", has)
	owners := c.assign(c.partitions, has)
	shares := map[string]int{}
	for p, w := range owners {
		if _, ok := has[w]; !ok {
			return fmt.Errorf("partition %d belongs to %q", p, w)
		}
		shares[w]++
	}
	least, most, moved, necessary := c.partitions, 0, 0, 0
	for _, w := range names {
		least, most = min(least, shares[w]), max(most, shares[w])
		// What a worker has beyond its share has to move; one may have one more than another.
		necessary += max(0, len(has[w])-(c.partitions+c.workers-1)/c.workers)
		for _, p := range has[w] {
			if owners[p] != w {
				moved++
			}
		}
	}
	if most-least > 1 {
		return fmt.Errorf("%v isn't balanced", owners)
	}
	if !double && moved > necessary+c.partitions%c.workers {
		return fmt.Errorf("%v of %v moves %d, and %d would do", owners, has, moved, necessary)
	}
	for !double {
		if r.Seen(func() string { return fmt.Sprint(has) }) {
			return nil
		}
		var can []func()
		for _, w := range names {
			for p := range c.partitions {
				have := slices.Contains(has[w], p)
				free := !slices.ContainsFunc(names, func(w string) bool { return slices.Contains(has[w], p) })
				switch {
				case have && owners[p] != w:
					can = append(can, func() {
						has[w] = slices.DeleteFunc(slices.Clone(has[w]), func(q int) bool { return q == p })
					})
				case free && owners[p] == w:
					can = append(can, func() { has[w] = append(slices.Clone(has[w]), p); slices.Sort(has[w]) })
				}
			}
		}
		if len(can) == 0 {
			return nil
		}
		can[r.Pick(len(can))]()
		if now := c.assign(c.partitions, has); !slices.Equal(owners, now) {
			return fmt.Errorf("%v, and %v while partitions move: %v", owners, now, has)
		}
	}
	return nil
}

func TestExploreAssignments(t *testing.T) {
	t.Parallel()
	for _, size := range [][2]int{{1, 3}, {3, 2}, {4, 3}} {
		report, err := explore.All(2_000_000, claims{partitions: size[0], workers: size[1], assign: assign}.run)
		require.NoError(t, err)
		assert.True(t, report.Complete)
		t.Logf("REPORT explore assignments, %d partitions, %d workers: %s", size[0], size[1], report)
	}
}

// fewest gives what is free to the worker with the fewest partitions at the moment.
func fewest(partitions int, has map[string][]int) []string {
	owners, workers := make([]string, partitions), slices.Sorted(maps.Keys(has))
	shares := map[string]int{}
	for _, w := range workers {
		for _, p := range has[w] {
			owners[p] = w
			shares[w]++
		}
	}
	for p := range owners {
		w := slices.MinFunc(workers, func(a, b string) int { return cmp.Compare(shares[a], shares[b]) })
		if owners[p] == "" || shares[owners[p]] > shares[w]+1 {
			if owners[p] != "" {
				shares[owners[p]]--
			}
			owners[p] = w
			shares[w]++
		}
	}
	return owners
}

var wrongAssignments = map[string]assigning{
	"partitions are dealt out without regard to who has them": func(partitions int, has map[string][]int) []string {
		owners, workers := make([]string, partitions), slices.Sorted(maps.Keys(has))
		for p := range owners {
			owners[p] = workers[p%len(workers)]
		}
		return owners
	},
	"what is free goes to who has the fewest": fewest,
	"workers keep all that they have": func(partitions int, has map[string][]int) []string {
		owners := assign(partitions, has)
		for w, all := range has {
			for _, p := range all {
				owners[p] = w
			}
		}
		return owners
	},
}

func TestExploreAssignmentsFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	for name, wrong := range wrongAssignments {
		_, err := explore.All(100_000, claims{partitions: 4, workers: 3, assign: wrong}.run)
		require.Error(t, err, name)
		t.Log(name, err)
	}
}

// owning is a small world in which each worker knows of the others by beats, which arrive in any order. A worker takes a partition that it believes to be its own when the broker makes it the
// active consumer, which it does only if no other one is. Workers join late, and one crashes.
type owning struct {
	partitions, workers, crashes, leaves int
	hear                                 func(*members, beat, time.Time) bool // nil: as the product does
	exclusive                            bool                                 // the broker has one active consumer; otherwise the fault is planted
}

type owner struct {
	beat
	owns    []int
	alive   bool
	leaving bool
	members members
	coming  map[int][]beat // by sender
}

func (o owning) run(r *explore.Run) error {
	now := time.Unix(1_000_000, 0)
	hear := o.hear
	if hear == nil {
		hear = (*members).hear
	}
	var all []*owner
	for i := range o.workers {
		all = append(all, &owner{
			beat: beat{Worker: fmt.Sprint("w", i), Born: 1}, alive: true, coming: map[int][]beat{},
			members: members{partitions: o.partitions, all: map[string]*member{}},
		})
	}
	send := func(i int) {
		w := all[i]
		w.N++
		b := w.beat
		b.Owns, b.Leave = slices.Clone(w.owns), w.leaving
		for j, other := range all {
			if j != i && other.alive {
				other.coming[i] = append(other.coming[i], b)
			}
		}
	}
	for i := range all {
		send(i)
	}
	crashes, leaves, moves := o.crashes, o.leaves, 0
	for {
		for p := range o.partitions {
			n := 0
			for _, w := range all {
				if w.alive && slices.Contains(w.owns, p) {
					n++
				}
			}
			if n > 1 {
				return fmt.Errorf("partition %d has %d workers", p, n)
			}
		}
		if moves > 4*o.partitions*o.workers {
			return fmt.Errorf("partitions have moved %d times", moves)
		}
		if r.Seen(func() string { return ownersState(all, crashes, leaves, moves) }) {
			return nil
		}
		var can []func()
		for i, w := range all {
			if !w.alive {
				continue
			}
			for j := range all {
				for n, b := range w.coming[j] {
					can = append(can, func() {
						r.Say("%s hears beat %d of %s: %v", w.Worker, b.N, all[j].Worker, b.Owns)
						hear(&w.members, b, now)
						w.coming[j] = slices.Delete(slices.Clone(w.coming[j]), n, n+1)
					})
				}
				if name := all[j].name(); len(w.coming[j]) == 0 && !all[j].alive && w.members.all[name] != nil && !w.members.all[name].left {
					can = append(can, func() {
						r.Say("%s misses %s", w.Worker, all[j].Worker)
						w.members.lose(lost{Worker: name, N: w.members.all[name].N}, now)
					})
				}
			}
			owners := assign(o.partitions, w.members.has(w.name(), w.owns, w.leaving))
			for p := range o.partitions {
				have := slices.Contains(w.owns, p)
				active := o.exclusive && slices.ContainsFunc(all, func(other *owner) bool { return other.alive && slices.Contains(other.owns, p) })
				switch {
				case have && owners[p] != w.name():
					can = append(can, func() {
						r.Say("%s gives up %d", w.Worker, p)
						w.owns = slices.DeleteFunc(w.owns, func(q int) bool { return q == p })
						send(i)
					})
				case !have && owners[p] == w.name() && !active: // it doesn't wait long for one that claims it and isn't active
					can = append(can, func() {
						r.Say("%s takes %d", w.Worker, p)
						w.owns = append(w.owns, p)
						slices.Sort(w.owns)
						moves++
						send(i)
					})
				}
			}
			if crashes > 0 {
				can = append(can, func() {
					r.Say("%s crashes", w.Worker)
					crashes--
					w.alive = false
				})
			}
			if leaves > 0 && !w.leaving {
				can = append(can, func() {
					r.Say("%s leaves", w.Worker)
					leaves--
					w.leaving = true
					send(i)
				})
			}
		}
		// What is only a fault doesn't have to happen: then the world is calm.
		if calm(all, can, crashes, leaves) {
			if err := o.final(all); err != nil {
				return err
			}
		}
		if len(can) == 0 {
			return nil
		}
		can[r.Pick(len(can))]()
	}
}

// calm reports whether nothing is left that can happen but for faults.
func calm(all []*owner, can []func(), crashes, leaves int) bool {
	faults := 0
	for _, w := range all {
		if w.alive && crashes > 0 {
			faults++
		}
		if w.alive && leaves > 0 && !w.leaving {
			faults++
		}
	}
	return len(can) == faults
}

// final is what holds when the world is calm: each partition has a worker, and shares are equal.
func (o owning) final(all []*owner) error {
	least, most, total, alive := o.partitions, 0, 0, 0
	for _, w := range all {
		if !w.alive || w.leaving {
			if w.alive && len(w.owns) > 0 {
				return fmt.Errorf("%s has left, and has %v", w.Worker, w.owns)
			}
			continue
		}
		least, most, total, alive = min(least, len(w.owns)), max(most, len(w.owns)), total+len(w.owns), alive+1
	}
	if alive > 0 && (total != o.partitions || most-least > 1) {
		var shares []string
		for _, w := range all {
			shares = append(shares, fmt.Sprint(w.Worker, w.alive, w.owns))
		}
		return fmt.Errorf("%d of %d partitions have a worker: %v", total, o.partitions, shares)
	}
	return nil
}

func ownersState(all []*owner, crashes, leaves, moves int) string {
	s := fmt.Sprint(crashes, leaves, moves)
	for _, w := range all {
		s += fmt.Sprint("|", w.alive, w.leaving, w.owns, w.N)
		for _, name := range slices.Sorted(maps.Keys(w.members.all)) {
			m := w.members.all[name]
			s += fmt.Sprint(";", name, m.N, m.Owns, m.left)
		}
		for j := range all {
			for _, b := range w.coming[j] {
				s += fmt.Sprint(">", j, b.N)
			}
		}
	}
	return s
}

func TestExploreOwners(t *testing.T) {
	t.Parallel()
	if explore.UnderRace {
		t.Skip("one goroutine explores, in which the race detector finds nothing")
	}
	worlds := map[string]owning{
		"two workers, two partitions, a crash":            {partitions: 2, workers: 2, crashes: 1},
		"two workers, one partition, a crash and a leave": {partitions: 1, workers: 2, crashes: 1, leaves: 1},
		"three workers, one partition":                    {partitions: 1, workers: 3},
	}
	if explore.Full() {
		worlds = map[string]owning{
			"two workers, two partitions, a crash and a leave": {partitions: 2, workers: 2, crashes: 1, leaves: 1},
			"three workers, one partition, a crash":            {partitions: 1, workers: 3, crashes: 1},
			"three workers, two partitions":                    {partitions: 2, workers: 3},
		}
	}
	for name, o := range worlds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.exclusive = true
			report, err := explore.All(5_000_000, o.run)
			require.NoError(t, err)
			assert.True(t, report.Complete)
			t.Logf("REPORT explore owners, %s: %s", name, report)
		})
	}
}

func TestExploreOwnersFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]owning{
		"two consumers of a queue are active": {partitions: 2, workers: 2},
		"an older beat counts": {partitions: 2, workers: 2, exclusive: true, hear: func(m *members, b beat, now time.Time) bool {
			if was := m.all[b.name()]; was != nil {
				was.N = 0
			}
			return m.hear(b, now)
		}},
		"a worker that leaves keeps its share": {partitions: 2, workers: 2, leaves: 1, exclusive: true, hear: func(m *members, b beat, now time.Time) bool {
			b.Leave = false
			return m.hear(b, now)
		}},
		"a beat without partitions is ignored": {partitions: 2, workers: 2, exclusive: true, hear: func(m *members, b beat, now time.Time) bool {
			return len(b.Owns) > 0 && m.hear(b, now)
		}},
	} {
		_, err := explore.All(1_000_000, o.run)
		require.Error(t, err, name)
		t.Log(name, err)
	}
}
