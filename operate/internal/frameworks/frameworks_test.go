package frameworks

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

// files are the definitions documents in testdata, and what each is recognized as.
var files = map[string]struct {
	name, variant string
	likely        bool // not certain
	// unclaimed are its queues and exchanges that aren't the framework's.
	unclaimed []string
}{
	"celery-classic":                   {name: "Celery"},
	"celery-quorum-delayed":            {name: "Celery", variant: "delayed delivery on quorum queues"},
	"celery-quorum-delayed-unbound":    {name: "Celery", variant: "delayed delivery on quorum queues", unclaimed: []string{"tasks", "tasks"}},
	"delayed-message-plugin":           {name: handBuilt, variant: "delayed-message plugin", unclaimed: []string{"email-queue", "error-exchange", "error-queue", "notification-exchange", "webhook-queue"}},
	"dramatiq":                         {name: "Dramatiq"},
	"headers-count":                    {name: handBuilt, variant: "headers exchange with a counter", unclaimed: []string{"failed", "orders"}},
	"laravel":                          {name: "Laravel"},
	"laravel-quorum":                   {name: "Laravel"},
	"laravel-quorum-vhost":             {name: "Laravel"},
	"laravel-reroute-failed":           {name: "Laravel"},
	"masstransit":                      {name: "MassTransit"},
	"masstransit-delayed":              {name: "MassTransit", variant: "delayed redelivery"},
	"masstransit-delivery-limit":       {name: "MassTransit"},
	"nservicebus":                      {name: "NServiceBus", variant: "conventional routing"},
	"nservicebus-9":                    {name: "NServiceBus", variant: "conventional routing"},
	"nservicebus-direct-v1":            {name: "NServiceBus", variant: "direct routing, delay infrastructure v1"},
	"nservicebus-endpoint-removed":     {name: "NServiceBus", variant: "conventional routing"},
	"per-message-ttl":                  {name: handBuilt, variant: "time to live of each message"},
	"rascal":                           {name: "Rascal", unclaimed: []string{"service"}},
	"rascal-no-way-back":               {name: "Rascal", unclaimed: []string{"dead_letters", "dead_letters:registration_service", "registration_service:user:delete", "registration_service:user:save", "service"}},
	"requeue-queue":                    {name: handBuilt, variant: "requeue queue", likely: true, unclaimed: []string{"notification-exchange"}},
	"sneakers-maxretry":                {name: "Sneakers"},
	"sneakers-maxretry-no-dead-letter": {name: "Sneakers"},
	"spring-cloud-stream":              {name: "Spring"},
	"spring-cloud-stream-retry":        {name: "Spring", variant: "retry by dead-letter queue"},
	"spring-cloud-stream-retry-lost":   {name: "Spring", variant: "retry by dead-letter queue"},
	"symfony-messenger":                {name: "Symfony Messenger"},
	"symfony-messenger-quorum":         {name: "Symfony Messenger"},
	"topic-delay-queues":               {name: handBuilt, variant: "topic delay queues"},
}

func load(t *testing.T, name string) check.Snapshot {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	require.NoError(t, err)
	d, err := audit.ParseDefinitions(text)
	require.NoError(t, err)
	require.Equal(t, []string{"app"}, d.VHosts())
	return d.Snapshot("app")
}

// Each document is recognized as its framework's, as nothing else, and as a whole.
func TestEachFrameworkIsRecognized(t *testing.T) {
	all, err := filepath.Glob("testdata/*.json")
	require.NoError(t, err)
	assert.Len(t, files, len(all), "each file has a row")
	for file, want := range files {
		t.Run(file, func(t *testing.T) {
			s := load(t, file)
			found := Recognize(s)
			require.Len(t, found, 1, "%+v", found)
			got := found[0]
			assert.Equal(t, want.name, got.Name)
			assert.Equal(t, want.variant, got.Variant)
			assert.Equal(t, !want.likely, got.Certain)
			assert.Equal(t, "app", got.VHost)
			assert.NotEmpty(t, got.Because)
			assert.NotContains(t, got.Because, `""`)
			assert.True(t, strings.HasPrefix(got.Docs, "https://"))
			if got.Central {
				assert.Contains(t, got.Cure, "central retrier")
			}
			assert.ElementsMatch(t, want.unclaimed, unclaimed(s, got), "what isn't recognized")
			for _, list := range [][]string{got.Queues, got.Exchanges} {
				assert.True(t, slices.IsSorted(list))
			}
		})
	}
}

