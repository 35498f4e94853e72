package integration

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/audit"
	"github.com/hopback/hopback/declare/migrate"
	"github.com/hopback/hopback/internal/broker"
	"github.com/hopback/hopback/internal/proxy"
	"github.com/hopback/hopback/retry"
)

// The command's exit codes.
const (
	exitDone        = 0
	exitNo          = 1
	exitUnknown     = 2
	exitUsage       = 64
	exitInterrupted = 130
)

// command is the built command hopback.
var command = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "hopback-command-")
	if err != nil {
		return "", err
	}
	commandDir = dir
	build := exec.Command("go", "build", "-o", dir, "../cmd/hopback")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return filepath.Join(dir, "hopback"), nil
})

// commandDir is removed after the tests.
var commandDir string

// shell runs the command hopback. newShell makes it.
type shell struct {
	t   *testing.T
	bin string
	env map[string]string
	// never is what must not be printed.
	never string
	group string // of commands; "" is topology
}

// dead runs a command of "hopback dead".
func (h shell) dead(code int, args ...string) printed {
	h.t.Helper()
	h.group = "dead"
	return h.run(code, args...)
}

// newShell builds the command. On a machine that has built nothing yet that takes minutes,
// which must not be part of what a test waits for.
func newShell(t *testing.T, env map[string]string) shell {
	t.Helper()
	bin, err := command()
	require.NoError(t, err)
	return shell{t: t, bin: bin, env: env}
}

// shell has the site's URLs in the environment.
func (s *site) shell(t *testing.T) shell {
	t.Helper()
	return newShell(t, map[string]string{"HOPBACK_URL": s.url(), "HOPBACK_MANAGEMENT_URL": s.ManagementURL})
}

// as is the same for another user's AMQP URL, and the HTTP API with that user, too.
func (s *site) as(t *testing.T, amqpURL string) shell {
	t.Helper()
	u, err := url.Parse(amqpURL)
	require.NoError(t, err)
	api, err := url.Parse(s.ManagementURL)
	require.NoError(t, err)
	api.User = u.User
	password, _ := u.User.Password()
	h := newShell(t, map[string]string{"HOPBACK_URL": amqpURL, "HOPBACK_MANAGEMENT_URL": api.String()})
	h.never = password
	return h
}

// printed is what a run printed.
type printed struct {
	stdout, stderr string
}

// run wants an exit code. It can be called from several goroutines.
func (h shell) run(code int, args ...string) printed {
	h.t.Helper()
	return h.runIn(h.t.Context(), code, args...)
}

// start is run on a goroutine that ends before the test does. The command is interrupted
// when ctx ends.
func (h shell) start(ctx context.Context, code int, args ...string) <-chan printed {
	ended := make(chan printed, 1)
	var running sync.WaitGroup
	running.Go(func() { ended <- h.runIn(ctx, code, args...) })
	h.t.Cleanup(running.Wait)
	return ended
}

func (h shell) runIn(ctx context.Context, code int, args ...string) printed {
	h.t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, h.bin, append([]string{cmp.Or(h.group, "topology")}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	for k, v := range h.env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) && ctx.Err() == nil {
		assert.NoError(h.t, err)
	}
	got := cmd.ProcessState.ExitCode()
	assert.Equal(h.t, code, got, "hopback %s %s\n%s\n%s", cmp.Or(h.group, "topology"), strings.Join(args, " "), &stdout, &stderr)
	if h.never != "" {
		assert.NotContains(h.t, stdout.String()+stderr.String(), h.never, "a password")
	}
	return printed{stdout.String(), stderr.String()}
}

