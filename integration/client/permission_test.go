package client_test

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
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/retry"
)

// life is a consumer and a publisher of a user who may lose everything.
type life struct {
	s     *suite.Site
	user  string // its name
	wire  *proxy.Proxy
	conn  *client.Conn
	log   *suite.Logbook
	p     *client.Publisher[suite.Order]
	got   chan int
	queue declare.Topology

	mu     sync.Mutex
	events []client.Event
}

func newLife(t *testing.T, s *suite.Site) *life {
	t.Helper()
	own, err := url.Parse(s.User(t, suite.Everything, suite.Everything, suite.Everything))
	require.NoError(t, err)
	l := &life{s: s, user: own.User.Username(), got: make(chan int, 10_000), queue: suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})}
	wire, through := s.Through(t)
	u, err := url.Parse(through)
	require.NoError(t, err)
	u.User = own.User
	l.wire = wire
	l.conn, l.log = suite.ConnectTo(t, u.String(), suite.Soon, func(c *client.Config) {
		c.OnEvent = func(e client.Event) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.events = append(l.events, e)
		}
	})
	suite.Apply(t, l.conn, l.queue)
	suite.Consume(t, l.conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { l.got <- o.ID; return nil }), client.ConsumerConfig{})
	l.p = suite.Publisher[suite.Order](t, l.conn, address.Queue("orders"))
	l.works(t, 0)
	return l
}

// works wants a message to make its way by itself, within patience.
func (l *life) works(t *testing.T, id int) {
	t.Helper()
	suite.Eventually(t, l.p, suite.Order{ID: id})
	for suite.Await(t, l.got, "the message") != id {
	}
}

func (l *life) permit(t *testing.T, configure, write, read string) {
	t.Helper()
	l.s.HTTP(t, http.MethodPut, "/permissions/"+l.s.VHost+"/"+l.user, map[string]string{"configure": configure, "write": write, "read": read}, nil)
}

func (l *life) password(t *testing.T, password string) {
	t.Helper()
	l.s.HTTP(t, http.MethodPut, "/users/"+l.user, map[string]string{"password": password, "tags": ""}, nil)
}

