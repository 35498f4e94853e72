package desk_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// history is the content of a queue: the number of each message, which is its body, and everything
// else about it except how often it was returned.
type history struct {
	order []string
	whole map[string][sha256.Size]byte
}

// returnCounts are what changes when a message is returned, in a line of an export.
var returnCounts = regexp.MustCompile(`"delivery-count":\{[^}]*\},?|,?\[\{"symbol":"x-(acquired|delivery)-count"\},[^\]]*\]`)

// historyOf reads a queue by an export.
func historyOf(t *testing.T, d *desk.Desk, queue string) history {
	t.Helper()
	f := tempFile(t, "story")
	_, err := d.Export(t.Context(), f, desk.ExportConfig{Queue: queue})
	require.NoError(t, err)
	_, err = f.Seek(0, io.SeekStart)
	require.NoError(t, err)
	s := history{whole: map[string][sha256.Size]byte{}}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Body []struct {
				Text string `json:"text"`
			} `json:"body"`
			Encoding []byte `json:"encoding"`
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &line))
		require.Len(t, line.Body, 1)
		// Every value with its type, and what the sender wrote byte for byte.
		same, encoded, _ := bytes.Cut(returnCounts.ReplaceAll(lines.Bytes(), nil), []byte(`,"encoding":"`))
		require.NotEmpty(t, encoded)
		bare := bytes.Index(line.Encoding, []byte{0, 0x53, 0x73})
		require.Positive(t, bare, "where the properties begin")
		number := line.Body[0].Text
		s.order = append(s.order, number)
		s.whole[number] = sha256.Sum256(append(same, line.Encoding[bare:]...))
	}
	require.NoError(t, lines.Err())
	require.Len(t, s.whole, len(s.order), "each once")
	return s
}

// without leaves messages out.
func (s history) without(out func(number string) bool) history {
	kept := history{whole: map[string][sha256.Size]byte{}}
	for _, number := range s.order {
		if !out(number) {
			kept.order = append(kept.order, number)
			kept.whole[number] = s.whole[number]
		}
	}
	return kept
}

