// Package differ compares the RabbitMQ in memory with real ones: random sequences of
// operations go to both, and what can be seen of them must agree.
package differ

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
)

var (
	operations = flag.Int("differ.operations", 2000, "operations with each version")
	seed       = flag.Uint64("differ.seed", 0, "the first seed; each sequence has the next")
	atOnce     = flag.Int("differ.parallel", 16, "sequences at once with each version")
	most       = flag.Int("differ.failures", 3, "differences to be shrunk before the end")
)

var brokers []*rabbitmq.Broker

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(func() int {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		var err error
		versions := suite.Versions()
		if !rabbitmq.MayStart() {
			versions = slices.DeleteFunc(versions, func(v string) bool { return !rabbitmq.Given(v) })
		}
		if len(versions) > 0 {
			brokers, err = rabbitmq.Need(ctx, os.Stderr, versions...)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		code := m.Run()
		http.DefaultClient.CloseIdleConnections()
		if err := goleak.Find(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		for _, b := range brokers {
			if err := b.Release(context.Background()); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
		}
		return code
	}())
}

// forEachVersion runs test with each real broker.
func forEachVersion(t *testing.T, test func(t *testing.T, v *versus)) {
	if len(brokers) == 0 {
		rabbitmq.NeedsStart(t)
	}
	for _, b := range brokers {
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			u, err := url.Parse(b.URL)
			require.NoError(t, err)
			v := &versus{
				version: suite.FullVersion(b.Version),
				dial:    func() (net.Conn, error) { return net.Dial("tcp", u.Host) },
			}
			for i := range 2 {
				name := fmt.Sprintf("differ-%s-%d", started, i)
				v.vhosts = append(v.vhosts, name)
				manage(t, b, http.MethodPut, "/vhosts/"+name)
				t.Cleanup(func() { manage(t, b, http.MethodDelete, "/vhosts/"+name) })
			}
			test(t, v)
		})
	}
}

func manage(t *testing.T, b *rabbitmq.Broker, method, path string) {
	req, err := http.NewRequest(method, b.ManagementURL+"/api"+path, http.NoBody)
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	u := req.URL.User
	req.URL.User = nil
	password, _ := u.Password()
	req.SetBasicAuth(u.Username(), password)
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	_ = res.Body.Close()
	require.Less(t, res.StatusCode, 300)
}

func TestRandomSequencesComeToTheSame(t *testing.T) {
	first := *seed
	forEachVersion(t, func(t *testing.T, v *versus) {
		begun := time.Now()
		var done, next, found, unsteady, repeated, unanswered, hangs atomic.Int64
		var wait sync.WaitGroup
		for range *atOnce {
			wait.Go(func() {
				for done.Load() < int64(*operations) && found.Load() < int64(*most) {
					n := uint64(next.Add(1) - 1)
					seed := first + n
					r := v.compare(t, generate(seed), 30*time.Second)
					operations := r.done()
					if operations < int64(len(r.sequence)) {
						hangs.Add(1)
					}
					if done.Add(operations)%10_000 < operations {
						t.Logf("%d operations after %s", done.Load(), time.Since(begun).Round(time.Second))
					}
					for range 2 {
						if r.at < 0 && r.err == nil || known(v.version, r) != nil {
							break
						}
						again := v.compare(t, r.sequence, 30*time.Second)
						switch {
						case again.err != nil:
						case r.err != nil: // a busy machine: nothing was compared
							t.Logf("seed %d: answered when repeated: %v", seed, r.err)
							repeated.Add(1)
							r = again
						case again.at < 0:
							t.Logf("seed %d: a difference that doesn't repeat: %s", seed, r.brief())
							unsteady.Add(1)
							r = again
						}
					}
					if k := known(v.version, r); k != nil {
						done.Add(int64(r.at) - operations)
						k.met.Add(1)
						continue
					}
					if r.err != nil {
						t.Logf("seed %d: %v", seed, r.err)
						done.Add(-operations)
						unanswered.Add(1)
						continue
					}
					if r.at < 0 || found.Add(1) > int64(*most) {
						continue
					}
					r = v.shrink(t, r)
					t.Errorf("RabbitMQ %s and the one in memory differ. Repeat: go test ./integration/differ -run %s -differ.seed=%d -differ.operations=1 -differ.parallel=1\n%s", v.version, t.Name(), seed, r)
				}
			})
		}
		wait.Wait()
		t.Logf("REPORT RabbitMQ %s: %d operations in %d sequences, %s, %d differences that didn't repeat, %d sequences without an answer, %d with one when repeated, %d that ended before a queue of RabbitMQ would hang", v.version, done.Load(), next.Load(), time.Since(begun).Round(time.Second), unsteady.Load(), unanswered.Load(), repeated.Load(), hangs.Load())
		for _, k := range knownDifferences {
			if k.version == v.version {
				t.Logf("REPORT RabbitMQ %s: %d times: %s", v.version, k.met.Load(), k.reason)
			}
		}
		assert.LessOrEqual(t, unanswered.Load(), 2+next.Load()/50, "sequences that weren't answered")
		assert.LessOrEqual(t, unsteady.Load(), 2+next.Load()/50, "differences that didn't repeat")
	})
}
