package topology_test

import (
	"bufio"
	"context"
	"encoding/json"
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
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/operate/migrate"
	"github.com/hopback/hopback/retry"
)

// as is the same for another user's AMQP URL, and the HTTP API with that user, too.
func as(t *testing.T, s *suite.Site, amqpURL string) suite.Shell {
	t.Helper()
	u, err := url.Parse(amqpURL)
	require.NoError(t, err)
	api, err := url.Parse(s.ManagementURL)
	require.NoError(t, err)
	api.User = u.User
	password, _ := u.User.Password()
	h := suite.NewShell(t, map[string]string{"HOPBACK_URL": amqpURL, "HOPBACK_MANAGEMENT_URL": api.String()})
	h.Never = password
	return h
}

// things are all queues, exchanges and bindings of the virtual host.
func things(t *testing.T, s *suite.Site) []string {
	t.Helper()
	snapshot, err := check.Read(t.Context(), check.Sources{HTTP: s.API(t)}, declare.Topology{})
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
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		hopback, file := s.Shell(t), suite.YAML(t, suite.ShopFile)
		before := hopback.Run(suite.ExitDone, "plan", file)
		assert.Contains(t, before.Stdout, `+ queue "orders"`)
		assert.Contains(t, before.Stdout, " to create, 0 exist, 0 refused, 0 unknown.")
		hopback.Run(suite.ExitNo, "plan", "--exit-code", file)
		hopback.Run(suite.ExitNo, "verify", file)
		assert.Empty(t, things(t, s), "nothing is done by looking")

		assert.Contains(t, hopback.Run(suite.ExitDone, "apply", file).Stdout, `created   binding "shop" to queue "orders", key "order.*"`)
		assert.NotContains(t, hopback.Run(suite.ExitDone, "apply", file).Stdout, "created")
		assert.Contains(t, hopback.Run(suite.ExitDone, "plan", "--exit-code", file).Stdout, "Nothing to do")
		assert.Contains(t, hopback.Run(suite.ExitDone, "verify", file).Stdout, "0 errors, 0 warnings; 37 rules checked, 0 skipped.")
		hopback.Run(suite.ExitDone, "verify") // the whole virtual host

		// By hand: an argument that differs, and a binding that is gone.
		unmake(t, s, "/queues/"+s.VHost+"/orders")
		s.DeclareQueue(t, "orders", quorumArgs(map[string]any{"x-delivery-limit": 7}))
		unmake(t, s, "/exchanges/"+s.VHost+"/shop")
		have := things(t, s)
		changed := hopback.Run(suite.ExitNo, "plan", file)
		assert.Contains(t, changed.Stdout, "! queue \"orders\"\n-     x-delivery-limit: \"7\"\n+     x-delivery-limit: \"5\"\n      remedy: ")
		assert.Contains(t, changed.Stdout, "+ exchange \"shop\"")
		refused := hopback.Run(suite.ExitNo, "apply", file)
		assert.Contains(t, refused.Stderr, "nothing was done")
		assert.Equal(t, have, things(t, s), "nothing is half done")
		var v check.Verification
		require.NoError(t, json.Unmarshal([]byte(hopback.Run(suite.ExitNo, "verify", "--json", file).Stdout), &v))
		assert.Contains(t, v.Findings, check.Finding{
			Rule: "different", Severity: "error", Resource: declare.Resource{Kind: "queue", Name: "orders"}, Argument: "x-delivery-limit",
			Problem: `x-delivery-limit is "7", and should be "5"`, Remedy: "run plan, which lists the remedies",
		})

		// A binding whose queue is neither there nor in the file.
		typo := suite.YAML(t, "exchanges: {shop: {}}\nbindings: [{source: shop, queue: ordres}]")
		assert.Contains(t, hopback.Run(suite.ExitNo, "plan", typo).Stdout, `queue "ordres" doesn't exist and isn't in the topology`)
		hopback.Run(suite.ExitNo, "apply", typo)
		assert.Equal(t, have, things(t, s), "nothing is half done")
	})
}