// yaml writes a topology file.
func yaml(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "topology.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

const shopFile = `
retry: {delays: [1s, 2s], strategy: auto}
work-queues:
  orders: {delivery-limit: 5}
exchanges:
  shop: {type: topic, alternate-exchange: parking_exchange}
bindings:
  - {source: shop, queue: orders, key: order.*}
`

// things are all queues, exchanges and bindings of the virtual host.
func (s *site) things(t *testing.T) []string {
	t.Helper()
	snapshot, err := audit.Read(t.Context(), audit.Sources{HTTP: s.api(t)}, declare.Topology{})
	require.NoError(t, err)
	var list []string
	for _, q := range snapshot.Queues {
		list = append(list, "queue "+q.Name)
	}
	for _, x := range snapshot.Exchanges {
		if !strings.HasPrefix(x.Name, "amq.") {
			list = append(list, "exchange "+x.Name)
		}
	}
	for _, b := range snapshot.Bindings {
		list = append(list, fmt.Sprint("binding ", b))
	}
	return list
}

// From an empty broker to a verified topology, and what a change by hand looks like
// from the command line.
func TestCommandPlansAppliesAndVerifies(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		hopback, file := s.shell(t), yaml(t, shopFile)
		before := hopback.run(exitDone, "plan", file)
		assert.Contains(t, before.stdout, `+ queue "orders"`)
		assert.Contains(t, before.stdout, " to create, 0 exist, 0 refused, 0 unknown.")
		hopback.run(exitNo, "plan", "--exit-code", file)
		hopback.run(exitNo, "verify", file)
		assert.Empty(t, s.things(t), "nothing is done by looking")

		assert.Contains(t, hopback.run(exitDone, "apply", file).stdout, `created   binding "shop" to queue "orders", key "order.*"`)
		assert.NotContains(t, hopback.run(exitDone, "apply", file).stdout, "created")
		assert.Contains(t, hopback.run(exitDone, "plan", "--exit-code", file).stdout, "Nothing to do")
		assert.Contains(t, hopback.run(exitDone, "verify", file).stdout, "0 errors, 0 warnings; 30 rules checked, 0 not.")
		hopback.run(exitDone, "verify") // the whole virtual host

		// By hand: an argument that differs, and a binding that is gone.
		s.unmake(t, "/queues/"+s.vhost+"/orders")
		s.queue(t, "orders", quorumArgs(map[string]any{"x-delivery-limit": 7}))
		s.unmake(t, "/exchanges/"+s.vhost+"/shop")
		have := s.things(t)
		changed := hopback.run(exitNo, "plan", file)
		assert.Contains(t, changed.stdout, "! queue \"orders\"\n-     x-delivery-limit: \"7\"\n+     x-delivery-limit: \"5\"\n      way out: ")
		assert.Contains(t, changed.stdout, "+ exchange \"shop\"")
		refused := hopback.run(exitNo, "apply", file)
		assert.Contains(t, refused.stderr, "nothing was done")
		assert.Equal(t, have, s.things(t), "nothing is half done")
		var v audit.Verification
		require.NoError(t, json.Unmarshal([]byte(hopback.run(exitNo, "verify", "--json", file).stdout), &v))
		assert.Contains(t, v.Findings, audit.Finding{
			Rule: "different", Severity: "error", Resource: declare.Resource{Kind: "queue", Name: "orders"}, Argument: "x-delivery-limit",
			Problem: `x-delivery-limit is "7", and should be "5"`, Remedy: "run plan, which lists the ways out",
		})

		// A binding whose queue is neither there nor in the file.
		typo := yaml(t, "exchanges: {shop: {}}\nbindings: [{source: shop, queue: ordres}]")
		assert.Contains(t, hopback.run(exitNo, "plan", typo).stdout, `queue "ordres" doesn't exist and isn't in the topology`)
		hopback.run(exitNo, "apply", typo)
		assert.Equal(t, have, s.things(t), "nothing is half done")
	})
}

// Several processes apply at once.
func TestCommandAppliesFromManyAtOnce(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		hopback, file := s.shell(t), yaml(t, shopFile)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { hopback.run(exitDone, "apply", file) })
		}
		wg.Wait()
		hopback.run(exitDone, "plan", "--exit-code", file)
	})
}

