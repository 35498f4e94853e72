package partition

import (
	"cmp"
	"slices"
)

// assign returns which worker each partition belongs to; "" if there are no workers. It is a pure
// function of what each worker has, so that all workers with the same view come to the same result:
//
//   - Shares differ by at most one.
//   - A worker keeps what it has, up to its share. So a worker that joins or leaves moves only what
//     has to move.
//   - Which ones it gives up, and who gets what is free, follows from a hash of worker and
//     partition (rendezvous hashing, with the share as the bound).
//
// While partitions move one by one, the result stays the same.
func assign(partitions int, has map[string][]int) []string {
	owners := make([]string, partitions)
	if len(has) == 0 {
		return owners
	}
	workers := make([]string, 0, len(has))
	for w := range has {
		workers = append(workers, w)
	}
	slices.Sort(workers)
	for _, w := range workers {
		for _, p := range has[w] {
			// Two that claim one: one of them knows more than we do.
			if p >= 0 && p < partitions && (owners[p] == "" || score(w, p) > score(owners[p], p)) {
				owners[p] = w
			}
		}
	}
	kept := make(map[string][]int, len(has))
	for p, w := range owners {
		if w != "" {
			kept[w] = append(kept[w], p)
		}
	}
	shares := shares(partitions, workers, kept)
	for w, all := range kept {
		if len(all) <= shares[w] {
			continue
		}
		slices.SortFunc(all, func(a, b int) int { return cmp.Compare(score(w, b), score(w, a)) })
		for _, p := range all[shares[w]:] {
			owners[p] = ""
		}
		kept[w] = all[:shares[w]]
	}
	room := make(map[string]int, len(workers))
	for _, w := range workers {
		room[w] = shares[w] - len(kept[w])
	}
	for p := range owners {
		if owners[p] != "" {
			continue
		}
		best := ""
		for _, w := range workers {
			if room[w] > 0 && (best == "" || score(w, p) > score(best, p)) {
				best = w
			}
		}
		owners[p] = best
		room[best]--
	}
	return owners
}

// shares is how many partitions each worker is to have. If they can't be equal, some get one more:
// first those that have it already. That doesn't change while the others take theirs.
func shares(partitions int, workers []string, kept map[string][]int) map[string]int {
	least := partitions / len(workers)
	more := func(w string) int {
		if len(kept[w]) > least {
			return 1
		}
		return 0
	}
	first := slices.Clone(workers)
	slices.SortStableFunc(first, func(a, b string) int {
		return cmp.Or(cmp.Compare(more(b), more(a)), cmp.Compare(score(b, -1), score(a, -1)))
	})
	all := make(map[string]int, len(workers))
	for i, w := range first {
		all[w] = least
		if i < partitions%len(workers) {
			all[w]++
		}
	}
	return all
}

// score is the weight of a worker for a partition: FNV-1a, mixed so that all of its bits depend
// on all of the name's.
func score(worker string, partition int) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(worker) {
		h = (h ^ uint64(worker[i])) * 1099511628211
	}
	h ^= uint64(partition+1) * 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