// One lane among four is replayed, while the process is killed and the connection is cut.
// None is lost, and each is handled once or more, and starts over. The other lanes are as
// they were: the same messages bit for bit, except how often they were returned, in the
// same order.
func TestReplayOfALaneSurvivesKillsAndCuts(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		n, kills, cuts := suite.Sized(1000, 100_000), suite.Sized(3, 10), suite.Sized(6, 20)
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 2, GiveUpAfter: time.Hour, Backoff: retry.Exponential(time.Second, 2)}
		deadLetterQueue(t, conn, policy, n)
		d := suite.NewDesk(t, s, conn)
		permanent := func(number string) bool {
			i, err := strconv.Atoi(number)
			require.NoError(t, err)
			return lanes[i%4] == retry.ReasonPermanent
		}
		before := historyOf(t, d, "orders.dead")
		require.Len(t, before.order, n)
		h := newHandled()
		var old atomic.Int64 // messages that don't start over
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			if m := d.Message(); retry.Count(m) != 0 || !retry.DeadLetterOf(m).FirstFailure.IsZero() {
				old.Add(1)
			}
			return h.Handle(ctx, d)
		})), client.ConsumerConfig{Concurrency: 8, Prefetch: 200})

		through, err := proxy.New(s.Host())
		require.NoError(t, err)
		defer through.Close()
		bin, err := suite.Command()
		require.NoError(t, err)
		replay := func() *exec.Cmd {
			c := exec.CommandContext(t.Context(), bin, "dead", "replay", "orders.dead", "--reason", "permanent", "--replay-id", "r1", "--accept", "waiting-messages", "--rate", strconv.Itoa(suite.Sized(200, 2000)))
			c.Env = append(os.Environ(), "HOPBACK_URL="+s.AMQPURLWith(func(u *url.URL) { u.Host = through.Addr() }), "HOPBACK_MANAGEMENT_URL=none")
			return c
		}
		handledMore := func(by int) bool {
			before, _ := h.counts()
			goal := min(before+by, n/4)
			for began := time.Now(); time.Since(began) < suite.Patience; time.Sleep(5 * time.Millisecond) {
				if now, _ := h.counts(); now >= goal {
					return now < n/4
				}
			}
			return false
		}
		killed, cut, began := 0, 0, time.Now()
		// The last kill comes when at most nine tenths are handled. One that hits a process while it
		// returns the other lanes can change their order for good: see "Lost connections" in desk's docs.
		step := n / 4 * 6 / 10 / (kills * (cuts/kills + 1))
		for killed < kills {
			c := replay()
			require.NoError(t, c.Start())
			for range cuts/kills + 1 {
				if handledMore(step/2+rand.IntN(step)) && cut < cuts {
					through.Cut()
					cut++
				}
			}
			require.NoError(t, c.Process.Kill())
			_ = c.Wait()
			killed++
		}
		// What a killed process held can be returned behind the end of the next replay. It is
		// in the dead-letter queue then, and the replay after that finds it.
		for left, tries := n, 0; left > 0; tries++ {
			require.Less(t, tries, 5, "%d of the lane are missing", left)
			out, err := replay().CombinedOutput()
			require.NoError(t, err, "%s", out)
			for began := time.Now(); left > 0 && time.Since(began) < suite.Patience/4; time.Sleep(5 * time.Millisecond) {
				got, _ := h.counts()
				left = n/4 - got
			}
		}
		distinct, twice := h.counts()
		assert.Equal(t, n/4, distinct)
		assert.Zero(t, old.Load(), "each starts over")
		for body := range h.seen {
			i, _ := strconv.Atoi(body)
			assert.Equal(t, retry.ReasonPermanent, lanes[i%4])
		}
		suite.Poll(t, "the other lanes are there", func() bool { return suite.Ready(t, conn, "orders.dead") == n*3/4 })
		want, got := before.without(permanent), historyOf(t, d, "orders.dead")
		for tries := 0; tries < 3 && !slices.Equal(want.order, got.order); tries++ { // returned late: the next replay restores the order
			out, err := replay().CombinedOutput()
			require.NoError(t, err, "%s", out)
			got = historyOf(t, d, "orders.dead")
		}
		inOrder(t, want.order, got.order)
		assert.True(t, maps.Equal(want.whole, got.whole), "bit for bit")
		inOrder(t, want.order, bodies(s.Peer(t).Take("orders.dead", n*3/4)))
		suite.Report(t, s, "%d dead, %d kills, %d cuts: none lost, %d replayed and handled, %d more than once; the other lanes unchanged and in order, %v", n, killed, cut, distinct, twice, time.Since(began).Round(time.Second))
	})
}

// A replay that is stopped at any moment loses nothing: what is dead and what is back are
// all that there were.
func TestReplayIsStoppedAtAnyMoment(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		n, stops := suite.Sized(600, 4000), suite.Sized(8, 100)
		conn, _ := s.Connect(t)
		d := suite.NewDesk(t, s, conn)
		for _, way := range []string{"copied", "moved"} {
			deadLetterQueue(t, conn, retry.Policy{ReplayByMove: true}, n)
			stopped, unknown := 0, uint64(0)
			cfg := desk.ReplayConfig{Queue: "orders.dead", All: true, ID: "r1", Rate: float64(n), Copy: way == "copied"}
			for range stops {
				ctx, stop := context.WithCancelCause(t.Context())
				enough := errors.New("enough")
				timer := time.AfterFunc(time.Duration(rand.IntN(150))*time.Millisecond, func() { stop(enough) })
				r, err := d.Replay(ctx, cfg)
				timer.Stop()
				stop(nil)
				if err != nil {
					require.ErrorIs(t, err, enough)
					stopped++
				}
				assert.True(t, r.Replayed == 0 || (r.Moved == r.Replayed) == (way == "moved"), "%+v", r)
				unknown += r.Unknown
				suite.Poll(t, "dead + replayed = all", func() bool {
					sum := suite.Ready(t, conn, "orders.dead") + suite.Ready(t, conn, "orders")
					return sum >= n && sum <= n+int(unknown)
				})
			}
			cfg.Rate = 0
			_, err := d.Replay(t.Context(), cfg)
			require.NoError(t, err)
			suite.Poll(t, "all are back", func() bool { return suite.Ready(t, conn, "orders.dead") == 0 && suite.Ready(t, conn, "orders") >= n })
			got := bodies(s.Peer(t).Take("orders", suite.Ready(t, conn, "orders")))
			slices.Sort(got)
			assert.Len(t, slices.Compact(slices.Clone(got)), n)
			if way == "moved" {
				assert.Len(t, got, n, "none twice")
			}
			suite.Report(t, s, "%s: %d stops, %d during the replay; %d of %d twice", way, stops, stopped, len(got)-n, n)
		}
	})
}

