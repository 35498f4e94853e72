package integration

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// knownBugs are the faults that were reproduced in the official Go client (o), in
// go-amqp (g) or in a broker, and the tests which show that hopback isn't hit.
var knownBugs = []struct {
	no    int
	in    string
	fault string
	tests string // package folder and name; integration where none is named
}{
	{1, "o", "a consumer whose attach failed is attached after a reconnect, and swallows messages", "TestRefusedConsumerIsNoGhostAfterAReconnect"},
	{2, "o", "the socket of a failed open stays, and starts a second recovery; receivers survive Close", "TestFailedOpensLeaveNothingBehind"},
	{3, "o", "recovery redeclares queues without their arguments", "TestQueueThatIsDeletedAndDeclaredAgainKeepsItsArguments"},
	{4, "g", "Send returns nil for a message that was released", "TestPublishToNowhereIsErrUnroutable adapter/officialclient/integration.TestUnroutableForwardKeepsTheOriginal"},
	{5, "4.0, o", "an attach to a missing queue ends the session that others share", "TestAttachingToWhatIsMissingHarmsNobodyElse"},
	{6, "o", "unbinding with arguments does nothing", "TestBindingWithArgumentsIsDeleted"},
	{7, "g", "closing the session before the receiver counts all that is prefetched", "TestDrainGivesBackWhatNoHandlerHasBegun TestGracefulRestartsCostNoMessageItsDeliveries client.TestDrainKeepsTheOrderThatLeavesDeliveryCountsAlone"},
	{8, "g", "an annotation or error text that can't be encoded or is too large closes the connection", "TestHostileOutcomesLeaveTheConnectionAlone client.TestConsumerCutsErrorTextsToWhatASettlementCanCarry"},
	{9, "g", "a message without a body, or with a bad annotation key, ends the link or session", "TestHostileMessagesAreRefusedBeforeTheyAreSent client.TestValidateRefusesWhatWouldEndTheLink"},
	{10, "g", "after a cancel amid a large message the next message kills the link", "TestCancelledPublishesHarmNobodyElse"},
	{11, "g", "a ctx's deadline becomes a write deadline and closes the connection", "TestCancelledPublishesHarmNobodyElse client.TestWhatIsNotAnsweredIsGivenUp"},
	{12, "g", "the 65th session closes the connection, the 257th link ends the session", "TestSessionTooManyIsErrSessionLimit TestForwardsToMoreAddressesThanASessionHasLinks"},
	{13, "g", "delivery-id 2³²-1 hangs the session", "TestSessionsAreReplacedLongBeforeTheirDeliveryIDsEnd TestDeliveryIDsOfASessionBeginAtZero client.TestConsumerReplacesItsSessionWithNothingUnsettled client.TestSenderReplacesItsSessionInOrder"},
	{14, "o", "management replies are mixed up by concurrent callers and after a timeout", "TestConcurrentManagementRequestsGetTheirOwnReplies TestTimedOutManagementRequestDoesNotHarmTheNext"},
	{15, "o", "the management's session dies of a malformed name, for ever", "TestManagementComesBackAfterItsSessionEnded TestManagementRefusalDoesNotFailOtherRequests client.TestManagementRefusesRequestsThatWouldEndTheSession"},
	{16, "g", "ctx isn't heeded without credit or with the session's window full", "TestAlarmStopsPublishingAndNothingElse client.TestSenderCloseCutsOffWhenItsContextEnds"},
	{17, "o", "an undrained state channel blocks recovery; Close never ends; Receive spins", "TestOutageIsWaitedForWithoutSpinning TestObserverThatHangsHoldsNothingUp TestCloseEndsInEveryState"},
	{18, "4.3, g", "the consumer timeout starves a consumer silently; the late accept says nil", "TestConsumerTimeoutEndsTheHandlersContextAndBlocksTheLateSettlement"},
	{19, "o", "panics: purge of a missing queue, int arguments, nil of every kind", "TestNilAndMissingAreErrorsAndNoPanics TestQueueArgumentsReachTheBrokerWithTheirTypes"},
	{20, "g", "a message with a char or decimal ends the link, on 4.3 for ever; one nested deeply enough overflows the stack; a binary for a key in a footer is a panic", "TestMessagesThatCannotBeDecodedHarmNoOthers internal/message.TestWhatIsNotDecodable client.TestHostileServers"},
	{21, "g", "an array of ints or longs with one below -128 and none above 127 is cut to its lowest bytes", "client.TestValidateRefusesArraysThatWouldBeCut bench/interop.TestEveryTypeBetweenProtonAndHopback"},
}