// Several processes apply at once.
func TestCommandAppliesFromManyAtOnce(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		hopback, file := s.Shell(t), suite.YAML(t, suite.ShopFile)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { hopback.Run(suite.ExitDone, "apply", file) })
		}
		wg.Wait()
		hopback.Run(suite.ExitDone, "plan", "--exit-code", file)
	})
}

// A missing permission, and a missing resource: clear words, a separate exit code, nothing
// half done, and never a password.
func TestCommandWithoutPermissionOrAPI(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		file := suite.YAML(t, suite.ShopFile)
		for who, u := range map[string]string{"nothing": s.User(t, "^$", "^$", "^$"), "read only": s.User(t, "^$", "^$", ".*")} {
			hopback := as(t, s, u)
			r := hopback.Run(suite.ExitUnknown, "apply", file)
			assert.Contains(t, r.Stderr, "refused for user", who)
			assert.NotContains(t, r.Stdout, "unknown", who)
			assert.LessOrEqual(t, strings.Count(r.Stdout+r.Stderr, `"retry_exchange": a permission is missing`), 1, "each refusal once: %s%s", r.Stdout, r.Stderr)
			if r.Stdout != "" { // else nothing was sent, as it may read nothing
				assert.Contains(t, r.Stdout, `refused   exchange "`, who) // which ones come first isn't certain
			}
			if who == "read only" {
				// It may look: what can't be told is said with the reason.
				assert.Contains(t, hopback.Run(suite.ExitDone, "plan", file).Stdout, "lacks the required tag (management", who)
				assert.Contains(t, hopback.Run(suite.ExitNo, "verify", file).Stdout, "not checked: ", who)
			}
			r = hopback.Run(suite.ExitUnknown, "verify")
			assert.Contains(t, r.Stderr, "lacks the required tag (management", who)
			r = hopback.Run(suite.ExitUnknown, "delete", file)
			assert.Contains(t, r.Stderr, "lacks the required tag", who)
		}
		wrong := as(t, s, s.AMQPURLWith(func(u *url.URL) { u.User = url.UserPassword("guest", "not-the-password") }))
		nowhere := s.Shell(t)
		nowhere.Env["HOPBACK_URL"] = s.AMQPURLWith(func(u *url.URL) { u.Path = "/no-such-vhost" })
		var asking sync.WaitGroup // each takes the broker 3 s
		for _, sub := range []string{"plan", "apply", "verify", "delete"} {
			asking.Go(func() {
				assert.Contains(t, wrong.Run(suite.ExitUnknown, sub, file).Stderr, "authentication failed", sub)
			})
			asking.Go(func() {
				assert.Contains(t, nowhere.Run(suite.ExitUnknown, sub, file).Stderr, "virtual host refused", sub)
			})
		}
		asking.Wait()
		assert.Contains(t, wrong.Run(suite.ExitUnknown, "export").Stderr, "status 401")
		assert.Contains(t, nowhere.Run(suite.ExitUnknown, "export").Stderr, `the virtual host "no-such-vhost" doesn't exist`)
		assert.Empty(t, things(t, s), "nothing is half done")

		// Without the HTTP API apply works, plan says what it can't tell, and verify
		// couldn't tell: off, refused, nonsense, left out.
		web := httptest.NewServer(http.NotFoundHandler())
		defer web.Close()
		for api, says := range map[string]string{
			"http://127.0.0.1:1": "check that the management plugin is enabled", web.URL: "or this isn't the management API", "none": "use the HTTP API",
			"http://guest:not-the-password@" + strings.SplitN(s.ManagementURL, "@", 2)[1]: "status 401",
		} {
			hopback := s.Shell(t)
			hopback.Env["HOPBACK_MANAGEMENT_URL"], hopback.Never = api, "not-the-password"
			hopback.Run(suite.ExitDone, "apply", file)
			r := hopback.Run(suite.ExitDone, "plan", file)
			assert.Contains(t, r.Stdout, `? exchange "shop"`)
			assert.Contains(t, r.Stdout, says)
			hopback.Run(suite.ExitUnknown, "plan", "--exit-code", file)
			r = hopback.Run(suite.ExitUnknown, "verify", file)
			assert.Equal(t, 1, strings.Count(r.Stdout, says), "each reason once: %s", r.Stdout)
			assert.Contains(t, r.Stdout, "0 errors, 0 warnings")
		}
	})
}

