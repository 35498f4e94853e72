package outbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	realbroker "github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
)

// strict is a broker with a user whose permission to write can change.
type strict struct {
	admin  *client.Conn
	relay  *client.Conn // the user's
	permit func(t *testing.T, write string)
}

const only = "^amq.default$" // queues may be published to, but no exchange

func strictInMemory(t *testing.T, version string) *strict {
	b := hopbacktest.Start(t, hopbacktest.Config{Version: version})
	b.AddUser("relay", "relay")
	permit := func(t *testing.T, write string) {
		require.NoError(t, b.SetPermissions("relay", "/", "", write, ""))
	}
	permit(t, only)
	connect := func(u string) *client.Conn {
		conn, err := client.Connect(t.Context(), u, client.Config{Dial: b.Dial, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
		return conn
	}
	u, err := url.Parse(b.URL())
	require.NoError(t, err)
	u.User = url.UserPassword("relay", "relay")
	return &strict{admin: connect(b.URL()), relay: connect(u.String()), permit: permit}
}

func strictReal(t *testing.T, version string) *strict {
	brokers, err := realbroker.Need(t.Context(), os.Stderr, version)
	require.NoError(t, err)
	b := brokers[0]
	t.Cleanup(func() { assert.NoError(t, b.Release(context.Background())) })
	name := fmt.Sprintf("outbox-%d-%d", os.Getpid(), time.Now().UnixNano())
	call := func(t *testing.T, method, path string, body any) {
		text, err := json.Marshal(body)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, method, b.ManagementURL+"/api"+path, bytes.NewReader(text))
		require.NoError(t, err)
		answer, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		require.NoError(t, err)
		defer answer.Body.Close()
		require.Less(t, answer.StatusCode, 300, "%s %s", method, path)
	}
	call(t, http.MethodPut, "/vhosts/"+name, map[string]any{})
	t.Cleanup(func() { call(t, http.MethodDelete, "/vhosts/"+name, nil) })
	call(t, http.MethodPut, "/users/"+name, map[string]any{"password": name, "tags": ""})
	t.Cleanup(func() { call(t, http.MethodDelete, "/users/"+name, nil) })
	permit := func(t *testing.T, write string) {
		call(t, http.MethodPut, "/permissions/"+name+"/"+name, map[string]any{"configure": "", "write": write, "read": ""})
	}
	permit(t, only)
	u, err := url.Parse(b.URL)
	require.NoError(t, err)
	u.Path = "/" + name
	connect := func() *client.Conn {
		conn, err := client.Connect(t.Context(), u.String(), client.Config{Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
		return conn
	}
	s := &strict{admin: connect(), permit: permit}
	u.User = url.UserPassword(name, name)
	s.relay = connect()
	return s
}

// forEachStrict runs a test with brokers in memory, or with real ones if
// HOPBACK_TEST_BROKERS is "real".
func forEachStrict(t *testing.T, test func(t *testing.T, s *strict, order outbox.Order)) {
	t.Parallel()
	begin, versions := strictInMemory, map[string]string{"4.3": "4.3.6", "4.0": "4.0.5"}
	if os.Getenv("HOPBACK_TEST_BROKERS") == "real" {
		begin, versions = strictReal, map[string]string{"4.3": "4.3", "4.0": "4.0"}
	}
	for name, version := range versions {
		for _, order := range orders {
			if os.Getenv("HOPBACK_LONG") == "" && (order == outbox.OrderByKey) != (name == "4.0") {
				continue // each version, and each order
			}
			t.Run(name+"/"+string(order), func(t *testing.T) {
				t.Parallel()
				test(t, begin(t, version), order)
			})
		}
	}
}

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

// What is missing on the broker or forbidden there is no fault of the messages: they wait,
// others pass them, and they are published once it is fixed.
func TestWhatTheBrokerLacksIsHeldAgainstNoMessage(t *testing.T) {
	forEachStrict(t, func(t *testing.T, s *strict, order outbox.Order) {
		pool := pgtest.Database(t)
		pgtest.Queues(t, s.admin, "orders", "secrets")
		secret := declare.Topology{Exchanges: []declare.Exchange{{Name: "secret", Type: declare.ExchangeFanout}}, Bindings: []declare.Binding{{Source: "secret", Queue: "secrets"}}}
		_, err := declare.Apply(t.Context(), s.admin.Management(), secret)
		require.NoError(t, err)
		p := outbox.Publisher[string]{Key: func(v string) string { return v }}
		send := func(to address.Address, what string, n int) {
			for i := range n {
				_, err := p.Publish(t.Context(), pool, fmt.Sprint(what, i), client.PublishTo(to))
				require.NoError(t, err)
			}
		}
		send(address.Exchange("secret", "x"), "forbidden", 2)
		send(address.Queue("orders"), "order", 100)
		log := &lines{}
		relay, _ := pgtest.Run(t, pool, s.relay, outbox.RelayConfig{Order: order, Retry: 100 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(log, nil))})
		got := pgtest.Watch(t, s.admin, "orders")
		distinct := func(all []string) int {
			m := map[string]bool{}
			for _, v := range all {
				m[v] = true
			}
			return len(m)
		}
		arrive := func(got *pgtest.Seen, n int) {
			t.Helper()
			require.Eventually(t, func() bool { return distinct(got.All()) == n }, 3*time.Minute, 5*time.Millisecond)
		}
		arrive(got, 100)
		require.Eventually(t, func() bool { return left(t, pool) == 2 && log.has("accepts nothing for an address") }, 3*time.Minute, 10*time.Millisecond)
		// Now it is known, and others don't even come twice.
		before := len(got.All())
		send(address.Queue("orders"), "later", 100)
		arrive(got, 200)
		assert.Len(t, got.All(), before+100, "a message that is forbidden spoils no other")
		require.Eventually(t, func() bool { return left(t, pool) == 2 }, 3*time.Minute, 10*time.Millisecond)

		s.permit(t, ".*")
		send(address.Exchange("missing", "x"), "early", 1)
		arrive(pgtest.Watch(t, s.admin, "secrets"), 2)
		require.Eventually(t, func() bool { return left(t, pool) == 1 && log.has("doesn't accept messages") }, 3*time.Minute, 10*time.Millisecond)
		_, err = declare.Apply(t.Context(), s.admin.Management(), declare.Topology{Exchanges: []declare.Exchange{{Name: "missing", Type: declare.ExchangeFanout}}, Bindings: []declare.Binding{{Source: "missing", Queue: "orders"}}})
		require.NoError(t, err)
		arrive(got, 201)
		require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)
		assert.Zero(t, relay.Stats().SetAside)
	})
}

// After SetAsideAfter all that wait for a forbidden exchange are set aside, and no other.
func TestWhatIsForbiddenForLongIsSetAside(t *testing.T) {
	forEachStrict(t, func(t *testing.T, s *strict, order outbox.Order) {
		pool := pgtest.Database(t)
		pgtest.Queues(t, s.admin, "orders")
		_, err := declare.Apply(t.Context(), s.admin.Management(), declare.Topology{Exchanges: []declare.Exchange{{Name: "secret", Type: declare.ExchangeFanout}}})
		require.NoError(t, err)
		p := outbox.Publisher[int]{To: address.Exchange("secret", "x")}
		_, err = p.PublishAll(t.Context(), pool, make([]int, 2))
		require.NoError(t, err)
		_, err = outbox.Publisher[int]{To: address.Queue("orders")}.PublishAll(t.Context(), pool, make([]int, 20))
		require.NoError(t, err)
		got := pgtest.Watch(t, s.admin, "orders")
		pgtest.Run(t, pool, s.relay, outbox.RelayConfig{Order: order, Retry: 50 * time.Millisecond, SetAsideAfter: 200 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
		got.Await(t, 20)
		require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)
		var n int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox_set_aside WHERE address = '/exchanges/secret/x' AND reason LIKE '%refused%'").Scan(&n))
		assert.Equal(t, 2, n)
	})
}

// A user-id that the broker doesn't accept from the relay's user is the fault of the message,
// and not of its address. The message waits, and is set aside with the client's reason.
func TestMessageSignedByAnotherUserBlocksNoOthers(t *testing.T) {
	forEachStrict(t, func(t *testing.T, s *strict, order outbox.Order) {
		pool := pgtest.Database(t)
		pgtest.Queues(t, s.admin, "orders")
		p := outbox.Publisher[string]{To: address.Queue("orders"), Key: func(v string) string { return v }}
		signed := func(v string) {
			_, err := p.Publish(t.Context(), pool, v, func(m *client.Message) { m.Properties.UserID = []byte("somebody") })
			require.NoError(t, err)
		}
		for i := range 20 {
			signed(fmt.Sprint("signed ", i))
		}
		const orders = 200
		for i := range orders {
			_, err := p.Publish(t.Context(), pool, fmt.Sprint("order ", i))
			require.NoError(t, err)
		}
		got := pgtest.Watch(t, s.admin, "orders")
		log := &lines{}
		relay, _ := pgtest.Run(t, pool, s.relay, outbox.RelayConfig{Order: order, Retry: 50 * time.Millisecond, SetAsideAfter: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil))})
		got.Await(t, orders)
		require.Eventually(t, func() bool { return relay.Stats().SetAside == 20 }, 3*time.Minute, 10*time.Millisecond)
		assert.Equal(t, orders, len(got.All()), "nothing else was in flight on the session that the broker has ended")
		assert.False(t, log.has("accepts nothing for an address"))
		var n int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox_set_aside WHERE reason LIKE '%user-id refused%the user-id somebody, which isn''t the connection''s user%'").Scan(&n))
		assert.Equal(t, 20, n)
	})
}