// unclaimed are the queues and exchanges of s, except predeclared ones, that f doesn't contain.
func unclaimed(s check.Snapshot, f Framework) []string {
	left := []string{}
	for _, q := range s.Queues {
		if !slices.Contains(f.Queues, q.Name) {
			left = append(left, q.Name)
		}
	}
	for _, x := range s.Exchanges {
		if x.Name != "" && !strings.HasPrefix(x.Name, "amq.") && !slices.Contains(f.Exchanges, x.Name) {
			left = append(left, x.Name)
		}
	}
	return left
}

// hopback's own topologies are recognized with any names and any strategy, and nothing in
// them is taken for another framework's.
func TestHopbacksOwnTopologiesAreRecognized(t *testing.T) {
	two := retry.Delays(time.Second, time.Minute)
	orders := declare.QuorumQueue{Name: "orders"}
	policies := map[string]retry.Policy{
		"auto":        {MaxRetries: 2, Backoff: two},
		"republish":   {MaxRetries: 2, Backoff: two, Strategy: retry.StrategyRepublish},
		"dead-letter": {MaxRetries: 2, Backoff: two, Strategy: retry.StrategyDeadLetter},
		"native":      {MaxRetries: 2, Backoff: two, Strategy: retry.StrategyNative},
		"any delay":   {MaxRetries: 2, Backoff: two, AnyDelay: &retry.Ladder{}},
		"replay":      {MaxRetries: 2, Backoff: two, ReplayByMove: true},
		"prefix":      {MaxRetries: 2, Backoff: two, Names: retry.Names{Prefix: "team-a."}},
	}
	for name, p := range policies {
		t.Run(name, func(t *testing.T) {
			topology, err := retry.Topology(p, orders)
			require.NoError(t, err)
			wantHopback(t, topology, "retry")
			central, err := retry.CentralTopology(p, retry.CentralConfig{}, orders)
			if err == nil { // not every policy can be the central retrier's
				wantHopback(t, central, "retry")
			}
		})
	}
	for _, names := range []schedule.Names{{}, {Prefix: "team-a."}} {
		topology, err := schedule.Topology(names, "orders")
		require.NoError(t, err)
		topology.Queues = append(topology.Queues, orders)
		wantHopback(t, topology, "schedule", "orders")
		group, err := schedule.GroupTopology(names, "billing")
		require.NoError(t, err)
		wantHopback(t, group, "recurring")
	}
}

func wantHopback(t *testing.T, topology declare.Topology, variant string, besides ...string) {
	t.Helper()
	s := check.FromTopology(topology)
	found := Recognize(s)
	require.Len(t, found, 1, "%+v", found)
	got := found[0]
	assert.Equal(t, []string{"hopback", variant}, []string{got.Name, got.Variant})
	assert.True(t, got.Certain)
	assert.False(t, got.Central, "hopback needs no cure")
	assert.Empty(t, got.Cure)
	assert.Subset(t, append(besides, "retry_exchange"), unclaimed(s, got))
}

// Topologies of several frameworks in one virtual host don't hide each other.
func TestFrameworksInOneVirtualHostAreToldApart(t *testing.T) {
	var all check.Snapshot
	want := []string{}
	for _, file := range []string{"celery-quorum-delayed", "dramatiq", "laravel-reroute-failed", "masstransit", "nservicebus", "rascal", "sneakers-maxretry", "spring-cloud-stream", "symfony-messenger"} {
		s := load(t, file)
		all.Queues = append(all.Queues, s.Queues...)
		all.Exchanges = append(all.Exchanges, s.Exchanges...)
		all.Bindings = append(all.Bindings, s.Bindings...)
		want = append(want, files[file].name)
	}
	var got []string
	for _, f := range Recognize(all) {
		got = append(got, f.Name)
		assert.True(t, f.Certain, "%+v", f)
	}
	assert.Equal(t, want, got)
}

