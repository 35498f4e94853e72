package topologyfile

import (
	"fmt"
	"slices"
	"strings"

	"github.com/hopback/hopback/argument"
)

// hint is the remedy for an unknown word: the nearest known word, where else the word is known,
// or all known words.
func (r *reader) hint(got string, known []string) string {
	if len(r.errs) > maxErrors {
		return "" // nobody will see it
	}
	if best := argument.Nearest(got, known); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	for _, s := range sections {
		if slices.Contains(s.keys, got) {
			return "it belongs " + s.where
		}
	}
	for _, s := range sections {
		if best := argument.Nearest(got, s.keys); best != "" {
			return fmt.Sprintf("did you mean %q, which belongs %s?", best, s.where)
		}
	}
	return "known words: " + strings.Join(known, ", ")
}