// Who may not, and what isn't there: clear words, an exit code of its own, nothing
// half done, and never a password.
func TestCommandWithoutPermissionOrAPI(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		file := yaml(t, shopFile)
		for who, u := range map[string]string{"nothing": s.user(t, "^$", "^$", "^$"), "read only": s.user(t, "^$", "^$", ".*")} {
			hopback := s.as(t, u)
			r := hopback.run(exitUnknown, "apply", file)
			assert.Contains(t, r.stderr, "refused for user", who)
			assert.NotContains(t, r.stdout, "unknown", who)
			assert.LessOrEqual(t, strings.Count(r.stdout+r.stderr, `"retry_exchange": a permission is missing`), 1, "each refusal once: %s%s", r.stdout, r.stderr)
			if r.stdout != "" { // else nothing was sent, as it may read nothing
				assert.Contains(t, r.stdout, `refused   exchange "retry_exchange"`, who)
			}
			if who == "read only" {
				// It may look: what can't be told is said with the reason.
				assert.Contains(t, hopback.run(exitDone, "plan", file).stdout, "lacks the tag for it (management", who)
				assert.Contains(t, hopback.run(exitNo, "verify", file).stdout, "not checked: ", who)
			}
			r = hopback.run(exitUnknown, "verify")
			assert.Contains(t, r.stderr, "lacks the tag for it (management", who)
			r = hopback.run(exitUnknown, "delete", file)
			assert.Contains(t, r.stderr, "lacks the tag", who)
		}
		wrong := s.as(t, s.urlOf(func(u *url.URL) { u.User = url.UserPassword("guest", "not-the-password") }))
		nowhere := s.shell(t)
		nowhere.env["HOPBACK_URL"] = s.urlOf(func(u *url.URL) { u.Path = "/no-such-vhost" })
		var asking sync.WaitGroup // each takes the broker 3 s
		for _, sub := range []string{"plan", "apply", "verify", "delete"} {
			asking.Go(func() {
				assert.Contains(t, wrong.run(exitUnknown, sub, file).stderr, "authentication failed", sub)
			})
			asking.Go(func() {
				assert.Contains(t, nowhere.run(exitUnknown, sub, file).stderr, "virtual host refused", sub)
			})
		}
		asking.Wait()
		assert.Contains(t, wrong.run(exitUnknown, "export").stderr, "status 401")
		assert.Contains(t, nowhere.run(exitUnknown, "export").stderr, `there is no vhost "no-such-vhost"`)
		assert.Empty(t, s.things(t), "nothing is half done")

		// Without the HTTP API apply works, plan says what it can't tell, and verify
		// couldn't tell: off, refused, nonsense, left out.
		web := httptest.NewServer(http.NotFoundHandler())
		defer web.Close()
		for api, says := range map[string]string{
			"http://127.0.0.1:1": "is the management plugin on", web.URL: "or this isn't the management API", "none": "use the HTTP API",
			"http://guest:not-the-password@" + strings.SplitN(s.ManagementURL, "@", 2)[1]: "status 401",
		} {
			hopback := s.shell(t)
			hopback.env["HOPBACK_MANAGEMENT_URL"], hopback.never = api, "not-the-password"
			hopback.run(exitDone, "apply", file)
			r := hopback.run(exitDone, "plan", file)
			assert.Contains(t, r.stdout, `? exchange "shop"`)
			assert.Contains(t, r.stdout, says)
			hopback.run(exitUnknown, "plan", "--exit-code", file)
			r = hopback.run(exitUnknown, "verify", file)
			assert.Equal(t, 1, strings.Count(r.stdout, says), "each reason once: %s", r.stdout)
			assert.Contains(t, r.stdout, "0 errors, 0 warnings")
		}
	})
}