// An ordinary topology without retries is nobody's.
func TestOrdinaryTopologiesAreNobodys(t *testing.T) {
	assert.Equal(t, []Framework{}, Recognize(check.Snapshot{}))
	shop := declare.Topology{
		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}, {Name: "dead", Type: declare.ExchangeFanout}, {Name: "orders", Type: declare.ExchangeDirect}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeadLetter: declare.DeadLetterTarget{Exchange: "dead"}},
			declare.QuorumQueue{Name: "invoices", DeadLetter: declare.ToQueue("dead")},
			declare.QuorumQueue{Name: "dead"},
			declare.ClassicQueue{Name: "events", MessageTTL: time.Hour},
		},
		Bindings: []declare.Binding{
			{Source: "shop", Queue: "orders", Key: "order.#"}, {Source: "shop", Queue: "invoices", Key: "order.paid"},
			{Source: "dead", Queue: "dead"}, {Source: "orders", Queue: "orders", Key: "orders"}, {Source: "shop", Queue: "events", Key: "#"},
		},
	}
	assert.Equal(t, []Framework{}, Recognize(check.FromTopology(shop)))
}

// renamed is s with parts of names, keys, and dead-letter targets replaced.
func renamed(s check.Snapshot, pairs ...string) check.Snapshot {
	r := strings.NewReplacer(pairs...)
	for i, q := range s.Queues {
		args := map[string]any{}
		for k, v := range q.Arguments {
			if text, ok := v.(string); ok && k != "x-queue-type" && k != "x-dead-letter-strategy" {
				v = r.Replace(text)
			}
			args[k] = v
		}
		s.Queues[i].Name, s.Queues[i].Arguments = r.Replace(q.Name), args
	}
	for i := range s.Exchanges {
		s.Exchanges[i].Name = r.Replace(s.Exchanges[i].Name)
	}
	for i, b := range s.Bindings {
		s.Bindings[i].Source, s.Bindings[i].Key = r.Replace(b.Source), r.Replace(b.Key)
		s.Bindings[i].Queue, s.Bindings[i].Exchange = r.Replace(b.Queue), r.Replace(b.Exchange)
	}
	return s
}

// Names that a framework lets its users choose don't matter; where nothing but the shape is
// left, the match is only likely.
func TestNamesThatUsersChooseDontMatter(t *testing.T) {
	for _, test := range []struct {
		file    string
		pairs   []string
		certain bool
	}{
		{"celery-quorum-delayed", []string{"celery_delayed_", "shop_celery_delayed_", "tasks", "mails"}, true},
		{"celery-classic", []string{"celery.pidbox", "ours.pidbox", "emails", "mails"}, true},
		{"symfony-messenger", []string{"delay_messages_", "later-", "delays", "retries", "messages", "orders"}, true},
		{"laravel", []string{"default", "high.priority"}, true},
		{"spring-cloud-stream-retry", []string{"DLX", "team.DLX", "orders", "shop.orders"}, true},
		{"spring-cloud-stream", []string{"DLX", "graveyard"}, false},
		{"masstransit", []string{"shipping-label", "ours.labels", "Shop.Contracts:", "Ours:"}, true},
		{"nservicebus", []string{"Sales", "Verkauf", "Shop.Messages:", "Ours:"}, true},
		{"rascal", []string{"delay:1m", "ours:delay:1m", "delay.1m", "delay.1m", "delay", "ours:delay", "retry", "ours:retry"}, true},
		{"rascal", []string{"delay:1m", "later", "delay.1m", "later", "delay", "wait", "retry", "again"}, false},
		{"sneakers-maxretry", []string{"downloads-retry-requeue", "back", "downloads-retry", "later", "downloads-error", "failed"}, false},
		{"dramatiq", []string{"default", "a.b c", "mails", "ü"}, true},
		{"per-message-ttl", []string{"work_", "orders_"}, false},
		{"headers-count", []string{"retry-", "hold-", "reply", "back"}, true},
		{"topic-delay-queues", []string{"retry_exchange", "r", "requeue_exchange", "q", "delay_10s", "d1", "delay_60s", "d2"}, true},
	} {
		found := Recognize(renamed(load(t, test.file), test.pairs...))
		if assert.Len(t, found, 1, "%s: %+v", test.file, found) {
			assert.Equal(t, files[test.file].name, found[0].Name, "%s", test.pairs)
			assert.Equal(t, test.certain, found[0].Certain, "%s %s", test.file, test.pairs)
		}
	}
}

