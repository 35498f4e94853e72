package hopbacktest_test

import (
	"context"
	"flag"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

var thousand = flag.Int("messages", 1000, "of TestAThousandMessagesWaitForHoursInNoTime, for each strategy")

// sockets is the number of open sockets of the process, -1 where that can't be found out.
func sockets() int {
	all, err := filepath.Glob("/proc/self/fd/*")
	if runtime.GOOS != "linux" || err != nil {
		return -1
	}
	n := 0
	for _, fd := range all {
		if to, err := os.Readlink(fd); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

func TestSocketsAreCounted(t *testing.T) {
	before := sockets()
	if before < 0 {
		t.Skip("the sockets of a process are counted on Linux only")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	assert.Equal(t, before+1, sockets())
	require.NoError(t, l.Close())
	assert.Equal(t, before, sockets())
}

// A thousand messages wait for hours with each strategy, in less than a second. Each has
// exactly its fate, and neither a socket is made nor a goroutine left.
func TestAThousandMessagesWaitForHoursInNoTime(t *testing.T) {
	delays := []time.Duration{10 * time.Minute, 3 * time.Hour, 24 * time.Hour}
	whole := delays[0] + delays[1] + delays[2]
	// What a message is to be is its number's last digit.
	handler := client.JSON(func(ctx context.Context, n int) error {
		attempt := retry.Attempt(ctx)
		switch n % 10 {
		case 0:
			return nil
		case 1:
			return retry.Permanent(errDeclined)
		case 2:
			return retry.Discard(errDeclined)
		case 3:
			return errDeclined
		case 4:
			if attempt == 2 {
				panic("at the disco")
			}
		case 5:
			if attempt == 1 {
				return retry.After(delays[1], errDeclined)
			}
			return nil
		}
		if attempt <= len(delays) {
			return errDeclined
		}
		return nil
	})
	messages := make([]any, *thousand)
	for i := range messages {
		messages[i] = i
	}
	withEach(t, func(t *testing.T, version string, s retry.Strategy) {
		running, open := goleak.IgnoreCurrent(), sockets()
		var attempts, opened atomic.Int64
		peeking := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			if attempts.Add(1)%500 == 0 {
				opened.Add(int64(sockets() - open))
			}
			return handler.Handle(ctx, d)
		})
		began := time.Now()
		r := hopbacktest.Scenario{
			Policy:  retry.Policy{MaxRetries: len(delays), Backoff: retry.Delays(delays...), Strategy: s},
			Handler: peeking, Messages: messages, Broker: hopbacktest.Config{Version: version},
		}.Run(t)
		t.Logf("REPORT %s %s: %d messages, %d attempts, %v of virtual time in %v", version, s, *thousand, attempts.Load(), r.Elapsed, time.Since(began))
		goleak.VerifyNone(t, running)
		assert.Zero(t, opened.Load(), "a socket was open while messages were handled")
		assert.Equal(t, open, sockets())

		assert.InDelta(t, whole.Hours(), r.Elapsed.Hours(), 0.01*whole.Hours())
		for i := range messages {
			o := r.Message(i)
			switch i % 10 {
			case 0:
				o.WantHandled().WantAttempts(1).WantDelays()
			case 1:
				o.WantDead(retry.ReasonPermanent).WantAttempts(1)
			case 2:
				o.WantFate("discarded").WantAttempts(1)
			case 3:
				o.WantDead(retry.ReasonExhausted).WantAttempts(4).WantDelays(delays...)
			case 4:
				o.WantDead(client.ReasonPanicked).WantAttempts(2).WantDelays(delays[0])
			case 5:
				o.WantHandled().WantAttempts(2).WantDelays(delays[1])
			default:
				o.WantHandled().WantAttempts(4).WantDelays(delays...)
			}
			assert.Zero(t, o.Duplicates, "message %d", i)
		}
	})
}