// A team in a virtual host that it shares with others checks what is its own. What its file
// no longer has is reported.
func TestCommandVerifiesOneTeamsFile(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		hopback := s.shell(t)
		ours := yaml(t, "retry: {strategy: auto, delays: [1s, 2s], names: {prefix: ours.}}\nwork-queues: {orders: {delivery-limit: 5}}\n")
		hopback.run(exitDone, "apply", ours)
		hopback.run(exitDone, "verify", ours)
		s.queue(t, "theirs", map[string]any{"x-queue-type": "classic"})
		theirs := yaml(t, "retry: {delays: [3s], names: {prefix: theirs.}}\nwork-queues: {mails: {delivery-limit: 5}}\n")
		hopback.run(exitDone, "apply", theirs)
		r := hopback.run(exitDone, "verify", ours)
		assert.Contains(t, r.stdout, "findings at resources outside the topology, not counted: 2")
		assert.NotContains(t, r.stdout, "left over")
		assert.Contains(t, hopback.run(exitNo, "verify").stdout, `queue "theirs"`)

		fewer := yaml(t, "retry: {strategy: auto, delays: [1s], names: {prefix: ours.}}\nwork-queues: {orders: {delivery-limit: 5}}\n")
		r = hopback.run(exitDone, "verify", fewer)
		for _, queue := range []string{"ours.delay_2s", "ours.hold_2s"} {
			assert.Contains(t, r.stdout, `left over: queue "`+queue+`" isn't in the topology`)
		}
		assert.Equal(t, 2, strings.Count(r.stdout, "left over"), r.stdout)
		var v audit.Verification
		require.NoError(t, json.Unmarshal([]byte(hopback.run(exitDone, "verify", "--json", fewer).stdout), &v))
		assert.Len(t, v.Leftovers, 2)
		assert.Len(t, v.Elsewhere, 2)
		assert.Empty(t, v.Findings)

		// What is wrong with their own things still counts.
		s.policy(t, "policies", "orders", map[string]any{"overflow": "drop-head"})
		assert.Contains(t, hopback.run(exitNo, "verify", ours).stdout, `by the policy "orders"`)
	})
}

// A refusal that AMQP shows beforehand leaves nothing behind, with and without the HTTP API.
func TestRefusedApplyLeavesNothing(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.queue(t, "orders", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": 7})
		file := yaml(t, shopFile)
		before := s.things(t)
		for _, api := range []string{s.ManagementURL, "none"} {
			hopback := s.shell(t)
			hopback.env["HOPBACK_MANAGEMENT_URL"] = api
			hopback.run(exitNo, "apply", file)
			assert.Equal(t, before, s.things(t), api)
		}
		conn, _ := s.connect(t)
		topology, err := retry.Topology(retry.Policy{}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
		require.NoError(t, err)
		report, err := declare.Apply(t.Context(), conn.Management(), topology)
		require.ErrorIs(t, err, declare.ErrConflict)
		assert.Equal(t, 1, report.Count("refused"))
		assert.Equal(t, len(report.Steps)-1, report.Count("not tried"))
		assert.Equal(t, before, s.things(t), "by the library")
	})
}

// A topology goes to operators as a file and comes back, to the byte; and what is
// live becomes a file that says the same.
func TestCommandExportsAndImports(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		hopback, file := s.shell(t), yaml(t, shopFile)
		exported := hopback.run(exitDone, "export", "--vhost", s.vhost, file).stdout
		s.http(t, http.MethodPost, "/definitions", json.RawMessage(exported), nil)
		hopback.run(exitDone, "verify", file)
		hopback.run(exitDone, "plan", "--exit-code", file)
		assert.Equal(t, exported, hopback.run(exitDone, "export").stdout, "what is live exports as the same bytes")

		imported := yaml(t, hopback.run(exitDone, "import").stdout)
		definitions := filepath.Join(t.TempDir(), "definitions.json")
		require.NoError(t, os.WriteFile(definitions, []byte(exported), 0o600))
		hopback.run(exitDone, "delete", file)
		assert.Empty(t, s.things(t))
		for _, again := range []string{imported, definitions} {
			hopback.run(exitDone, "apply", again)
			hopback.run(exitDone, "verify", file)
			assert.Equal(t, exported, hopback.run(exitDone, "export").stdout)
			hopback.run(exitDone, "delete", again)
			assert.Empty(t, s.things(t))
		}
		assert.Equal(t, exported, hopback.run(exitDone, "export", definitions).stdout)
	})
}