// Shapes that have no framework's names are recognized by what they do.
func TestShapesWithoutNamesAreHandBuiltRetries(t *testing.T) {
	for variant, s := range map[string]check.Snapshot{
		"ladder of delay queues": renamed(load(t, "nservicebus"), "nsb.v2.delay-level-", "level.", "nsb.v2.delay-delivery", "level.end", "NServiceBus:", "Ours."),
		"delay queue behind a dead-letter exchange": check.FromTopology(declare.Topology{
			Exchanges: []declare.Exchange{{Name: "later", Type: declare.ExchangeFanout}},
			Queues: []declare.Queue{
				declare.QuorumQueue{Name: "orders", DeadLetter: declare.DeadLetterTarget{Exchange: "later"}},
				declare.QuorumQueue{Name: "parked", MessageTTL: time.Minute, DeadLetter: declare.ToQueue("orders")},
			},
			Bindings: []declare.Binding{{Source: "later", Queue: "parked"}},
		}),
	} {
		var got []string
		for _, f := range Recognize(s) {
			if f.Name == handBuilt {
				got = append(got, f.Variant)
				assert.False(t, f.Certain)
				assert.True(t, f.Central)
			}
		}
		assert.Equal(t, []string{variant}, got)
	}
}

// Anonymous queues of Spring's consumers are theirs. A name that only starts like one isn't.
func TestAnonymousQueuesOfSpring(t *testing.T) {
	for name, want := range map[string]int{
		"orders.anonymous.abcdefghijklmnopqrstuv": 1, "spring.gen-abcdefghijklmnopqrstuv": 1,
		"orders.anonymous.short": 0, "my-spring.gen-abcdefghijklmnopqrstuv": 0, ".anonymous.": 0,
	} {
		assert.Len(t, Recognize(check.Snapshot{Queues: []declare.QueueInfo{{Name: name, Type: "classic", AutoDelete: true}}}), want, "%q", name)
	}
}

// Names may be anything.
func TestHostileNamesHarmNothing(t *testing.T) {
	for _, name := range []string{"", "*", "#", "a.b.*", "\x00", "\xff\xfe", `"`, "](", "x'; drop", strings.Repeat("*.", 120) + "1.#", strings.Repeat("ü", 127), "-", "_", ".", ".delay.", "_retry", "_2026-11-24", ".dlq", "-retry", "_error", ".XQ", "celery_delayed_", "celery_delayed_9999999999999999999999"} {
		for _, dead := range []string{"", name, name + "-requeue"} {
			s := check.Snapshot{
				Queues: []declare.QueueInfo{
					{Name: name, Type: "classic", Arguments: map[string]any{"x-message-ttl": int64(1), "x-expires": int64(-1), "x-dead-letter-exchange": dead, "x-dead-letter-routing-key": name}},
					{Name: name + ".dlq", Type: name, Arguments: map[string]any{"x-message-ttl": "1", "x-expires": 1.5, "x-dead-letter-exchange": 7}},
				},
				Exchanges: []check.ExchangeInfo{
					{Name: name, Type: "topic", Arguments: map[string]any{"alternate-exchange": name}},
					{Name: name + "_", Type: "headers", Arguments: map[string]any{"alternate-exchange": name}},
				},
				Bindings: []declare.Binding{
					{Source: name, Queue: name, Key: "1.#"}, {Source: name, Exchange: name, Key: "0.#"}, {Source: name, Exchange: name, Key: "*.0.#"},
					{Source: name, Queue: "nowhere"}, {Source: "nowhere", Exchange: name}, {Source: name + "_", Queue: name, Headers: map[string]any{name: int64(1)}},
				},
			}
			for _, f := range Recognize(s) {
				assert.Less(t, len(f.Because), 1000)
				assert.NotContains(t, f.Because, "\x00")
				assert.NotContains(t, f.Because, "\xff")
			}
		}
	}
}