// Every fault has a test, and every test named above exists.
func TestEveryKnownBugHasATest(t *testing.T) {
	t.Parallel()
	exists := map[string]bool{}
	require.NoError(t, filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		folder := filepath.ToSlash(filepath.Dir(strings.TrimPrefix(path, ".."+string(filepath.Separator))))
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				exists[folder+"."+fn.Name.Name] = true
			}
		}
		return nil
	}))
	var numbers []int
	for _, b := range knownBugs {
		numbers = append(numbers, b.no)
		assert.NotEmpty(t, b.tests, "B%d", b.no)
		for name := range strings.FieldsSeq(b.tests) {
			if !strings.Contains(name, ".") {
				name = "integration." + name
			}
			assert.True(t, exists[name], "B%d: there is no %s", b.no, name)
		}
	}
	var all []int
	for i := range 21 {
		all = append(all, i+1)
	}
	assert.Equal(t, all, slices.Compact(numbers))
}

// eventually publishes until the broker accepts, as a caller does that may make
// duplicates.
func eventually[T any](t *testing.T, p *client.Publisher[T], v T) {
	t.Helper()
	var last error
	poll(t, "it is published", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		last = p.Publish(ctx, v)
		if last != nil {
			t.Logf("publish: %v", last)
		}
		return last == nil
	})
}

func countIn(counts *sync.Map, d *client.Delivery) int64 {
	n, _ := counts.LoadOrStore(string(d.Message().GetData()), new(atomic.Int64))
	return n.(*atomic.Int64).Add(1)
}

// B1: what was refused is over, whatever becomes of the connection later.
func TestRefusedConsumerIsNoGhostAfterAReconnect(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		wire, through := s.through(t)
		conn, _ := connectTo(t, through, soon)
		var ghost atomic.Int64
		for range 3 {
			err := conn.Consume(t.Context(), "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
				ghost.Add(1)
				return nil
			}), client.ConsumerConfig{})
			require.ErrorIs(t, err, client.ErrNotFound)
		}
		_, err := client.NewPublisher[order](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.ErrorIs(t, err, client.ErrNotFound)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		for range 3 {
			require.Positive(t, wire.Cut())
			poll(t, "it is back", func() bool {
				_, err := declare.Inspect(t.Context(), conn.Management(), "orders")
				return err == nil
			})
			awaitConsumers(t, conn, "orders", 0)
		}
		got := make(chan int, 100)
		consume(t, conn, "orders", client.JSON(func(_ context.Context, o order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		p := publisher[order](t, conn, address.Queue("orders"))
		for i := range 50 {
			publish(t, p, order{ID: i})
			assert.Equal(t, i, await(t, got, "a message"))
		}
		assert.Zero(t, ghost.Load())
	})
}

// B2: attempts to reconnect that end anywhere in the handshake leave no connection
// behind, and Close leaves no consumer.
func TestFailedOpensLeaveNothingBehind(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		wire, through := s.through(t)
		conn, log := connectTo(t, through, soon, func(c *client.Config) { c.ConnectTimeout = 1500 * time.Millisecond })
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		got := make(chan int, 1000)
		for range 3 {
			consume(t, conn, "orders", client.JSON(func(_ context.Context, o order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		}
		p := publisher[order](t, conn, address.Queue("orders"))
		for i := range 10 {
			// Each attempt gets as far as the proxy is quick to fall silent.
			failed := len(log.with("reconnecting failed"))
			wire.Stall()
			wire.Cut()
			poll(t, "attempts have failed", func() bool { return len(log.with("reconnecting failed")) > failed+1 })
			wire.Resume()
			if i%2 == 0 {
				time.Sleep(time.Duration(i) * 3 * time.Millisecond)
				wire.Cut()
			}
			eventually(t, p, order{ID: i})
		}
		awaitConsumers(t, conn, "orders", 3)
		poll(t, "one connection is open", func() bool { return wire.Open() == 1 })
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		require.NoError(t, conn.Close(ctx))
		poll(t, "no connection is open", func() bool { return wire.Open() == 0 })
		accepted := wire.Accepted()
		other, _ := s.connect(t)
		awaitConsumers(t, other, "orders", 0)
		assert.Equal(t, accepted, wire.Accepted(), "nobody tries again after Close")
	})
}

// B3: hopback declares nothing by itself. A queue that is deleted while it is
// consumed from stays so until its owner declares it, and has its arguments then.
func TestQueueThatIsDeletedAndDeclaredAgainKeepsItsArguments(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		wire, through := s.through(t)
		conn, log := connectTo(t, through, soon)
		topology := declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 3, MaxLength: 1000, DeadLetter: declare.ToQueue("dead")},
		}}
		apply(t, conn, topology)
		arguments := func() map[string]any {
			var q struct {
				Arguments map[string]any `json:"arguments"`
			}
			s.http(t, http.MethodGet, "/queues/"+s.vhost+"/orders", nil, &q)
			return q.Arguments
		}
		before := arguments()
		require.Contains(t, before, "x-dead-letter-exchange")
		var attempts sync.Map
		got := make(chan int, 100)
		consume(t, conn, "orders", client.JSON(func(ctx context.Context, o order) error {
			d, _ := client.DeliveryFrom(ctx)
			if n := countIn(&attempts, d); o.ID < 0 {
				return fmt.Errorf("attempt %d fails", n)
			}
			got <- o.ID
			return nil
		}), client.ConsumerConfig{})
		p := publisher[order](t, conn, address.Queue("orders"))
		publish(t, p, order{ID: 1})
		require.Equal(t, 1, await(t, got, "the first"))
		for round := range 3 {
			_, err := declare.DeleteQueue(t.Context(), conn.Management(), "orders")
			require.NoError(t, err)
			said := len(log.with("consuming failed", "not found"))
			if round > 0 {
				wire.Cut()
			}
			poll(t, "the consumer says what is missing", func() bool { return len(log.with("consuming failed", "not found")) > said+1 })
			status, _, err := s.httpStatus(http.MethodGet, "/queues/"+s.vhost+"/orders", nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusNotFound, status, "nobody declares it but its owner")
			poll(t, "its owner declares it", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				_, err := declare.Apply(ctx, conn.Management(), topology)
				return err == nil
			})
			assert.Equal(t, before, arguments())
			eventually(t, p, order{ID: 10 + round})
			for await(t, got, "a message of the new queue") != 10+round {
			}
			// Its limits hold: a message that always fails is dead-lettered.
			eventually(t, p, order{ID: -1 - round})
			poll(t, "it is in the dead-letter queue", func() bool { return ready(t, conn, "dead") > round })
			poll(t, "delivery limit of 3", func() bool {
				var n int64
				attempts.Range(func(k, v any) bool {
					if strings.Contains(k.(string), fmt.Sprint(-1-round)) {
						n = v.(*atomic.Int64).Load()
					}
					return true
				})
				return n >= 4
			})
		}
	})
}

