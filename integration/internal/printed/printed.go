// Package printed compares what the documents' programs print with what the documents show.
package printed

import (
	"regexp"
	"strings"
)

// vary are the parts of a line that differ from run to run, and what stands for each. Any
// other difference fails the test.
var vary = []struct {
	part *regexp.Regexp
	same string
}{
	{regexp.MustCompile(`^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d `), "<time> "},
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?( ?(Z|[+-]\d\d:?\d\d|UTC([+-]\d+(:\d+)?)?))*( m=[+-][\d.]+)?`), "<time>"},
	{regexp.MustCompile(`\b[A-Z2-7]{26}\b`), "<message-id>"},
	{regexp.MustCompile(`\b(localhost|127\.0\.0\.1):\d+`), "<host>"},
	{regexp.MustCompile(`secret=[-_0-9A-Za-z]{43}$`), "secret=<secret>"},
	{regexp.MustCompile(`\(\d+\.\d\ds\)$`), "(<duration>)"},
	{regexp.MustCompile(` in=[\d.]+m?s$`), " in=<duration>"},
	{regexp.MustCompile(`^(ok  \t)\S+\t\d+\.\d+s$`), "$1<package>\t<duration>"},
}

// Alike returns lines without the parts that vary.
func Alike(text string) (same []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		for _, v := range vary {
			line = v.part.ReplaceAllString(line, v.same)
		}
		same = append(same, line)
	}
	return same
}