// A team in a virtual host that it shares with others checks what is its own. What its file
// no longer has is reported.
func TestCommandVerifiesOneTeamsFile(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		hopback := s.Shell(t)
		ours := suite.YAML(t, "retry: {strategy: auto, delays: [1s, 2s], names: {prefix: ours.}}\nwork-queues: {orders: {delivery-limit: 5}}\n")
		hopback.Run(suite.ExitDone, "apply", ours)
		hopback.Run(suite.ExitDone, "verify", ours)
		s.DeclareQueue(t, "theirs", map[string]any{"x-queue-type": "classic"})
		theirs := suite.YAML(t, "retry: {delays: [3s], names: {prefix: theirs.}}\nwork-queues: {mails: {delivery-limit: 5}}\n")
		hopback.Run(suite.ExitDone, "apply", theirs)
		r := hopback.Run(suite.ExitDone, "verify", ours)
		assert.Contains(t, r.Stdout, "findings outside the topology, not counted: 2")
		assert.NotContains(t, r.Stdout, "left over")
		assert.Contains(t, hopback.Run(suite.ExitNo, "verify").Stdout, `queue "theirs"`)

		fewer := suite.YAML(t, "retry: {strategy: auto, delays: [1s], names: {prefix: ours.}}\nwork-queues: {orders: {delivery-limit: 5}}\n")
		r = hopback.Run(suite.ExitDone, "verify", fewer)
		for _, queue := range []string{"ours.delay_2s", "ours.hold_2s"} {
			assert.Contains(t, r.Stdout, `left over: queue "`+queue+`" isn't in the topology`)
		}
		assert.Equal(t, 2, strings.Count(r.Stdout, "left over"), r.Stdout)
		var v check.Verification
		require.NoError(t, json.Unmarshal([]byte(hopback.Run(suite.ExitDone, "verify", "--json", fewer).Stdout), &v))
		assert.Len(t, v.Leftovers, 2)
		assert.Len(t, v.Elsewhere, 2)
		assert.Empty(t, v.Findings)

		// What is wrong with their own things still counts.
		s.Policy(t, "policies", "orders", map[string]any{"overflow": "drop-head"})
		assert.Contains(t, hopback.Run(suite.ExitNo, "verify", ours).Stdout, `by the policy "orders"`)
	})
}

// A refusal that AMQP shows beforehand leaves nothing behind, with and without the HTTP API.
func TestRefusedApplyLeavesNothing(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		s.DeclareQueue(t, "orders", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": 7})
		file := suite.YAML(t, suite.ShopFile)
		before := things(t, s)
		for _, api := range []string{s.ManagementURL, "none"} {
			hopback := s.Shell(t)
			hopback.Env["HOPBACK_MANAGEMENT_URL"] = api
			hopback.Run(suite.ExitNo, "apply", file)
			assert.Equal(t, before, things(t, s), api)
		}
		conn, _ := s.Connect(t)
		topology, err := retry.Topology(retry.Policy{}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
		require.NoError(t, err)
		report, err := declare.Apply(t.Context(), conn.Management(), topology)
		require.ErrorIs(t, err, declare.ErrConflict)
		assert.Equal(t, 1, report.Count("refused"))
		assert.Equal(t, len(report.Steps)-1, report.Count("not tried"))
		assert.Equal(t, before, things(t, s), "by the library")
	})
}