// A survey and a list of a large queue need little memory, and leave the queue unchanged.
// Each runs in a separate process, which is measured.
func TestLookingAtManyMessagesInBoundedMemory(t *testing.T) {
	if !suite.Long() {
		t.Log("with 20,000; HOPBACK_LONG takes 1,000,000")
	}
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		n := suite.Sized(20_000, 1_000_000)
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("orders.dead")))
		const part = 20_000
		began := time.Now()
		for range n / part {
			suite.Load(t, conn, "orders.dead", part, func(i int, m *client.Message) {
				m.Annotations = map[any]any{client.AnnotationError: "order " + strconv.Itoa(i) + " refused", "x-last-death-reason": "rejected", annotation.Queue: "orders"}
				m.Data = [][]byte{make([]byte, 20)}
			})
		}
		suite.Report(t, s, "%d messages published in %v", n, time.Since(began).Round(time.Second))
		bin, err := suite.Command()
		require.NoError(t, err)
		memory := func() (broker, queue int) {
			var nodes []struct {
				Used int `json:"mem_used"`
			}
			s.HTTP(t, "GET", "/nodes", nil, &nodes)
			require.NotEmpty(t, nodes)
			var q struct {
				Memory int `json:"memory"`
			}
			s.HTTP(t, "GET", "/queues/"+s.VHost+"/orders.dead", nil, &q)
			return nodes[0].Used >> 20, q.Memory >> 20
		}
		peek := func(reply any, args ...string) {
			node, queue := memory()
			var out, errs bytes.Buffer
			c := exec.CommandContext(t.Context(), bin, append([]string{"dead"}, append(args, "--accept", "waiting-messages", "--json")...)...)
			c.Env = append(os.Environ(), "HOPBACK_URL="+s.AMQPURL(), "HOPBACK_MANAGEMENT_URL=none")
			c.Stdout, c.Stderr = &out, &errs
			began := time.Now()
			require.NoError(t, c.Start())
			peak := peakOf(c.Process.Pid)
			require.NoError(t, c.Wait(), "%s", &errs)
			took := time.Since(began)
			most := <-peak
			require.NoError(t, json.Unmarshal(out.Bytes(), reply))
			cpu := c.ProcessState.SystemTime() + c.ProcessState.UserTime()
			suite.Poll(t, "all are there", func() bool { return suite.Ready(t, conn, "orders.dead") == n })
			nodeAfter, queueAfter := memory()
			require.NotZero(t, most)
			assert.Less(t, most, 128, "MiB of the process")
			suite.Report(t, s, "%s of %d: %v (%.0f a second), %.1f s of CPU (%.1f us a message), %d MiB at most; broker's memory %d MiB before, %d after, of the queue's process %d and %d", args[0], n,
				took.Round(10*time.Millisecond), float64(n)/took.Seconds(), cpu.Seconds(), cpu.Seconds()*1e6/float64(n), most, node, nodeAfter, queue, queueAfter)
		}
		var survey desk.Survey
		peek(&survey, "survey", "orders.dead")
		require.Empty(t, survey.Queues[0].Unread)
		assert.EqualValues(t, n, survey.Queues[0].Seen)
		require.Len(t, survey.Groups, 1)
		assert.EqualValues(t, n, survey.Groups[0].Count)
		var list desk.List
		peek(&list, "list", "orders.dead", "--count", "--skip", strconv.Itoa(n/2))
		assert.EqualValues(t, n, list.Matched)
		assert.Len(t, list.Messages, 50)
	})
}

// peakOf tells how many MiB of memory a process has had at most, once it has ended. What
// the kernel reports about a process that has ended won't do: it begins with the memory of the
// process that has started it.
func peakOf(pid int) <-chan int {
	peak := make(chan int, 1)
	go func() {
		most := 0
		for {
			status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
			_, after, found := strings.Cut(string(status), "VmHWM:")
			if err != nil || !found { // it has ended
				peak <- most
				return
			}
			var kib int
			if _, err := fmt.Sscan(after, &kib); err == nil {
				most = max(most, kib>>10)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	return peak
}
