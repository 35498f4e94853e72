package doctor_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/operate/httpapi"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

// hosts leaves out what is about the shared broker and not about the virtual host.
func hosts(r doctor.Report) []string {
	all := []string{}
	for _, f := range suite.Found(r) {
		if !strings.Contains(f, " broker ") && !strings.Contains(f, " node ") {
			all = append(all, f)
		}
	}
	return all
}

// hopback's own topologies have nothing to report on a live broker, while messages are retried,
// dead-lettered, and scheduled.
func TestDoctorFindsNothingInHopbacksTopologies(t *testing.T) {
	suite.NeedReal(t)
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, tune := range suite.Strategies(s) {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				conn, _ := s.Connect(t)
				policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(10 * time.Second)}
				tune(&policy)
				work := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}
				suite.ApplyRetry(t, conn, policy, work)
				ladder, err := schedule.Topology(schedule.Names{}, "orders")
				require.NoError(t, err)
				suite.Apply(t, conn, ladder)
				suite.Load(t, conn, "orders", 3)
				failed := make(chan struct{}, 3)
				suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
					failed <- struct{}{}
					return errors.New("no")
				})), client.ConsumerConfig{})
				for range 3 {
					suite.Await(t, failed, "a failed message")
				}
				r, err := doctor.From(t.Context(), s.API(t), doctor.Options{VHost: s.VHost})
				require.NoError(t, err)
				assert.Empty(t, hosts(r), "%s", r)
				assert.Contains(t, r.String(), "recognized: hopback")
			})
		}
	})
}

// A proxy between doctor and a real broker refuses anything but GET. doctor doesn't notice, and
// the broker is as before.
func TestDoctorOnlyReads(t *testing.T) {
	suite.NeedReal(t)
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		b := newBench(t, s)
		b.quorum("orders", args{"x-delivery-limit": 1})
		b.put("orders", "a", "b")
		direct := b.API(t)
		before, err := direct.Get(t.Context(), "/definitions/"+b.VHost)
		require.NoError(t, err)

		target, err := url.Parse(b.ManagementURL)
		require.NoError(t, err)
		user := target.User
		target.User = nil
		var mu sync.Mutex
		var refused []string
		pass := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
		proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			if r.Method != http.MethodGet || len(body) > 0 {
				mu.Lock()
				refused = append(refused, r.Method+" "+r.URL.Path)
				mu.Unlock()
				http.Error(w, "read-only", http.StatusMethodNotAllowed)
				return
			}
			pass.ServeHTTP(w, r)
		}))
		defer proxy.Close()
		through, err := url.Parse(proxy.URL)
		require.NoError(t, err)
		through.User = user

		// The command, with every option.
		shell := suite.NewShell(t, map[string]string{"HOPBACK_MANAGEMENT_URL": through.String()})
		shell.Never, _ = user.Password()
		if shell.Never == user.Username() {
			shell.Never = user.String() // guest
		}
		shell.Group = "doctor"
		page := filepath.Join(t.TempDir(), "report.html")
		printed := shell.Run(suite.ExitNo, through.String(), "--vhost", b.VHost, "--html", page)
		assert.Contains(t, printed.Stdout, `queue "orders" in "`+b.VHost+`": it has no dead-letter exchange`)
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		assert.Contains(t, string(text), "dead-letter")
		assert.NotContains(t, string(text), "http://"+user.String())
		assert.Contains(t, shell.Run(suite.ExitNo, "--json", "--vhost", b.VHost).Stdout, `"rule": "dead-letter"`)
		assert.Empty(t, refused)

		after, err := direct.Get(t.Context(), "/definitions/"+b.VHost)
		require.NoError(t, err)
		assert.Equal(t, string(before), string(after))
		b.has("orders", 2)
		b.fail("orders", 1) // nobody else has received them: the limit of 1 still allows this
		b.has("orders", 2)

		// A user that may only look at its own virtual host sees less, and the report says so.
		login := b.User(t, ".*", ".*", ".*")
		u, err := url.Parse(login)
		require.NoError(t, err)
		name := u.User.Username()
		password, _ := u.User.Password()
		b.HTTP(t, http.MethodPut, "/users/"+name, args{"password": password, "tags": "management"}, nil)
		api, err := httpapi.New((&url.URL{Scheme: "http", Host: target.Host, User: u.User}).String(), "/", httpapi.Config{})
		require.NoError(t, err)
		r, err := doctor.From(t.Context(), api, doctor.Options{})
		require.NoError(t, err)
		assert.Equal(t, 1, r.VHosts)
		assert.Equal(t, []string{`error dead-letter queue "orders"`}, hosts(r)[:1])
		assert.NotEmpty(t, r.Unseen)
		assert.NotContains(t, r.String(), password)
	})
}

// A real broker with 10,000 queues takes doctor seconds and a few requests.
func TestDoctorOnTenThousandRealQueues(t *testing.T) {
	if !suite.Long() {
		t.Skip("set HOPBACK_LONG=1: the broker takes minutes to declare them")
	}
	suite.NeedReal(t)
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		queues := make([]args, 10_000)
		for i := range queues {
			queues[i] = args{"name": fmt.Sprintf("q%05d", i), "durable": true, "auto_delete": false, "arguments": args{"x-queue-type": "classic"}}
		}
		for first := 0; first < len(queues); first += 500 {
			s.HTTP(t, http.MethodPost, "/definitions/"+s.VHost, args{"queues": queues[first : first+500]}, nil)
		}
		began := time.Now()
		r, err := doctor.From(t.Context(), s.API(t), doctor.Options{VHost: s.VHost})
		took := time.Since(began)
		require.NoError(t, err)
		suite.Report(t, s, "10,000 queues examined in %v, with %d requests", took.Round(time.Millisecond), r.Requests)
		assert.Equal(t, 10_000, r.Queues)
		assert.Less(t, took, time.Minute, "it takes less than 10 s of a machine that does nothing else")
		assert.Less(t, r.Requests, int64(100))
	})
}
