package integration

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/proxy"
	"github.com/hopback/hopback/retry"
)

// life is a consumer and a publisher of a user who may lose everything.
type life struct {
	s     *site
	user  string // its name
	wire  *proxy.Proxy
	conn  *client.Conn
	log   *logbook
	p     *client.Publisher[order]
	got   chan int
	queue declare.Topology

	mu     sync.Mutex
	events []client.Event
}

const everything = ".*"

func newLife(t *testing.T, s *site) *life {
	t.Helper()
	own, err := url.Parse(s.user(t, everything, everything, everything))
	require.NoError(t, err)
	l := &life{s: s, user: own.User.Username(), got: make(chan int, 10_000), queue: queueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})}
	wire, through := s.through(t)
	u, err := url.Parse(through)
	require.NoError(t, err)
	u.User = own.User
	l.wire = wire
	l.conn, l.log = connectTo(t, u.String(), soon, func(c *client.Config) {
		c.Observe = func(e client.Event) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.events = append(l.events, e)
		}
	})
	apply(t, l.conn, l.queue)
	consume(t, l.conn, "orders", client.JSON(func(_ context.Context, o order) error { l.got <- o.ID; return nil }), client.ConsumerConfig{})
	l.p = publisher[order](t, l.conn, address.Queue("orders"))
	l.works(t, 0)
	return l
}

// works wants a message to make its way by itself, within patience.
func (l *life) works(t *testing.T, id int) {
	t.Helper()
	eventually(t, l.p, order{ID: id})
	for await(t, l.got, "the message") != id {
	}
}

func (l *life) permit(t *testing.T, configure, write, read string) {
	t.Helper()
	l.s.http(t, http.MethodPut, "/permissions/"+l.s.vhost+"/"+l.user, map[string]string{"configure": configure, "write": write, "read": read}, nil)
}

func (l *life) password(t *testing.T, password string) {
	t.Helper()
	l.s.http(t, http.MethodPut, "/users/"+l.user, map[string]string{"password": password, "tags": ""}, nil)
}

// told waits for an event of one kind, since the given one, whose error is err.
func (l *life) told(t *testing.T, since int, op string, kind client.EventKind, err error) {
	t.Helper()
	poll(t, op+": "+string(kind), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, e := range l.events[since:] {
			if e.Op == op && e.Kind == kind && (err == nil || errors.Is(e.Err, err)) {
				return true
			}
		}
		return false
	})
}

func (l *life) now() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.events)
}

// Whatever is taken from a running consumer and publisher and given back: both come
// back by themselves, and tell what kept them.
func TestWhatIsTakenAndGivenBackIsComeBackFrom(t *testing.T) {
	t.Parallel()
	for _, loss := range []struct {
		name string
		// take takes it; meanwhile is what publishing says then.
		take      func(t *testing.T, l *life)
		meanwhile error
		consumer  error // what the consumer says; nil: the connection says connection
		connected error
		giveBack  func(t *testing.T, l *life)
	}{
		{"read and write permission, with the connection cut",
			func(t *testing.T, l *life) { l.permit(t, everything, "^$", "^$"); l.wire.Cut() },
			client.ErrUnauthorized, client.ErrUnauthorized, nil,
			func(t *testing.T, l *life) { l.permit(t, everything, everything, everything) }},
		{"all permissions on the virtual host",
			func(t *testing.T, l *life) {
				l.s.http(t, http.MethodDelete, "/permissions/"+l.s.vhost+"/"+l.user, nil, nil)
				l.wire.Cut()
			},
			client.ErrNotSent, nil, client.ErrVirtualHost,
			func(t *testing.T, l *life) { l.permit(t, everything, everything, everything) }},
		{"the user",
			func(t *testing.T, l *life) {
				l.s.http(t, http.MethodDelete, "/users/"+l.user, nil, nil)
				l.wire.Cut()
			},
			client.ErrNotSent, nil, client.ErrAuthentication,
			func(t *testing.T, l *life) {
				l.password(t, "secret-"+l.user)
				l.permit(t, everything, everything, everything)
			}},
		{"the password",
			func(t *testing.T, l *life) { l.password(t, "changed"); l.wire.Cut() },
			client.ErrNotSent, nil, client.ErrAuthentication,
			func(t *testing.T, l *life) { l.password(t, "secret-"+l.user) }},
		{"the virtual host", // which ends its connections by itself
			func(t *testing.T, l *life) { l.s.remove(t) },
			client.ErrNotSent, nil, client.ErrVirtualHost,
			func(t *testing.T, l *life) {
				l.s.http(t, http.MethodPut, "/vhosts/"+l.s.vhost, nil, nil)
				l.permit(t, everything, everything, everything)
				poll(t, "its owner declares the queue", func() bool {
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					defer cancel()
					_, err := declare.Apply(ctx, l.conn.Management(), l.queue)
					return err == nil
				})
			}},
		{"the queue",
			func(t *testing.T, l *life) {
				_, err := declare.DeleteQueue(t.Context(), l.conn.Management(), "orders")
				require.NoError(t, err)
			},
			client.ErrNotFound, client.ErrNotFound, nil,
			func(t *testing.T, l *life) { apply(t, l.conn, l.queue) }},
	} {
		t.Run(strings.ReplaceAll(loss.name, " ", "_"), func(t *testing.T) {
			forEachBroker(t, func(t *testing.T, s *site) {
				l := newLife(t, s)
				rounds := 2
				if loss.connected != nil {
					rounds = 1 // RabbitMQ takes 3 s to refuse a login
				}
				for round := range rounds {
					since := l.now()
					loss.take(t, l)
					poll(t, "publishing says why it doesn't go", func() bool {
						ctx, cancel := context.WithTimeout(t.Context(), time.Second)
						defer cancel()
						err := l.p.Publish(ctx, order{ID: -1})
						if err != nil && !errors.Is(err, loss.meanwhile) {
							t.Logf("publish: %v", err)
						}
						return errors.Is(err, loss.meanwhile)
					})
					if loss.consumer != nil {
						l.told(t, since, "consume", client.EventRefused, loss.consumer)
						l.told(t, since, "publish", client.EventRefused, loss.meanwhile)
					} else {
						l.told(t, since, "connection", client.EventRefused, loss.connected)
						said := len(l.log.with("reconnecting failed"))
						poll(t, "it keeps trying, and says so", func() bool { return len(l.log.with("reconnecting failed")) > said })
					}
					l.told(t, since, "consume", client.EventLost, nil)
					since = l.now()
					loss.giveBack(t, l)
					began := time.Now()
					l.works(t, 1+round)
					l.told(t, since, "consume", client.EventUp, nil)
					l.told(t, since, "publish", client.EventUp, nil)
					report(t, s, "%s given back: a message made its way after %v", loss.name, time.Since(began).Round(time.Millisecond))
				}
			})
		})
	}
}

