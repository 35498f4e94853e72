package cli

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// On a terminal, progress is a line that is overwritten and removed. Elsewhere, a command that takes
// long writes lines, without control characters.
func TestProgressElsewhereThanOnATerminal(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		overwrites bool
		after      time.Duration
		want       string
	}{
		{true, 999 * time.Millisecond, ""},
		{true, 1100 * time.Millisecond, "\r\x1b[Kmoving (1s)\r\x1b[K"},
		{false, 29 * time.Second, ""},
		{false, 61 * time.Second, "moving (30s)\nmoving (1m0s)\n"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var stderr bytes.Buffer
			c := &command{stderr: printer{w: &lockedWriter{w: &stderr}}, overwrites: tt.overwrites}
			p := c.progress("moving")
			time.Sleep(tt.after)
			p.end()
			assert.Equal(t, tt.want, stderr.String())
		})
	}
}