// One broker isn't changed by what another one's HTTP API says, even where both have
// the virtual host.
func TestCommandNoticesAnotherBrokersAPI(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		i := slices.IndexFunc(neighbours(s), func(b *broker.Broker) bool { return b.Version != s.Version })
		other := &site{Broker: neighbours(s)[i], vhost: s.vhost}
		other.http(t, http.MethodPut, "/vhosts/"+s.vhost, nil, nil)
		t.Cleanup(func() { other.remove(t) })
		hopback, file := s.shell(t), yaml(t, shopFile)
		hopback.env["HOPBACK_MANAGEMENT_URL"] = other.ManagementURL
		for _, args := range [][]string{{"apply", file}, {"delete", file}} {
			assert.Contains(t, hopback.run(exitUsage, args...).stderr, "--management-url belongs to another broker; nothing was done")
		}
		assert.Empty(t, s.things(t))
		hopback.env["HOPBACK_MANAGEMENT_URL"] = "" // not guessed, since the port is none of RabbitMQ's
		if !strings.HasSuffix(s.host(), ":5672") {
			assert.Contains(t, hopback.run(exitDone, "plan", file).stdout, "can't be guessed; set --management-url")
		}
	})
}

// What has messages in it, or is shared with another team, isn't deleted.
func TestCommandDeletesOnlyWhatNobodyNeeds(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		hopback, mine := s.shell(t), yaml(t, shopFile)
		theirs := yaml(t, "retry: {delays: [1s, 2s], strategy: auto}\nwork-queues: {invoices: }")
		hopback.run(exitDone, "apply", mine)
		hopback.run(exitDone, "apply", theirs)
		have := s.things(t)
		r := hopback.run(exitNo, "delete", mine)
		assert.Contains(t, r.stderr, `delete exchange "requeue_exchange": in use: it leads to a resource that stays: "requeue_exchange" to queue "invoices"`)
		assert.Contains(t, r.stderr, `queue "invoices", which stays, dead-letters to it`)
		assert.Contains(t, r.stderr, "nothing was deleted; --force deletes without the check")
		assert.Equal(t, have, s.things(t))

		// The work queue alone, with its binding, goes.
		own := yaml(t, "queues: {orders: {dead-letter: drop}, orders.dead: {dead-letter: drop}}\nexchanges: {shop: }\nbindings: [{source: requeue_exchange, queue: orders, key: '*.*.orders'}, {source: return_exchange, queue: orders, key: orders}, {source: given_up_exchange, queue: orders.dead, key: orders}]")
		conn, _ := s.connect(t)
		publish(t, publisher[int](t, conn, address.Queue("orders")), 1)
		assert.Contains(t, hopback.run(exitNo, "delete", own).stderr, `queue "orders": in use: 1 messages are ready`)
		assert.Equal(t, have, s.things(t))
		_, err := declare.Purge(t.Context(), conn.Management(), "orders")
		require.NoError(t, err)
		hopback.run(exitDone, "delete", own)
		hopback.run(exitDone, "verify", theirs)
		hopback.run(exitDone, "delete", "--force", theirs)
		assert.Empty(t, s.things(t))
	})
}