// A topology goes to operators as a file and comes back, to the byte; and what is
// live becomes a file that says the same.
func TestCommandExportsAndImports(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		hopback, file := s.Shell(t), suite.YAML(t, suite.ShopFile)
		exported := hopback.Run(suite.ExitDone, "export", "--vhost", s.VHost, file).Stdout
		s.HTTP(t, http.MethodPost, "/definitions", json.RawMessage(exported), nil)
		hopback.Run(suite.ExitDone, "verify", file)
		hopback.Run(suite.ExitDone, "plan", "--exit-code", file)
		assert.Equal(t, exported, hopback.Run(suite.ExitDone, "export").Stdout, "what is live exports as the same bytes")

		imported := suite.YAML(t, hopback.Run(suite.ExitDone, "import").Stdout)
		definitions := filepath.Join(t.TempDir(), "definitions.json")
		require.NoError(t, os.WriteFile(definitions, []byte(exported), 0o600))
		hopback.Run(suite.ExitDone, "delete", file)
		assert.Empty(t, things(t, s))
		for _, again := range []string{imported, definitions} {
			hopback.Run(suite.ExitDone, "apply", again)
			hopback.Run(suite.ExitDone, "verify", file)
			assert.Equal(t, exported, hopback.Run(suite.ExitDone, "export").Stdout)
			hopback.Run(suite.ExitDone, "delete", again)
			assert.Empty(t, things(t, s))
		}
		assert.Equal(t, exported, hopback.Run(suite.ExitDone, "export", definitions).Stdout)
	})
}

// One broker isn't changed by what another one's HTTP API says, even where both have
// the virtual host.
func TestCommandNoticesAnotherBrokersAPI(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		i := slices.IndexFunc(suite.Neighbours(s), func(b *rabbitmq.Broker) bool { return b.Version != s.Version })
		if i < 0 {
			t.Skip("it needs two brokers, and -brokers names one series")
		}
		other := &suite.Site{Broker: suite.Neighbours(s)[i], VHost: s.VHost}
		other.HTTP(t, http.MethodPut, "/vhosts/"+s.VHost, nil, nil)
		t.Cleanup(func() { other.Remove(t) })
		hopback, file := s.Shell(t), suite.YAML(t, suite.ShopFile)
		hopback.Env["HOPBACK_MANAGEMENT_URL"] = other.ManagementURL
		for _, args := range [][]string{{"apply", file}, {"delete", file}} {
			assert.Contains(t, hopback.Run(suite.ExitUsage, args...).Stderr, "--management-url belongs to another broker; nothing was done")
		}
		assert.Empty(t, things(t, s))
		hopback.Env["HOPBACK_MANAGEMENT_URL"] = "" // not guessed, since the port is none of RabbitMQ's
		if !strings.HasSuffix(s.Host(), ":5672") {
			assert.Contains(t, hopback.Run(suite.ExitDone, "plan", file).Stdout, "so the URL of its HTTP API can't be guessed; set --management-url")
		}
	})
}