// A message over which the broker ends the session for a reason unknown to the relay is to
// blame by itself until another to its address was refused, too.
func TestAddressIsNotBlamedBeforeAnotherMessageToItWasTried(t *testing.T) {
	t.Parallel()
	g := outbox.NewGates()
	forbidden := &client.Error{Op: "publish", Kind: client.ErrOutcomeUnknown, Condition: "amqp:internal-error"}
	g.Refuse("a", 1, forbidden)
	assert.Equal(t, "tries", g.Ask("a"), "the next message tells")
	assert.Equal(t, "waits", g.Ask("a"), "and the others wait for it")
	g.Tried("a", 2, nil)
	assert.Equal(t, "free", g.Ask("a"), "the first message alone was to blame")
	assert.False(t, g.Blames("a"))

	g.Refuse("a", 1, forbidden)
	assert.False(t, g.Blames("a"))
	assert.Equal(t, "tries", g.Ask("a"))
	g.Tried("a", 1, forbidden) // the same message again
	assert.False(t, g.Blames("a"))
	assert.Equal(t, "tries", g.Ask("a"))
	g.Tried("a", 3, &client.Error{Op: "publish", Kind: client.ErrNotSent})
	assert.False(t, g.Blames("a"), "an outage tells nothing")
	assert.Equal(t, "waits", g.Ask("a"), "until the pause is over")
	g.Refuse("a", 3, forbidden)
	assert.True(t, g.Blames("a"))
	assert.Equal(t, "waits", g.Ask("a"))
	assert.Equal(t, "free", g.Ask("b"))

	g.Refuse("c", 1, forbidden)
	assert.Equal(t, "tries", g.Ask("c"))
	g.Tried("c", 2, refusedUserID)
	assert.False(t, g.Blames("c"), "another user's user-id tells nothing")
	assert.Equal(t, "waits", g.Ask("c"))
}

var refusedUserID = &client.Error{Op: "publish", Kind: client.ErrUserID, Condition: "amqp:unauthorized-access"}

// Messages with another user's user-id aren't a sign that their address takes none.
func TestAddressIsNotSuspectedForUserIDs(t *testing.T) {
	t.Parallel()
	g := outbox.NewGates()
	assert.Equal(t, 2, g.Learn("a", refusedUserID, refusedUserID))
	assert.Empty(t, g.Isolated())
	// Another user may have sent it before, and the broker may have stored it.
	assert.Zero(t, g.Learn("a", &client.Error{Op: "publish", Kind: client.ErrOutcomeUnknown, Err: refusedUserID}))
	unroutable := &client.Error{Op: "publish", Kind: client.ErrUnroutable}
	assert.Equal(t, 2, g.Learn("b", unroutable, unroutable))
	assert.Equal(t, []string{"b"}, g.Isolated())
}