// A queue's type is changed from the command line, while a consumer of it goes on.
func TestCommandMigrates(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const messages = 500
		hopback := s.shell(t)
		hopback.run(exitDone, "apply", yaml(t, "queues: {orders: {type: classic, dead-letter: drop}}\nexchanges: {shop: {type: topic}}\nbindings: [{source: shop, queue: orders, key: '#'}]"))
		conn, _ := s.connect(t)
		p := publisher[int](t, conn, address.Exchange("shop", "order.placed"))
		var publishing sync.WaitGroup
		for i := range messages {
			publishing.Go(func() { publish(t, p, i) })
		}
		publishing.Wait()

		file := yaml(t, "work-queues: {orders.v2: {delivery-limit: 5}}\nexchanges: {shop: {type: topic}}\n")
		have := s.things(t)
		r := hopback.run(exitNo, "migrate", file, "--from", "ordres", "--to", "orders.v2")
		assert.Contains(t, r.stderr, `has no queue "ordres"; did you mean "orders"?`)
		assert.Equal(t, have, s.things(t), "nothing is half done")

		// Interrupted, and taken up again.
		ctx, interrupt := context.WithCancel(t.Context())
		interrupted := hopback.start(ctx, exitInterrupted, "migrate", file, "--from", "orders", "--to", "orders.v2")
		poll(t, "some are moved", func() bool {
			info, err := declare.Inspect(t.Context(), conn.Management(), "orders.v2")
			return err == nil && info.Messages > 0
		})
		interrupt()
		assert.Contains(t, await(t, interrupted, "the interrupted move").stderr, "run it again to continue")

		var moved migrate.Report
		require.NoError(t, json.Unmarshal([]byte(hopback.run(exitDone, "migrate", file, "--from", "orders", "--to", "orders.v2", "--json").stdout), &moved))
		assert.True(t, moved.Deleted)
		hopback.run(exitDone, "verify", file)
		seen := map[int]bool{}
		var mu sync.Mutex
		consume(t, conn, "orders.v2", client.JSON(func(_ context.Context, i int) error {
			mu.Lock()
			defer mu.Unlock()
			seen[i] = true
			return nil
		}), client.ConsumerConfig{})
		poll(t, "every message is there", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(seen) == messages
		})
		r = hopback.run(exitNo, "migrate", file, "--from", "orders", "--to", "orders.v2")
		assert.Contains(t, r.stderr, `if it was moved to "orders.v2" before, nothing is left to do`)
	})
}

// Interrupted in the middle, apply says what was done, and does the rest when it is
// run again.
func TestCommandInterrupted(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		hopback := s.shell(t)
		slow, err := proxy.New(s.host())
		require.NoError(t, err)
		t.Cleanup(slow.Close)
		slow.Slow(5*time.Millisecond, 4000)
		through := s.shell(t)
		through.env["HOPBACK_URL"] = s.urlOf(func(u *url.URL) { u.Host = slow.Addr() })
		var text strings.Builder
		text.WriteString("exchanges: {x: }\nqueues: {q: {dead-letter: drop}}\nbindings:\n")
		for i := range 300 { // which take many seconds through the proxy
			fmt.Fprintf(&text, "  - {source: x, queue: q, key: \"%d\"}\n", i)
		}
		file := yaml(t, text.String())
		ctx, interrupt := context.WithCancel(t.Context())
		defer interrupt()
		ended := through.start(ctx, exitInterrupted, "apply", file)
		poll(t, "bindings come about", func() bool { return len(s.things(t)) > 2 })
		interrupt()
		r := await(t, ended, "the interrupted command")
		assert.Contains(t, r.stdout, "created   queue \"q\"")
		assert.Contains(t, r.stdout, " not tried")
		hopback.run(exitDone, "apply", file)
		hopback.run(exitDone, "plan", "--exit-code", file)
	})
}

// The walk in README.md, from an empty broker to a verified topology, is run as it is
// written, by a shell and the built command: each line says behind its # how its
// output ends.
func TestWalkInREADME(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	block := func(language string) string {
		_, rest, found := strings.Cut(string(readme), "\n```"+language+"\n")
		require.True(t, found, "README.md has no block of %s", language)
		text, _, _ := strings.Cut(rest, "```")
		return text
	}
	forEachBroker(t, func(t *testing.T, s *site) {
		bin, err := command()
		require.NoError(t, err)
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "topology.yaml"), []byte(block("yaml")), 0o600))
		lines := 0
		for line := range strings.Lines(block("sh")) {
			_, says, found := strings.Cut(strings.TrimSpace(line), " # ")
			require.True(t, found, line)
			cmd := exec.CommandContext(t.Context(), "bash", "-euc", line)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(bin)+":"+os.Getenv("PATH"), "HOPBACK_URL="+s.url(), "HOPBACK_MANAGEMENT_URL="+s.ManagementURL)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s%s", line, out)
			assert.True(t, strings.HasSuffix(string(out), strings.TrimSpace(says)+"\n"), "%s%s", line, out)
			lines++
		}
		assert.Equal(t, 3, lines, "three commands")
	})
}
