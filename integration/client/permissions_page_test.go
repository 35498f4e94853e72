package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// granted are the commands of docs/security.md, by user: configure, write, read.
func granted(t *testing.T) map[string][3]string {
	t.Helper()
	users := map[string][3]string{}
	command := regexp.MustCompile(`(?m)^rabbitmqctl set_permissions -p / (\S+) '(.*?)' '(.*?)' '(.*?)'$`)
	for _, m := range command.FindAllStringSubmatch(permissionsPage(t), -1) {
		require.NotContains(t, users, m[1], "two commands for one user")
		users[m[1]] = [3]string{m[2], m[3], m[4]}
	}
	return users
}

// The index of a permission in a command.
const (
	toConfigure = iota
	toWrite
	toRead
)

// narrower is a row of the page's table of what a user lacks and what is reported then.
type narrower struct {
	kind    int // configure, write, or read
	pattern string
	only    string // all, 4.0, or 4.3, which means 4.3 and later
	reports string
}

// furtherRefused are rows like those of the page that it leaves out.
var furtherRefused = map[string][]narrower{
	"event-publisher": {
		{toWrite, `^$`, "all", `write access to exchange 'shop' in vhost '/' refused for user`},
	},
	"worker-any-delay": {
		{toWrite, `^$`, "all", `write access to exchange 'retry_ladder_`},
	},
	"worker-native": {
		{toWrite, `^$`, "4.3", `the broker's time can't be read`},
		{toRead, `^orders$`, "4.3", `the broker's time can't be read`},
		{toRead, `^hopback-clock-`, "4.3", `configure access to queue 'orders' in vhost '/' refused for user`},
	},
	"worker-auto": {
		{toWrite, `^retry_exchange$`, "4.3", `the broker's time can't be read`},
	},
	"worker-checked": {
		{toRead, `^(orders|requeue_exchange|given_up_exchange)$`, "4.3", `read on the source of binding "retry_exchange" to queue "delay_200ms"`},
	},
	"deployer": {
		{toConfigure, `^(orders|orders\.dead|delay_.*|parking_queue|(requeue|dead_letter|given_up|parking)_exchange(\.sort)?)$`, "all", `declare exchange "retry_exchange": a permission is missing`},
		{toWrite, `^(orders|orders\.dead|delay_.*|parking_queue|(requeue|given_up|parking)_exchange(\.sort)?)$`, "all", `write access to exchange 'dead_letter_exchange' in vhost '/' refused for user`},
		{toRead, `^(orders|orders\.dead|delay_.*|(requeue|dead_letter|given_up|parking)_exchange(\.sort)?)$`, "all", `read access to exchange 'retry_exchange' in vhost '/' refused for user`},
	},
	"dead-letter-operator": {
		{toWrite, `^$`, "all", `write access to exchange 'amq.default' in vhost '/' refused for user`},
	},
	"dead-letter-mover": {
		{toWrite, `^$`, "4.3", `write access to exchange 'amq.default' in vhost '/' refused for user`},
	},
	"retrier": {
		{toRead, `^$`, "4.0", `read access to queue 'failed_queue' in vhost '/' refused for user`},
	},
}

// refused are the rows of docs/security.md, and further ones, by user.
func refused(t *testing.T) map[string][]narrower {
	t.Helper()
	kinds := map[string]int{"configure": toConfigure, "write": toWrite, "read": toRead}
	rows := map[string][]narrower{}
	for user, further := range furtherRefused {
		rows[user] = slices.Clone(further)
	}
	row := regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\| (configure|write|read) `(.*?)` \\| (all|4\\.0|4\\.3) \\| `(.*?)` \\|$")
	page := row.FindAllStringSubmatch(permissionsPage(t), -1)
	require.Greater(t, len(page), 5)
	for _, m := range page {
		pattern := strings.ReplaceAll(m[3], `\|`, "|") // a table's cells escape it
		rows[m[1]] = append(rows[m[1]], narrower{kinds[m[2]], pattern, m[4], m[5]})
	}
	return rows
}

func permissionsPage(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "security.md"))
	require.NoError(t, err)
	return string(page)
}

// duty is what a user of the page does, on a topology that others have declared.
type duty struct {
	policy retry.Policy
	newer  bool // needs RabbitMQ 4.3
	bare   bool // begins without the topology
	// do does it once. owner may do everything.
	do func(ctx context.Context, t *testing.T, owner, user *client.Conn, policy retry.Policy) error
}