// B6: two bindings that differ in their arguments alone are told apart.
func TestBindingWithArgumentsIsDeleted(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		binding := func(tenant string) declare.Binding {
			return declare.Binding{Source: "amq.headers", Queue: "orders", Headers: map[string]any{"tenant": tenant, "n": int64(7)}}
		}
		topology := queueOf(declare.QuorumQueue{Name: "orders"})
		topology.Bindings = []declare.Binding{binding("a"), binding("b")}
		apply(t, conn, topology)
		p := publisher[order](t, conn, address.Exchange("amq.headers", ""))
		to := func(tenant string) error {
			return p.Publish(t.Context(), order{}, func(m *client.Message) {
				m.ApplicationProperties = map[string]any{"tenant": tenant, "n": int64(7)}
			})
		}
		require.NoError(t, to("a"))
		require.NoError(t, to("b"))
		require.NoError(t, declare.DeleteBinding(t.Context(), conn.Management(), binding("a")))
		require.ErrorIs(t, to("a"), client.ErrUnroutable)
		require.NoError(t, to("b"))
	})
}

// B12: a session has 256 links, and forwards to more addresses than that go out.
func TestForwardsToMoreAddressesThanASessionHasLinks(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const addresses = 300
		conn, log := s.connect(t)
		topology := queueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "sink", DeadLetter: declare.Drop()})
		topology.Bindings = []declare.Binding{{Source: "amq.topic", Queue: "sink", Key: "to.#"}}
		apply(t, conn, topology)
		p := publisher[order](t, conn, address.Queue("orders"))
		var sent sync.WaitGroup
		for i := range addresses {
			sent.Go(func() { assert.NoError(t, p.Publish(t.Context(), order{ID: i})) })
		}
		sent.Wait()
		consume(t, conn, "orders", client.JSON(func(ctx context.Context, o order) error {
			d, _ := client.DeliveryFrom(ctx)
			return client.Forward{To: address.Exchange("amq.topic", fmt.Sprintf("to.%d", o.ID)), Message: client.Copy(d.Message())}
		}), client.ConsumerConfig{Concurrency: 16, Prefetch: addresses})
		seen := map[string]bool{}
		for _, m := range s.peer(t).take("sink", addresses) {
			seen[string(m.GetData())] = true
		}
		assert.Len(t, seen, addresses)
		poll(t, "all originals are accepted", func() bool { return ready(t, conn, "orders") == 0 })
		assert.Empty(t, log.with("lost"))
		assert.Zero(t, ready(t, conn, "sink"), "each once")
	})
}

