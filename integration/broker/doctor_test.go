package broker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
)

// doctorNames waits until doctor names all of that. what is such as `error disk-alarm node "a"`, or
// the beginning of it.
func doctorNames(t *testing.T, s *suite.Site, api check.Reader, what ...string) {
	t.Helper()
	var last doctor.Report
	defer func() {
		if t.Failed() {
			t.Log(last.String())
		}
	}()
	suite.Poll(t, fmt.Sprintf("doctor names %q", what), func() bool {
		r, err := doctor.From(t.Context(), api, doctor.Options{VHost: s.VHost})
		require.NoError(t, err)
		last = r
		return !slices.ContainsFunc(what, func(w string) bool {
			return !slices.ContainsFunc(suite.Found(r), func(found string) bool { return strings.HasPrefix(found, w) })
		})
	})
}

// doctor names an alarm, which blocks every publisher, while it lasts.
func TestDoctorNamesAlarms(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		for _, alarm := range alarms {
			t.Run(alarm.name, func(t *testing.T) {
				named := func() bool {
					r, err := doctor.From(t.Context(), s.API(t), doctor.Options{VHost: s.VHost})
					require.NoError(t, err)
					return slices.ContainsFunc(r.Groups, func(g doctor.Group) bool { return g.Rule.ID == alarm.name+"-alarm" && g.Severity == "error" })
				}
				suite.Poll(t, "the end of an earlier test's alarm, which the statistics show for some seconds more", func() bool { return !named() })
				s.EvalOK(t, alarm.set)
				defer func() { s.EvalOK(t, alarm.clear) }()
				suite.Poll(t, "the alarm", named)
				s.EvalOK(t, alarm.clear)
				suite.Poll(t, "the end of the alarm", func() bool { return !named() })
			})
		}
	})
}

// magnified reads a broker's answers as if its queues had so many times more messages.
type magnified struct {
	check.Reader
	times int64
}

func (m magnified) Get(ctx context.Context, path string) ([]byte, error) {
	text, err := m.Reader.Get(ctx, path)
	if err != nil || !strings.HasPrefix(path, "/queues") {
		return text, err
	}
	var page struct {
		Items []map[string]any `json:"items"`
		Pages int              `json:"page_count"`
	}
	if err := json.Unmarshal(text, &page); err != nil {
		return nil, err
	}
	for _, q := range page.Items {
		for _, key := range []string{"messages_ready", "message_bytes"} {
			if n, ok := q[key].(float64); ok {
				q[key] = int64(n) * m.times
			}
		}
	}
	return json.Marshal(page)
}

// A queue without a length limit grows until the disk alarm blocks every publisher, also those to
// other queues. The limit is raised to just below what is free, so that some messages are enough, and
// doctor sees each of them as many.
func TestDoctorNamesAQueueThatGrowsIntoAnAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for _, queue := range []string{"orders", "other"} {
			s.DeclareQueue(t, queue, map[string]any{"x-queue-type": "classic"})
		}
		other := suite.PublisherOf(t, conn, address.Queue("other"))
		suite.Publish(t, other, "before")
		clear := func() {
			s.EvalOK(t, alarms[1].clear)
			suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
		}
		defer clear()
		grown := 0
		orders, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		for large := strings.Repeat("x", 1<<20); !alarmed(t, s); grown++ {
			require.Less(t, grown, 1000, "messages of 1 MiB")
			if grown%30 == 0 { // again, as others may free some disk
				s.EvalOK(t, "ok = rabbit_disk_monitor:set_disk_free_limit(rabbit_disk_monitor:get_disk_free() - 20000000).")
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			_ = orders.Publish(ctx, large)
			cancel()
		}
		suite.Report(t, s, "an alarm after %d messages of 1 MiB", grown)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Error(t, other.Publish(ctx, "a publisher that has nothing to do with it"))
		doctorNames(t, s, magnified{s.API(t), 1_000_000}, `warning oversized-queue queue "orders"`, "error disk-alarm node ")
	})
}