// Time is in proportion to the size, for large topologies and for shapes that make each look-up
// long: everything bound to one exchange, everything dead-lettering to one queue.
func TestLargeVirtualHostsAreRecognizedQuickly(t *testing.T) {
	if explore.UnderRace {
		t.Skip("there is one goroutine")
	}
	const n = 10_000
	shapes := map[string]func(i int) (declare.QueueInfo, []declare.Binding){
		"sneakers": func(i int) (declare.QueueInfo, []declare.Binding) {
			name := fmt.Sprintf("q%d-retry", i)
			return classic(name, map[string]any{"x-dead-letter-exchange": "back", "x-message-ttl": int64(1000)}), []declare.Binding{{Source: name, Queue: name, Key: "#"}, {Source: "back", Queue: name, Key: "#"}}
		},
		"symfony": func(i int) (declare.QueueInfo, []declare.Binding) {
			name := fmt.Sprintf("delay_messages_%d_retry", i+1)
			return classic(name, map[string]any{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "messages", "x-message-ttl": int64(i + 1), "x-expires": int64(i + 10_001)}), []declare.Binding{{Source: "delays", Queue: name, Key: name}, {Source: "delays", Queue: "messages", Key: name}}
		},
		"spring": func(i int) (declare.QueueInfo, []declare.Binding) {
			name := fmt.Sprintf("orders.billing-%d", i)
			return classic(name, map[string]any{"x-dead-letter-exchange": "DLX", "x-dead-letter-routing-key": name}), []declare.Binding{{Source: "orders", Queue: name, Key: "#"}, {Source: "DLX", Queue: "orders.billing.dlq", Key: name}}
		},
		"per-message ttl": func(i int) (declare.QueueInfo, []declare.Binding) {
			name := fmt.Sprintf("retry%d", i)
			return classic(name, map[string]any{"x-dead-letter-exchange": "back"}), []declare.Binding{{Source: "orders", Queue: name}, {Source: "back", Queue: name}}
		},
		"wait queues": func(i int) (declare.QueueInfo, []declare.Binding) {
			name := fmt.Sprintf("q%d", i)
			return classic(name, map[string]any{"x-dead-letter-exchange": "back", "x-message-ttl": int64(i % 2)}), []declare.Binding{{Source: "back", Queue: name}, {Source: "back", Queue: "messages", Key: name}}
		},
	}
	for name, shape := range shapes {
		s := check.Snapshot{Queues: []declare.QueueInfo{classic("messages", nil), classic("orders.billing.dlq", nil)}}
		for x, kind := range map[string]declare.ExchangeType{"back": "topic", "delays": "direct", "DLX": "direct", "orders": "topic"} {
			s.Exchanges = append(s.Exchanges, check.ExchangeInfo{Name: x, Type: kind})
		}
		for i := range n {
			q, bindings := shape(i)
			s.Queues, s.Bindings = append(s.Queues, q), append(s.Bindings, bindings...)
			s.Exchanges = append(s.Exchanges, check.ExchangeInfo{Name: q.Name, Type: "topic"})
		}
		// Of several runs the quickest: the machine may be busy.
		best := time.Hour
		for range 3 {
			start := time.Now()
			found := Recognize(s)
			best = min(best, time.Since(start))
			require.NotEmpty(t, found, name)
		}
		t.Logf("%s: %v for %d queues and %d bindings", name, best, len(s.Queues), len(s.Bindings))
		assert.Less(t, best, time.Minute, name)
	}
}

func classic(name string, args map[string]any) declare.QueueInfo {
	return declare.QueueInfo{Name: name, Type: "classic", Durable: true, Arguments: args}
}

// No definitions document makes it panic, and only names that exist are listed.
func FuzzRecognize(f *testing.F) {
	all, err := filepath.Glob("testdata/*.json")
	require.NoError(f, err)
	for _, path := range all {
		text, err := os.ReadFile(path)
		require.NoError(f, err)
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := audit.ParseDefinitions(text)
		if err != nil {
			return
		}
		for _, vhost := range append(d.VHosts(), "") {
			s := d.Snapshot(vhost)
			for _, found := range Recognize(s) {
				for _, name := range found.Queues {
					assert.True(t, slices.ContainsFunc(s.Queues, func(q declare.QueueInfo) bool { return q.Name == name }))
				}
				for _, name := range found.Exchanges {
					assert.True(t, slices.ContainsFunc(s.Exchanges, func(x check.ExchangeInfo) bool { return x.Name == name }))
				}
			}
		}
	})
}
