package stream_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/stream"
)

// A stream's consumer that is killed is the test binary itself: with the first variable
// set it consumes from the URL there, and saves in the directory of the second.
const (
	streamWorkerURL   = "HOPBACK_TEST_STREAM_WORKER"
	streamWorkerDir   = "HOPBACK_TEST_STREAM_DIR"
	streamWorkerEvery = "HOPBACK_TEST_STREAM_EVERY"
)

func init() {
	if url := os.Getenv(streamWorkerURL); url != "" {
		if err := streamWorker(url); err != nil {
			fmt.Println("failed", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// streamWorker consumes until its stdin ends, and says on stdout what it handles.
func streamWorker(url string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	conn, err := client.Connect(ctx, url, client.Config{})
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	every, _ := strconv.Atoi(os.Getenv(streamWorkerEvery))
	handler := client.JSON(func(ctx context.Context, n int) error {
		d, _ := client.DeliveryFrom(ctx)
		offset, _ := stream.OffsetOf(d)
		_, err := fmt.Println(offset, n)
		return err
	})
	return stream.Consume(ctx, conn, "log", handler, stream.Config{
		Consumer: "killed", Offsets: &stream.FileStore{Dir: os.Getenv(streamWorkerDir)}, SaveEvery: every, SaveInterval: 50 * time.Millisecond,
	})
}

// However often a consumer is killed, each message is handled. A life handles messages in
// order, and begins at most twice SaveEvery handled messages, and the one in the handler,
// before the end of the last.
func TestStreamConsumerIsKilled(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		messages, kills, every := 3000, 5, 100
		if suite.Long() {
			messages, kills, every = 200_000, 50, 500
		}
		conn, _ := s.Connect(t)
		suite.StreamOf(t, conn, "log", messages)
		dir := t.TempDir()
		store := &stream.FileStore{Dir: dir}
		began, next, again, worst := time.Now(), 0, 0, 0
		for life := 0; life <= kills; life++ {
			// The last life isn't killed, and drains.
			end := min(next+1+rand.IntN(2*max(messages-next, 1)/(kills-life+1)+1), messages)
			saved, _, err := store.Load(t.Context(), "killed", "log")
			require.NoError(t, err)
			if saved == uint64(messages) { // it had gone on to the end before it was dead
				break
			}
			first, last := streamLife(t, s, dir, every, end, life == kills, messages)
			if last < 0 {
				continue // it was killed before it handled one
			}
			if life > 0 {
				require.LessOrEqual(t, first, next, "left out")
				require.LessOrEqual(t, next-first, 2*every+1, "handled again")
				again += next - first
				worst = max(worst, next-first)
			}
			next = max(next, last+1)
			saved, _, err = store.Load(t.Context(), "killed", "log")
			require.NoError(t, err)
			require.LessOrEqual(t, saved, uint64(next), "the position is ahead of what was handled")
		}
		assert.Equal(t, messages, next)
		saved, _, err := store.Load(t.Context(), "killed", "log")
		require.NoError(t, err)
		assert.Equal(t, uint64(messages), saved)
		t.Logf("REPORT %s: %d messages, %d kills in %v: lost 0, out of order 0, handled again %d, at most %d behind a kill (bound %d)",
			t.Name(), messages, kills, time.Since(began).Round(time.Millisecond), again, worst, 2*every+1)
	})
}

// streamLife runs a worker, kills it once it has handled end messages of the stream, and
// returns the first and the last that it has handled; -1 if there is none.
func streamLife(t *testing.T, s *suite.Site, dir string, every, end int, drain bool, messages int) (first, last int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*suite.Patience)
	defer cancel()
	worker := exec.CommandContext(ctx, os.Args[0])
	worker.Env = append(os.Environ(), streamWorkerURL+"="+s.AMQPURL(), streamWorkerDir+"="+dir, streamWorkerEvery+"="+strconv.Itoa(every))
	worker.Stderr = os.Stderr
	stdin, err := worker.StdinPipe()
	require.NoError(t, err)
	stdout, err := worker.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, worker.Start())
	first, last = -1, -1
	killed := false
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		var offset, n int
		_, err := fmt.Sscanf(lines.Text(), "%d %d", &offset, &n)
		require.NoError(t, err, lines.Text())
		require.Equal(t, offset, n)
		if first < 0 {
			first = offset
		} else {
			require.Equal(t, last+1, offset, "out of order")
		}
		last = offset
		switch {
		case drain && offset == messages-1:
			_ = stdin.Close()
		case !drain && !killed && offset+1 >= end:
			killed = true
			require.NoError(t, worker.Process.Kill())
		}
	}
	err = worker.Wait()
	if drain {
		require.NoError(t, err)
	} else {
		require.ErrorContains(t, err, "killed")
	}
	return first, last
}