// The plugin for delayed messages isn't part of RabbitMQ. An exchange of its type outlives it, for
// instance in an upgrade to a version without it, and then closes the session of each publisher. The
// broker gets the exchange by a stand-in for the plugin's type, which disappears again.
func TestDoctorNamesAnExchangeOfAnUnsupportedPlugin(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		s.DeclareQueue(t, "orders", map[string]any{"x-queue-type": "classic"})
		const plugin = "exchange, <<\"x-delayed-message\">>"
		s.EvalOK(t, "rabbit_registry:register("+plugin+", rabbit_exchange_type_direct).")
		unload := func() { s.EvalOK(t, "rabbit_registry:unregister("+plugin+").") }
		defer unload()
		s.DeclareExchange(t, "later", "x-delayed-message", true, nil)
		s.Bind(t, "later", "orders", "orders")
		to := address.Exchange("later", "orders")
		require.IsType(t, &amqp.StateAccepted{}, s.Peer(t).Send(to, amqp.NewMessage([]byte("with the plugin"))))
		doctorNames(t, s, s.API(t), `warning delayed-message-plugin exchange "later"`)
		unload()
		conn, _ := s.Connect(t)
		p, err := client.NewPublisher[string](t.Context(), conn, to, client.PublisherConfig{NoResend: true})
		require.NoError(t, err)
		require.ErrorContains(t, p.Publish(t.Context(), "without the plugin"), "exchange type x-delayed-message not found")
		doctorNames(t, s, s.API(t), `warning delayed-message-plugin exchange "later"`)
		s.HTTP(t, http.MethodDelete, "/exchanges/"+s.VHost+"/later", nil, nil)
	})
}

// A broker lacks what its disabled feature flags enable, and accepts it once they are enabled. An
// upgrade leaves flags disabled; here a new node has none but the required ones.
func TestDoctorNamesDisabledFeatureFlags(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		if s.Newer() {
			return // all flags of 4.0 are required there, and those of 4.3 enable nothing that a client notices
		}
		const enable = "ok = rabbit_feature_flags:enable_all()."
		restarted(t, s, `ok = rabbit_db:reset(), application:set_env(rabbit, forced_feature_flags_on_init, [])`)
		s.HTTP(t, http.MethodPut, "/vhosts/"+s.VHost, nil, nil)
		local := func() int {
			status, _, err := s.HTTPStatus(http.MethodPut, "/exchanges/"+s.VHost+"/local", map[string]any{"type": "x-local-random", "durable": true, "arguments": map[string]any{}})
			require.NoError(t, err)
			return status
		}
		defer func() { s.EvalOK(t, enable) }()
		require.Equal(t, http.StatusBadRequest, local())
		doctorNames(t, s, s.API(t), `warning disabled-feature-flags broker "4.0.5"`)
		// The advice lists the machine versions of all quorum queues before.
		s.DeclareQueue(t, "orders", map[string]any{"x-queue-type": "quorum"})
		require.Regexp(t, `<<"orders">>},\d+}`, s.EvalOK(t, machineVersions(t)))
		s.EvalOK(t, enable)
		require.Equal(t, http.StatusCreated, local())
		r, err := doctor.From(t.Context(), s.API(t), doctor.Options{VHost: s.VHost})
		require.NoError(t, err)
		require.NotContains(t, strings.Join(suite.Found(r), "\n"), "disabled-feature-flags")
	})
}

// machineVersions is the expression of doctor's command that lists the machine versions of queues.
func machineVersions(t *testing.T) string {
	t.Helper()
	rules := doctor.Rules()
	i := slices.IndexFunc(rules, func(r audit.Rule) bool { return r.ID == "disabled-feature-flags" })
	_, after, _ := strings.Cut(rules[i].Fix, "rabbitmqctl eval '")
	expression, _, ok := strings.Cut(after, "'")
	require.True(t, ok, rules[i].Fix)
	return expression
}

// A broker that denies a deprecated feature, as a later version does, doesn't start while it is in use.
func TestDoctorNamesADeprecatedFeature(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() || s.HoldsPublished() {
			return // 4.4 denies it, and one version is enough
		}
		s.HTTP(t, http.MethodPut, "/queues/"+s.VHost+"/orders", map[string]any{"durable": false, "arguments": map[string]any{"x-queue-type": "classic"}}, nil)
		doctorNames(t, s, s.API(t), `warning deprecated-feature broker "transient_nonexcl_queues"`)
		const permitted = "application:set_env(rabbit, permit_deprecated_features, #{transient_nonexcl_queues => %v})"
		s.EvalOK(t, "ok = rabbit:stop(), "+fmt.Sprintf(permitted, false)+".")
		started := s.EvalOK(t, "catch rabbit:start().")
		restarted(t, s, fmt.Sprintf(permitted, true))
		require.Contains(t, started, "failed_to_deny_deprecated_features")
	})
}

// restarted stops RabbitMQ in its Erlang VM, evaluates expressions, and starts it again.
func restarted(t *testing.T, s *suite.Site, expressions string) {
	t.Helper()
	s.EvalOK(t, "ok = rabbit:stop(), "+expressions+", ok = rabbit:start().")
	suite.Poll(t, "the broker serves", func() bool {
		status, _, err := s.HTTPStatus(http.MethodGet, "/overview", nil)
		return err == nil && status == http.StatusOK
	})
}
