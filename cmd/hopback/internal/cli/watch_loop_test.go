package cli

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// A time limit ends a watch without an error, as ^C does, unless nothing was complete by then. An error
// alone ends it only if it is the first.
func TestHowAWatchEnds(t *testing.T) {
	t.Parallel()
	broken := errors.New("no broker")
	for name, tt := range map[string]struct {
		take   func(ctx context.Context, n int) snapshot
		want   error
		blocks int
	}{
		"at the limit": {func(context.Context, int) snapshot { return snapshot{value: 1} }, nil, 5},
		"first fails":  {func(context.Context, int) snapshot { return snapshot{err: broken} }, broken, 0},
		"later fails": {func(_ context.Context, n int) snapshot {
			if n == 1 {
				return snapshot{value: 1}
			}
			return snapshot{err: broken}
		}, nil, 5},
		"first is incomplete": {func(ctx context.Context, _ int) snapshot {
			<-ctx.Done()
			return snapshot{value: 1, err: broken}
		}, broken, 1},
		"later is incomplete": {func(ctx context.Context, n int) snapshot {
			if n > 1 {
				<-ctx.Done()
			}
			return snapshot{value: 1, err: ctx.Err()}
		}, nil, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			var stdout bytes.Buffer
			c := &command{stdout: printer{w: &stdout}}
			ctx, cancel := context.WithTimeout(t.Context(), 9*time.Second)
			defer cancel()
			n := 0
			err := c.watch(ctx, 2*time.Second, func(ctx context.Context) snapshot {
				n++
				s := tt.take(ctx, n)
				s.text = func(b *strings.Builder) { b.WriteString("text\n") }
				return s
			})
			assert.Equal(t, tt.want, err, name)
			assert.Equal(t, tt.blocks, strings.Count(stdout.String(), "Z\n"), "%s:\n%s", name, &stdout)
		})
	}
}