// notified waits for an event of one kind, since the given one, whose error is err.
func (l *life) notified(t *testing.T, since int, op string, kind client.EventKind, err error) {
	t.Helper()
	suite.Poll(t, op+": "+string(kind), func() bool {
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

// A running consumer and publisher lose something and get it back: both recover by
// themselves, and report what they waited for.
func TestWhatIsTakenAndGivenBackIsComeBackFrom(t *testing.T) {
	t.Parallel()
	for _, loss := range []struct {
		name string
		// take removes something; inParallel is what publishing returns then.
		take       func(t *testing.T, l *life)
		inParallel error
		consumer   error // what the consumer says; nil: the connection says connection
		connected  error
		requeue    func(t *testing.T, l *life)
	}{
		{"read and write permission, with the connection cut",
			func(t *testing.T, l *life) { l.permit(t, suite.Everything, "^$", "^$"); l.wire.Cut() },
			client.ErrUnauthorized, client.ErrUnauthorized, nil,
			func(t *testing.T, l *life) { l.permit(t, suite.Everything, suite.Everything, suite.Everything) }},
		{"all permissions on the virtual host",
			func(t *testing.T, l *life) {
				l.s.HTTP(t, http.MethodDelete, "/permissions/"+l.s.VHost+"/"+l.user, nil, nil)
				l.wire.Cut()
			},
			client.ErrNotSent, nil, client.ErrVirtualHost,
			func(t *testing.T, l *life) { l.permit(t, suite.Everything, suite.Everything, suite.Everything) }},
		{"the user",
			func(t *testing.T, l *life) {
				l.s.HTTP(t, http.MethodDelete, "/users/"+l.user, nil, nil)
				l.wire.Cut()
			},
			client.ErrNotSent, nil, client.ErrAuthentication,
			func(t *testing.T, l *life) {
				l.password(t, "secret-"+l.user)
				l.permit(t, suite.Everything, suite.Everything, suite.Everything)
			}},
		{"the password",
			func(t *testing.T, l *life) { l.password(t, "changed"); l.wire.Cut() },
			client.ErrNotSent, nil, client.ErrAuthentication,
			func(t *testing.T, l *life) { l.password(t, "secret-"+l.user) }},
		{"the virtual host", // which ends its connections by itself
			func(t *testing.T, l *life) { l.s.Remove(t) },
			client.ErrNotSent, nil, client.ErrVirtualHost,
			func(t *testing.T, l *life) {
				l.s.HTTP(t, http.MethodPut, "/vhosts/"+l.s.VHost, nil, nil)
				l.permit(t, suite.Everything, suite.Everything, suite.Everything)
				suite.Poll(t, "its owner declares the queue", func() bool {
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
			func(t *testing.T, l *life) { suite.Apply(t, l.conn, l.queue) }},
	} {
		t.Run(strings.ReplaceAll(loss.name, " ", "_"), func(t *testing.T) {
			suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
				l := newLife(t, s)
				rounds := 2
				if loss.connected != nil {
					rounds = 1 // RabbitMQ takes 3 s to refuse a login
				}
				for round := range rounds {
					since := l.now()
					loss.take(t, l)
					suite.Poll(t, "publishing says why it doesn't go", func() bool {
						ctx, cancel := context.WithTimeout(t.Context(), time.Second)
						defer cancel()
						err := l.p.Publish(ctx, suite.Order{ID: -1})
						if err != nil && !errors.Is(err, loss.inParallel) {
							t.Logf("publish: %v", err)
						}
						return errors.Is(err, loss.inParallel)
					})
					if loss.consumer != nil {
						l.notified(t, since, "consume", client.EventRefused, loss.consumer)
						l.notified(t, since, "publish", client.EventRefused, loss.inParallel)
					} else {
						l.notified(t, since, "connection", client.EventRefused, loss.connected)
						logged := len(l.log.With("reconnecting failed"))
						suite.Poll(t, "it keeps trying, and says so", func() bool { return len(l.log.With("reconnecting failed")) > logged })
					}
					l.notified(t, since, "consume", client.EventLost, nil)
					since = l.now()
					loss.requeue(t, l)
					began := time.Now()
					l.works(t, 1+round)
					l.notified(t, since, "consume", client.EventUp, nil)
					l.notified(t, since, "publish", client.EventUp, nil)
					suite.Report(t, s, "%s restored: a message made its way after %v", loss.name, time.Since(began).Round(time.Millisecond))
				}
			})
		})
	}
}

// A permission that is taken while links are open: 4.3 and 4.0 don't look again at a
// link that receives; hopback reports what it learns, and recovers.
func TestPermissionsTakenFromOpenLinks(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		l := newLife(t, s)
		admin, _ := s.Connect(t)
		to := suite.Publisher[suite.Order](t, admin, address.Queue("orders"))
		l.permit(t, "^$", "^$", "^$")
		var refused int
		for i := range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			err := l.p.Publish(ctx, suite.Order{ID: 100 + i})
			cancel()
			if err != nil {
				refused++
				assert.True(t, errors.Is(err, client.ErrUnauthorized) || errors.Is(err, client.ErrOutcomeUnknown) || errors.Is(err, client.ErrNotSent), "%v", err)
			}
		}
		suite.Publish(t, to, suite.Order{ID: 7})
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
		l.permit(t, suite.Everything, suite.Everything, suite.Everything)
		l.works(t, 200)
		suite.Report(t, s, "with links open and permissions taken: %d of 5 publishes refused, consuming went on: %v", refused, consuming)
	})
}

// A link that the broker detaches, with nothing else amiss, is attached again.
func TestLinkThatTheBrokerDetachesIsAttachedAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		l := newLife(t, s)
		for round := range 3 {
			since := l.now()
			// The queue goes and comes back at once, so that the links' queue is another.
			_, err := declare.DeleteQueue(t.Context(), l.conn.Management(), "orders")
			require.NoError(t, err)
			suite.Apply(t, l.conn, l.queue)
			l.works(t, 1+round)
			l.notified(t, since, "consume", client.EventLost, nil)
			l.notified(t, since, "consume", client.EventUp, nil)
			suite.AwaitConsumers(t, l.conn, "orders", 1)
		}
		assert.Empty(t, l.log.With("connection lost; reconnecting"))
		assert.Equal(t, 1, l.wire.Accepted(), "on the same connection")
	})
}

// A worker whose user may not write to the exchange of retry copies is refused before its
// first delivery: its first failure would stall it. The error says what is missing.
func TestAWorkerThatMayNotPublishRetryCopiesIsRefused(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		for name, backoff := range map[string]retry.Policy{
			"republish": {Strategy: retry.StrategyRepublish},
			"ladder":    {Strategy: retry.StrategyRepublish, AnyDelay: &retry.Ladder{}},
		} {
			policy := backoff
			policy.MaxRetries, policy.Backoff = 3, retry.Delays(time.Second)
			policy.Names = retry.Names{Prefix: name + "."}
			queue := "work-" + name
			suite.ApplyRetry(t, admin, policy, declare.QuorumQueue{Name: queue})
			suite.Publish(t, suite.Publisher[suite.Order](t, admin, address.Queue(queue)), suite.Order{})
			handler := retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error { return errors.New("boom") }))

			conn, _ := suite.ConnectTo(t, s.User(t, "^hopback-clock-", "", ".*"))
			ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
			err := conn.Consume(ctx, queue, handler, client.ConsumerConfig{})
			cancel()
			require.ErrorIs(t, err, client.ErrUnauthorized)
			assert.ErrorContains(t, err, "write access to exchange '"+name+".")
			assert.ErrorContains(t, err, "set_permissions")
			assert.Equal(t, 1, suite.Ready(t, admin, queue))

			may, _ := suite.ConnectTo(t, s.User(t, "^hopback-clock-", "^"+name+"\\.", ".*"))
			suite.Consume(t, may, queue, handler, client.ConsumerConfig{})
			suite.AwaitConsumers(t, admin, queue, 1)
			suite.Poll(t, "it is retried", func() bool { return suite.Ready(t, admin, queue) == 0 })
		}
	})
}
