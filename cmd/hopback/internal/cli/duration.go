package cli

import (
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/spf13/pflag"
)

// duration is the value of a flag that also has the units d, for 24 hours, and w, for 7 days.
type duration time.Duration

// durationVar defines a flag for a duration; p may be nil.
func durationVar(f *pflag.FlagSet, p *time.Duration, name string, value time.Duration, usage string) {
	if p == nil {
		p = new(time.Duration)
	}
	*p = value
	f.Var((*duration)(p), name, usage)
}

// Type lets pflag's GetDuration accept the flag.
func (d *duration) Type() string { return "duration" }

func (d *duration) String() string {
	if *d == 0 {
		return "0" // which the help doesn't show as a default
	}
	return time.Duration(*d).String()
}

func (d *duration) Set(text string) error {
	parsed, err := parseDuration(text)
	if err == nil {
		*d = duration(parsed)
	}
	return err
}

var longUnit = regexp.MustCompile(`(\d+(?:\.\d*)?|\.\d+)([dw])`)

func parseDuration(text string) (time.Duration, error) {
	inHours := longUnit.ReplaceAllStringFunc(text, func(part string) string {
		n, err := strconv.ParseFloat(part[:len(part)-1], 64)
		if err != nil {
			return part
		}
		hours := map[byte]float64{'d': 24, 'w': 7 * 24}[part[len(part)-1]]
		return strconv.FormatFloat(n*hours, 'f', -1, 64) + "h"
	})
	d, err := time.ParseDuration(inHours)
	if err != nil {
		return 0, fmt.Errorf("%.80q isn't a duration, or is too long; write it as 90s, 1h30m, 7d, or 2w", text)
	}
	return d, nil
}