// What has messages in it, or is shared with another team, isn't deleted.
func TestCommandDeletesOnlyWhatNobodyNeeds(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		hopback, mine := s.Shell(t), suite.YAML(t, suite.ShopFile)
		theirs := suite.YAML(t, "retry: {delays: [1s, 2s], strategy: auto}\nwork-queues: {invoices: }")
		hopback.Run(suite.ExitDone, "apply", mine)
		hopback.Run(suite.ExitDone, "apply", theirs)
		have := things(t, s)
		dry := hopback.Run(suite.ExitNo, "delete", "--dry-run", mine)
		assert.Contains(t, dry.Stdout, "- queue \"orders\": 0 messages, 0 consumers\n")
		assert.Contains(t, dry.Stdout, `! exchange "requeue_exchange": in use: it routes to a resource outside the topology: "requeue_exchange" to queue "invoices"`)
		assert.Contains(t, dry.Stdout, " 0 unknown, 0 absent. Nothing was deleted.")
		assert.Equal(t, have, things(t, s))
		r := hopback.Run(suite.ExitNo, "delete", mine)
		assert.Contains(t, r.Stderr, `delete exchange "requeue_exchange": in use: it routes to a resource outside the topology: "requeue_exchange" to queue "invoices"`)
		assert.Contains(t, r.Stderr, `queue "invoices" outside the topology dead-letters to it`)
		assert.Contains(t, r.Stderr, "nothing was deleted; --force deletes without the check")
		assert.Equal(t, have, things(t, s))

		// The work queue alone, with its binding, goes.
		own := suite.YAML(t, "queues: {orders: {dead-letter: drop}, orders.dead: {dead-letter: drop}}\nexchanges: {shop: }\nbindings: [{source: requeue_exchange, queue: orders, key: '*.*.orders'}, {source: return_exchange, queue: orders, key: orders}, {source: given_up_exchange, queue: orders.dead, key: orders}]")
		conn, _ := s.Connect(t)
		suite.Publish(t, suite.Publisher[int](t, conn, address.Queue("orders")), 1)
		assert.Contains(t, hopback.Run(suite.ExitNo, "delete", "--dry-run", own).Stdout, "- queue \"orders\": 1 message, 0 consumers\n")
		assert.Contains(t, hopback.Run(suite.ExitNo, "delete", own).Stderr, `queue "orders": in use: it contains 1 ready message; drain or purge the queue first`)
		assert.Equal(t, have, things(t, s))
		_, err := declare.Purge(t.Context(), conn.Management(), "orders")
		require.NoError(t, err)
		assert.NotContains(t, hopback.Run(suite.ExitDone, "delete", "--dry-run", own).Stdout, "!")
		hopback.Run(suite.ExitDone, "delete", own)
		hopback.Run(suite.ExitDone, "verify", theirs)
		hopback.Run(suite.ExitDone, "delete", "--force", theirs)
		assert.Empty(t, things(t, s))
	})
}

// A queue's type is changed from the command line, while a consumer of it keeps running.
func TestCommandMigrates(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 500
		hopback := s.Shell(t)
		hopback.Run(suite.ExitDone, "apply", suite.YAML(t, "queues: {orders: {type: classic, dead-letter: drop}}\nexchanges: {shop: {type: topic}}\nbindings: [{source: shop, queue: orders, key: '#'}]"))
		conn, _ := s.Connect(t)
		p := suite.Publisher[int](t, conn, address.Exchange("shop", "order.placed"))
		var publishing sync.WaitGroup
		for i := range messages {
			publishing.Go(func() { suite.Publish(t, p, i) })
		}
		publishing.Wait()

		file := suite.YAML(t, "work-queues: {orders.v2: {delivery-limit: 5}}\nexchanges: {shop: {type: topic}}\n")
		have := things(t, s)
		r := hopback.Run(suite.ExitNo, "migrate", file, "--from", "ordres", "--to", "orders.v2")
		assert.Contains(t, r.Stderr, `has no queue "ordres"; did you mean "orders"?`)
		assert.Equal(t, have, things(t, s), "nothing is half done")

		// Interrupted, and taken up again.
		ctx, interrupt := context.WithCancel(t.Context())
		interrupted := hopback.Start(ctx, suite.ExitInterrupted, "migrate", file, "--from", "orders", "--to", "orders.v2")
		suite.Poll(t, "some are moved", func() bool {
			info, err := declare.Inspect(t.Context(), conn.Management(), "orders.v2")
			return err == nil && info.Messages > 0
		})
		interrupt()
		assert.Contains(t, suite.Await(t, interrupted, "the interrupted move").Stderr, "run it again to continue")

		var moved migrate.Report
		require.NoError(t, json.Unmarshal([]byte(hopback.Run(suite.ExitDone, "migrate", file, "--from", "orders", "--to", "orders.v2", "--json").Stdout), &moved))
		assert.True(t, moved.Deleted)
		hopback.Run(suite.ExitDone, "verify", file)
		seen := map[int]bool{}
		var mu sync.Mutex
		suite.Consume(t, conn, "orders.v2", client.JSON(func(_ context.Context, i int) error {
			mu.Lock()
			defer mu.Unlock()
			seen[i] = true
			return nil
		}), client.ConsumerConfig{})
		suite.Poll(t, "every message is there", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(seen) == messages
		})
		r = hopback.Run(suite.ExitNo, "migrate", file, "--from", "orders", "--to", "orders.v2")
		assert.Contains(t, r.Stderr, `if it was moved to "orders.v2" before, nothing is left to do`)
	})
}