var duties = map[string]duty{
	"publisher":            {do: publishing(address.Queue("orders"))},
	"event-publisher":      {do: publishing(address.Exchange("shop", "order.created"))},
	"worker":               {do: retrying},
	"worker-any-delay":     {do: retrying, policy: retry.Policy{AnyDelay: &retry.Ladder{Unit: 50 * time.Millisecond, Levels: 6}}},
	"worker-dead-letter":   {do: retrying, policy: retry.Policy{Strategy: retry.StrategyDeadLetter}},
	"worker-native":        {do: retrying, policy: retry.Policy{Strategy: retry.StrategyNative}, newer: true},
	"worker-auto":          {do: retrying, policy: retry.Policy{Strategy: retry.StrategyAuto}},
	"worker-checked":       {do: retrying},
	"dead-letter-reader":   {do: listing},
	"dead-letter-operator": {do: replaying},
	"dead-letter-mover":    {do: replaying, policy: retry.Policy{Strategy: retry.StrategyDeadLetter, ReplayByMove: true}},
	"deployer":             {do: deploying, bare: true},
	"deployer-dead-letter": {do: deploying, policy: retry.Policy{Strategy: retry.StrategyDeadLetter}, bare: true},
	"deployer-native":      {do: deploying, policy: retry.Policy{Strategy: retry.StrategyNative}, bare: true},
	"retrier":              {do: retryingCentrally},
}

// Each user of docs/security.md can do its work, and with a narrower expression gets the
// error that the page quotes.
func TestPermissionsOfThePageAreEnoughAndNeeded(t *testing.T) {
	users, rows := granted(t), refused(t)
	for user := range rows {
		assert.Contains(t, users, user, "the page has no command for it")
	}
	for user := range duties {
		assert.Contains(t, users, user, "the page has no command for it")
	}
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for user, may := range users {
			d, ok := duties[user]
			require.True(t, ok, "no test for the user %q of the page", user)
			if d.newer && !s.Newer() {
				continue
			}
			t.Run(user, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				owner, _ := s.Connect(t)
				policy := d.policy
				policy.MaxRetries, policy.Backoff = 1, retry.Delays(200*time.Millisecond)
				topology := dutyTopology(t, policy, user)
				reported, err := d.once(t, s, owner, policy, topology, may)
				require.NoError(t, err, reported)
				if user == "worker-checked" {
					assert.NotContains(t, reported, "WARN", "it checks everything")
				}
				for _, row := range rows[user] {
					if row.only == "4.0" && s.Newer() || row.only == "4.3" && !s.Newer() {
						continue
					}
					less := may
					require.NotEqual(t, less[row.kind], row.pattern)
					less[row.kind] = row.pattern
					text := strings.ReplaceAll(row.reports, "vhost '/'", "vhost '"+s.VHost+"'")
					assert.NotContains(t, reported, text, "with all permissions")
					got, err := d.once(t, s, owner, policy, topology, less)
					// Exchanges are declared at once, and it is chance which one is refused first.
					report := strings.ReplaceAll(regexp.QuoteMeta(text), "'dead_letter_exchange'", "'[a-z_]+_exchange'")
					assert.Regexp(t, report, got, "%v: %v", less, err)
				}
			})
		}
	})
}

func dutyTopology(t *testing.T, policy retry.Policy, user string) declare.Topology {
	t.Helper()
	orders := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}
	topology, err := retry.Topology(policy, orders)
	if user == "retrier" {
		topology, err = retry.CentralTopology(policy, retry.CentralConfig{}, orders)
	}
	require.NoError(t, err)
	if user == "event-publisher" {
		topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "shop", Type: declare.ExchangeTopic})
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "shop", Queue: "orders", Key: "order.*"})
	}
	return topology
}

// once does the duty with these permissions. It returns the error, and, as one text, what the
// user's connection has logged and the error.
func (d duty) once(t *testing.T, s *suite.Site, owner *client.Conn, policy retry.Policy, topology declare.Topology, may [3]string) (string, error) {
	t.Helper()
	if d.bare {
		for _, q := range topology.Queues {
			s.HTTP(t, http.MethodDelete, "/queues/"+s.VHost+"/"+q.(declare.QuorumQueue).Name, nil, nil)
		}
		for _, x := range topology.Exchanges {
			s.HTTP(t, http.MethodDelete, "/exchanges/"+s.VHost+"/"+x.Name, nil, nil)
		}
	} else {
		suite.Apply(t, owner, topology)
		for _, queue := range []string{"orders", "orders.dead"} {
			s.HTTP(t, http.MethodDelete, "/queues/"+s.VHost+"/"+queue+"/contents", nil, nil)
		}
	}
	conn, log := suite.ConnectTo(t, s.User(t, may[0], may[1], may[2]))
	err := d.do(suite.Within(t), t, owner, conn, policy)
	reported := strings.Join(log.All(), "\n")
	if err != nil {
		reported += "\n" + err.Error()
	}
	return reported, err
}

