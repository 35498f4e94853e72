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
	least, extra := partitions/len(workers), partitions%len(workers)
	// If shares can't be equal, some workers have one partition more: first those that have it
	// already.
	var rich []string
	for _, w := range workers {
		if len(kept[w]) > least {
			rich = append(rich, w)
		}
	}
	slices.SortFunc(rich, func(a, b string) int { return cmp.Compare(score(b, -1), score(a, -1)) })
	for _, w := range rich {
		all, share := kept[w], least
		if extra > 0 {
			extra--
			share++
		}
		slices.SortFunc(all, func(a, b int) int { return cmp.Compare(score(w, b), score(w, a)) })
		for _, p := range all[share:] {
			owners[p] = ""
		}
		kept[w] = all[:share]
	}
	for p := range owners {
		if owners[p] != "" {
			continue
		}
		best := ""
		for _, w := range workers {
			room := len(kept[w]) < least || len(kept[w]) == least && extra > 0
			if room && (best == "" || score(w, p) > score(best, p)) {
				best = w
			}
		}
		if len(kept[best]) == least {
			extra--
		}
		owners[p], kept[best] = best, append(kept[best], p)
	}
	return owners
}

// standbys is how many workers are in line for a partition in addition to its owner.
const standbys = 2

// lines returns for which partitions a worker is to be in line: those that belong to it, and those
// for which it is among the standbys, which have the highest scores of all but the owner. So when
// the owner is lost, one that is in line is likely to be the next owner.
func lines(owners []string, has map[string][]int, self string) []bool {
	in := make([]bool, len(owners))
	for p, owner := range owners {
		before := 0
		for w := range has {
			if w != owner && w != self && score(w, p) > score(self, p) {
				before++
			}
		}
		in[p] = owner == self || before < standbys
	}
	return in
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
