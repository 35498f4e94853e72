package argument

import (
	"slices"
	"strings"
	"unicode"
)

// longestWord is how many bytes a word may have to be compared with others.
const longestWord = 255

// Nearest returns the element of known that got was probably meant to be, or "" if there is
// none. Use it to suggest a word in a remedy.
func Nearest(got string, known []string) string {
	want := folded(got)
	if want == "" || len(got) > longestWord {
		return ""
	}
	best, least := "", 2+len(want)/4
	for _, k := range known {
		f := folded(k)
		if f == want {
			return k
		}
		if len(k) > longestWord {
			continue
		}
		if d := edits(want, f); d < least {
			best, least = k, d
		}
	}
	if best != "" {
		return best
	}
	i := slices.IndexFunc(known, func(k string) bool { return slices.Contains(strings.Split(k, "-"), strings.ToLower(got)) })
	if i >= 0 {
		return known[i]
	}
	return ""
}

// folded returns a word without differences that people overlook: case, dashes, underscores, and
// the "x-" of RabbitMQ's arguments.
func folded(s string) string {
	s = strings.TrimPrefix(strings.ToLower(s), "x-")
	return strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune(".*#/", r) {
			return r
		}
		return -1
	}, s)
}

// edits counts how many letters must be changed, added, removed, or swapped with a neighbor to
// turn a into b.
func edits(a, b string) int {
	x, y := []rune(a), []rune(b)
	rows := make([][]int, len(x)+1)
	for i := range rows {
		rows[i] = make([]int, len(y)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(x); i++ {
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			d := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				d = min(d, rows[i-2][j-2]+1)
			}
			rows[i][j] = d
		}
	}
	return rows[len(x)][len(y)]
}