func publishing(to address.Address) func(context.Context, *testing.T, *client.Conn, *client.Conn, retry.Policy) error {
	return func(ctx context.Context, _ *testing.T, _, user *client.Conn, _ retry.Policy) error {
		p, err := client.NewPublisher[suite.Order](ctx, user, to, client.PublisherConfig{})
		if err != nil {
			return err
		}
		return p.Publish(ctx, suite.Order{ID: 1})
	}
}

// retrying handles a message that fails once.
func retrying(ctx context.Context, t *testing.T, owner, user *client.Conn, policy retry.Policy) error {
	again := make(chan struct{}, 1)
	handler := retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
		if retry.Attempt(ctx) == 1 {
			return errors.New("not yet")
		}
		again <- struct{}{}
		return nil
	}))
	suite.Publish(t, suite.Publisher[suite.Order](t, owner, address.Queue("orders")), suite.Order{ID: 1})
	return until(ctx, again, func(ctx context.Context) error { return user.Consume(ctx, "orders", handler, client.ConsumerConfig{}) })
}

// until runs f until done has a value, and then ends it.
func until(ctx context.Context, done <-chan struct{}, f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-done:
	case <-ctx.Done():
		cancel()
		return errors.Join(errors.New("not done in time"), <-ended)
	}
	cancel()
	return <-ended
}

// deadLettered has one message in orders.dead.
func deadLettered(ctx context.Context, t *testing.T, owner *client.Conn, policy retry.Policy) {
	t.Helper()
	suite.Publish(t, suite.Publisher[suite.Order](t, owner, address.Queue("orders")), suite.Order{ID: 1})
	handler := retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error { return retry.Permanent(errors.New("no")) }))
	dead := make(chan struct{})
	go func() {
		defer close(dead)
		suite.Poll(t, "a dead letter", func() bool { return suite.Ready(t, owner, "orders.dead") == 1 })
	}()
	require.NoError(t, until(ctx, dead, func(ctx context.Context) error { return owner.Consume(ctx, "orders", handler, client.ConsumerConfig{}) }))
}

// listing reads a dead letter.
func listing(ctx context.Context, t *testing.T, owner, user *client.Conn, policy retry.Policy) error {
	deadLettered(ctx, t, owner, policy)
	d, err := desk.New(user, desk.Config{})
	require.NoError(t, err)
	list, err := d.List(ctx, desk.ListConfig{Queue: "orders.dead", Count: true})
	if err == nil {
		assert.EqualValues(t, 1, list.Matched)
	}
	return err
}

// replaying sends a dead letter back to its work queue.
func replaying(ctx context.Context, t *testing.T, owner, user *client.Conn, policy retry.Policy) error {
	deadLettered(ctx, t, owner, policy)
	d, err := desk.New(user, desk.Config{})
	require.NoError(t, err)
	report, err := d.Replay(ctx, desk.ReplayConfig{Queue: "orders.dead", All: true})
	if err != nil {
		return err
	}
	if report.Replayed != 1 || policy.ReplayByMove && report.Moved != 1 {
		text, err := json.Marshal(report)
		require.NoError(t, err)
		return fmt.Errorf("not replayed: %s", text)
	}
	suite.Poll(t, "the message is back", func() bool { return suite.Ready(t, owner, "orders") == 1 })
	return nil
}

// deploying declares everything from nothing.
func deploying(ctx context.Context, t *testing.T, _, user *client.Conn, policy retry.Policy) error {
	topology := dutyTopology(t, policy, "")
	_, err := declare.Apply(ctx, user.Management(), topology)
	if err == nil {
		_, err = declare.Apply(ctx, user.Management(), topology) // a second time changes nothing
	}
	return err
}

// retryingCentrally retries what a worker without retry.With rejects.
func retryingCentrally(ctx context.Context, t *testing.T, owner, user *client.Conn, policy retry.Policy) error {
	again := make(chan struct{}, 1)
	suite.Publish(t, suite.Publisher[suite.Order](t, owner, address.Queue("orders")), suite.Order{ID: 1})
	working, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- owner.Consume(working, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if retry.Count(d.Message()) == 0 {
				return client.Modify{DeadLetter: true}
			}
			again <- struct{}{}
			return nil
		}), client.ConsumerConfig{})
	}()
	err := until(ctx, again, func(ctx context.Context) error {
		return user.Consume(ctx, "failed_queue", retry.Central(policy, retry.CentralConfig{Queues: []string{"orders"}}), suite.CentralConsumer)
	})
	cancel()
	require.NoError(t, <-ended)
	return err
}