// Interrupted in the middle, apply says what was done, and does the rest when it is
// run again.
func TestCommandInterrupted(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		hopback := s.Shell(t)
		slow, err := proxy.New(s.Host())
		require.NoError(t, err)
		t.Cleanup(slow.Close)
		slow.Slow(5*time.Millisecond, 4000)
		through := s.Shell(t)
		through.Env["HOPBACK_URL"] = s.AMQPURLWith(func(u *url.URL) { u.Host = slow.Addr() })
		var text strings.Builder
		text.WriteString("exchanges: {x: }\nqueues: {q: {dead-letter: drop}}\nbindings:\n")
		for i := range 300 { // which take many seconds through the proxy
			fmt.Fprintf(&text, "  - {source: x, queue: q, key: \"%d\"}\n", i)
		}
		file := suite.YAML(t, text.String())
		ctx, interrupt := context.WithCancel(t.Context())
		defer interrupt()
		ended := through.Start(ctx, suite.ExitInterrupted, "apply", file)
		suite.Poll(t, "bindings come about", func() bool { return len(things(t, s)) > 2 })
		interrupt()
		r := suite.Await(t, ended, "the interrupted command")
		assert.Contains(t, r.Stdout, "created   queue \"q\"")
		assert.Contains(t, r.Stdout, " not tried")
		hopback.Run(suite.ExitDone, "apply", file)
		hopback.Run(suite.ExitDone, "plan", "--exit-code", file)
	})
}

// The walk in README.md, from its program to a verified topology, is run as
// written, by a shell and the built command, on the broker that the program has used: each line says behind
// its # how its output ends.
func TestWalkInREADME(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	// The commands follow the topology.
	rest := string(readme)
	block := func(language string) (text string) {
		var found bool
		_, rest, found = strings.Cut(rest, "\n```"+language+"\n")
		require.True(t, found, "README.md has no block of %s", language)
		text, rest, _ = strings.Cut(rest, "```")
		return text
	}
	topology, commands := block("yaml"), block("sh")
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		bin, err := suite.Command()
		require.NoError(t, err)
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "topology.yaml"), []byte(topology), 0o600))
		program := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "first"), "../../examples/first")
		out, err := program.CombinedOutput()
		require.NoError(t, err, "%s", out)
		program = exec.CommandContext(t.Context(), filepath.Join(dir, "first"))
		program.Env = append(os.Environ(), "HOPBACK_URL="+s.AMQPURL())
		log, err := program.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, program.Start())
		for lines := bufio.NewScanner(log); lines.Scan(); {
			if strings.HasSuffix(lines.Text(), "charged o-1") {
				require.NoError(t, program.Process.Signal(os.Interrupt))
			}
		}
		require.NoError(t, program.Wait())
		lines := 0
		for line := range strings.Lines(commands) {
			_, says, found := strings.Cut(strings.TrimSpace(line), " # ")
			require.True(t, found, line)
			cmd := exec.CommandContext(t.Context(), "bash", "-euc", line)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(bin)+":"+os.Getenv("PATH"), "HOPBACK_URL="+s.AMQPURL(), "HOPBACK_MANAGEMENT_URL="+s.ManagementURL)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s%s", line, out)
			assert.True(t, strings.HasSuffix(string(out), strings.TrimSpace(says)+"\n"), "%s%s", line, out)
			lines++
		}
		assert.Equal(t, 3, lines, "three commands")
	})
}