// A permission that is taken while links are open: 4.3 and 4.0 don't look again at a
// link that receives; what hopback is told it tells, and comes back from.
func TestPermissionsTakenFromOpenLinks(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		l := newLife(t, s)
		admin, _ := s.connect(t)
		to := publisher[order](t, admin, address.Queue("orders"))
		l.permit(t, "^$", "^$", "^$")
		var refused int
		for i := range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			err := l.p.Publish(ctx, order{ID: 100 + i})
			cancel()
			if err != nil {
				refused++
				assert.True(t, errors.Is(err, client.ErrUnauthorized) || errors.Is(err, client.ErrOutcomeUnknown) || errors.Is(err, client.ErrNotSent), "%v", err)
			}
		}
		publish(t, to, order{ID: 7})
		consuming := false
		for deadline := time.After(2 * time.Second); !consuming; {
			select {
			case id := <-l.got:
				consuming = id == 7
			case <-deadline:
				deadline = nil
			}
			if deadline == nil {
				break
			}
		}
		l.permit(t, everything, everything, everything)
		l.works(t, 200)
		report(t, s, "with links open and permissions taken: %d of 5 publishes refused, consuming went on: %v", refused, consuming)
	})
}

// A link that the broker detaches, with nothing else amiss, is attached again.
func TestLinkThatTheBrokerDetachesIsAttachedAgain(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		l := newLife(t, s)
		for round := range 3 {
			since := l.now()
			// The queue goes and comes back at once, so that the links' queue is another.
			_, err := declare.DeleteQueue(t.Context(), l.conn.Management(), "orders")
			require.NoError(t, err)
			apply(t, l.conn, l.queue)
			l.works(t, 1+round)
			l.told(t, since, "consume", client.EventLost, nil)
			l.told(t, since, "consume", client.EventUp, nil)
			awaitConsumers(t, l.conn, "orders", 1)
		}
		assert.Empty(t, l.log.with("connection lost; reconnecting"))
		assert.Equal(t, 1, l.wire.Accepted(), "on the same connection")
	})
}

// A worker whose user may not write to the exchange of retry copies is refused before its
// first delivery: its first failure would stall it. The error says what is missing.
func TestAWorkerThatMayNotPublishRetryCopiesIsRefused(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		admin, _ := s.connect(t)
		for name, backoff := range map[string]retry.Policy{
			"republish": {Strategy: retry.StrategyRepublish},
			"ladder":    {Strategy: retry.StrategyRepublish, AnyDelay: &retry.Ladder{}},
		} {
			policy := backoff
			policy.MaxRetries, policy.Backoff = 3, retry.Delays(time.Second)
			policy.Names = retry.Names{Prefix: name + "."}
			queue := "work-" + name
			applyRetry(t, admin, policy, declare.QuorumQueue{Name: queue})
			publish(t, publisher[order](t, admin, address.Queue(queue)), order{})
			handler := retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error { return errors.New("boom") }))

			conn, _ := connectTo(t, s.user(t, "^hopback-clock-", "", ".*"))
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			err := conn.Consume(ctx, queue, handler, client.ConsumerConfig{})
			cancel()
			require.ErrorIs(t, err, client.ErrUnauthorized)
			assert.ErrorContains(t, err, "write access to exchange '"+name+".")
			assert.ErrorContains(t, err, "set_permissions")
			assert.Equal(t, 1, ready(t, admin, queue))

			may, _ := connectTo(t, s.user(t, "^hopback-clock-", "^"+name+"\\.", ".*"))
			consume(t, may, queue, handler, client.ConsumerConfig{})
			awaitConsumers(t, admin, queue, 1)
			poll(t, "it is retried", func() bool { return ready(t, admin, queue) == 0 })
		}
	})
}