// B17: while there is no broker nothing spins, whoever listens to the connection's
// state can't hold up its recovery, and what runs goes on afterwards.
func TestOutageIsWaitedForWithoutSpinning(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		wire, through := s.through(t)
		stuck := make(chan struct{})
		conn, log := connectTo(t, through, func(c *client.Config) {
			c.Reconnect = client.ReconnectBackoff{Min: 50 * time.Millisecond, Max: 200 * time.Millisecond}
			c.Observe = func(client.Event) { <-stuck }
		})
		t.Cleanup(func() { close(stuck) })
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		got := make(chan int, 1000)
		for range 4 {
			consume(t, conn, "orders", client.JSON(func(_ context.Context, o order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		}
		p := publisher[order](t, conn, address.Queue("orders"))
		publish(t, p, order{ID: 1})
		require.Equal(t, 1, await(t, got, "the first"))

		wire.Refuse()
		wire.Cut()
		poll(t, "it has noticed", func() bool { return len(log.with("connection lost")) > 0 })
		began := time.Now()
		lines := len(log.all())
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		err := p.Publish(ctx, order{ID: 2})
		cancel()
		require.ErrorIs(t, err, client.ErrNotSent)
		took := time.Since(began)
		// A pause is 100 ms on average, and each attempt makes a line.
		assert.Less(t, len(log.all())-lines, 20+int(took/(10*time.Millisecond)), "attempts, and nothing else, make lines")
		require.NoError(t, wire.Admit())
		eventually(t, p, order{ID: 3})
		for await(t, got, "a message") != 3 {
		}
	})
}

// B19: what is missing or nil is an error.
func TestNilAndMissingAreErrorsAndNoPanics(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, log := s.connect(t)
		ctx := t.Context()
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		m := conn.Management()
		raw := publisher[*client.Message](t, conn, address.Queue("orders"))
		var nobody *declare.QuorumQueue
		for what, call := range map[string]func() error{
			"purge of a missing queue": func() error { _, err := declare.Purge(ctx, m, "missing"); return err },
			"look at a missing queue":  func() error { _, err := declare.Inspect(ctx, m, "missing"); return err },
			"a typed nil queue": func() error {
				_, err := declare.Apply(ctx, m, declare.Topology{Queues: []declare.Queue{nobody}})
				return err
			},
			"a nil queue": func() error {
				_, err := declare.Apply(ctx, m, declare.Topology{Queues: []declare.Queue{nil}})
				return err
			},
			"a nil requester": func() error { _, err := declare.Apply(ctx, nil, queueOf(declare.QuorumQueue{Name: "x"})); return err },
			"a typed nil requester": func() error {
				_, err := declare.Apply(ctx, (*client.Management)(nil), queueOf(declare.QuorumQueue{Name: "x"}))
				return err
			},
			"a nil connection": func() error {
				_, err := client.NewPublisher[order](ctx, nil, address.Queue("orders"), client.PublisherConfig{})
				return err
			},
			"a nil connection to consume from": func() error {
				return (*client.Conn)(nil).Consume(ctx, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
			},
			"a nil message":    func() error { return raw.Publish(ctx, nil) },
			"an empty message": func() error { return raw.Publish(ctx, &client.Message{}) },
			"a nil handler":    func() error { return conn.Consume(ctx, "orders", nil, client.ConsumerConfig{}) },
			"a nil func":       func() error { return conn.Consume(ctx, "orders", client.HandlerFunc(nil), client.ConsumerConfig{}) },
			"no queue": func() error {
				return conn.Consume(ctx, "", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
			},
			"a bind to the missing": func() error {
				_, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{{Source: "missing", Queue: "orders", Key: "k"}}})
				return err
			},
		} {
			assert.NotPanics(t, func() { assert.Error(t, call(), what) }, what)
		}
		n, err := declare.DeleteQueue(ctx, m, "missing")
		assert.NoError(t, err)
		assert.Zero(t, n)
		publish(t, raw, client.NewMessage([]byte("lives")), nil)
		assert.Empty(t, log.with("connection lost"))
	})
}
