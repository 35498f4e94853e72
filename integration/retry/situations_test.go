package retry_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/migrate"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/rpc"
	"github.com/hopback/hopback/schedule"
	"github.com/hopback/hopback/stream"
)

// accepted are the caveats that situations bring along.
var accepted = []desk.WarningCode{desk.WarningLimit, desk.WarningLoss}

// raw is a handler of texts.
func raw(f func(ctx context.Context, text string) error) client.Handler {
	return client.Typed(client.RawCodec{}, f)
}

// Every strategy retries a message as often as the policy says and no more, dead-letters
// the rest, and keeps who published it. A decorator is one value for all places, and all
// strategies share the default names.
func TestRetriesInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		policies, decorators := map[string]retry.Policy{}, map[string]func(client.Handler) client.Handler{}
		for name, set := range suite.Strategies(&suite.Site{Broker: &rabbitmq.Broker{Version: "4.3"}}) {
			if name == "native" && !m.AllNewer() {
				continue
			}
			policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond), Worker: "tester"}
			set(&policy)
			if policy.AnyDelay != nil {
				policy.AnyDelay.Levels = 3 // a queue each
			}
			policies[name] = m.Tuned(policy)
			decorators[name] = retry.With(policies[name])
		}
		return func(t *testing.T, p *suite.Place) {
			for name, policy := range policies {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					retriesAt(t, p, p.Queue+"-"+name, policy, decorators[name])
				})
			}
		}
	})
}

func retriesAt(t *testing.T, p *suite.Place, queue string, policy retry.Policy, decorate func(client.Handler) client.Handler) {
	suite.ApplyRetry(t, p.Owner, policy, declare.QuorumQueue{Name: queue})
	worker := p.As(t, "^$", "^(retry_exchange|retry_ladder_.*)$", "^"+queue+"$")
	type attempt struct {
		text    string
		retries int
		m       *client.Message
	}
	attempts := make(chan attempt, 1000)
	suite.Consume(t, worker, queue, decorate(raw(func(ctx context.Context, text string) error {
		d, _ := client.DeliveryFrom(ctx)
		n := retry.Count(d.Message())
		attempts <- attempt{text, n, d.Message()}
		if text == "fails once" && n == 1 {
			return nil
		}
		return errors.New("no")
	})), client.ConsumerConfig{})
	dead := make(chan *client.Message, 1000)
	suite.Consume(t, p.As(t, "^$", "^$", `^.*\.dead$`), queue+".dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		dead <- d.Message()
		return nil
	}), client.ConsumerConfig{})

	p.Send(t, address.Queue(queue), "fails once", "fails always")
	seen := map[string][]int{}
	for range 2 + 3 {
		a := suite.Await(t, attempts, "an attempt")
		seen[a.text] = append(seen[a.text], a.retries)
		p.KeepsUser(t, a.m)
	}
	assert.Equal(t, map[string][]int{"fails once": {0, 1}, "fails always": {0, 1, 2}}, seen)
	m := suite.Await(t, dead, "the dead letter")
	assert.Equal(t, "fails always", string(m.GetData()))
	p.KeepsUser(t, m)
	death := retry.DeadLetterOf(m)
	assert.Equal(t, retry.ReasonExhausted, death.Reason)
	assert.Equal(t, queue, death.Queue)
	for _, queue := range []string{queue, queue + ".dead", "parking_queue"} {
		suite.AssertEmpty(t, p.Site, queue)
	}
	assert.Empty(t, attempts)
	assert.Empty(t, dead)
}

// A worker rejects a message twice, and Central retries it. What it rejects for good is
// dead-lettered.
func TestCentralInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		policy := m.Tuned(retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond)})
		if m.Second {
			policy.Names.Prefix = "second_" // a failed queue has one retrier, which knows all its work queues
		}
		return func(t *testing.T, p *suite.Place) {
			failed := policy.Names.Prefix + "failed_queue"
			cfg := retry.CentralConfig{Queues: []string{p.Queue}}
			topology, err := retry.CentralTopology(policy, retry.CentralConfig{}, declare.QuorumQueue{Name: p.Queue})
			require.NoError(t, err)
			suite.Apply(t, p.Owner, topology)
			retrier := p.As(t, "^$", `^(amq\.default|.*retry_exchange|.*\.dead)$`, "^"+failed+"$")
			suite.Consume(t, retrier, failed, retry.Central(policy, cfg), suite.CentralConsumer)
			attempts := make(chan *client.Message, 100)
			suite.Consume(t, p.As(t, "^$", "^$", "^"+p.Queue+"$"), p.Queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				attempts <- d.Message()
				return client.Modify{DeadLetter: true}
			}), client.ConsumerConfig{})
			p.Send(t, address.Queue(p.Queue), "x")
			for n := range 3 {
				a := suite.Await(t, attempts, "an attempt")
				assert.Equal(t, n, retry.Count(a))
				p.KeepsUser(t, a)
			}
			dead := p.Peer(t).Take(p.Queue+".dead", 1)[0]
			assert.Equal(t, retry.ReasonExhausted, retry.DeadLetterOf(dead).Reason)
			p.KeepsUser(t, dead)
			suite.AssertEmpty(t, p.Site, failed)
			assert.Empty(t, attempts)
		}
	})
}

// A dead letter is replayed, exported and imported by an operator, who isn't the user that
// has published it.
func TestDeskInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		policy := m.Tuned(retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond)})
		decorate := retry.With(policy)
		return func(t *testing.T, p *suite.Place) {
			suite.ApplyRetry(t, p.Owner, policy, declare.QuorumQueue{Name: p.Queue})
			var healed atomic.Bool
			done := make(chan *client.Message, 100)
			suite.Consume(t, p.As(t, "^$", "^retry_exchange$", "^"+p.Queue+"$"), p.Queue, decorate(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				if !healed.Load() {
					return retry.Permanent(errors.New("no"))
				}
				done <- d.Message()
				return nil
			})), client.ConsumerConfig{})
			p.Send(t, address.Queue(p.Queue), "1", "2", "3")
			dead := p.Queue + ".dead"
			suite.Poll(t, "three dead letters", func() bool { return suite.Ready(t, p.Owner, dead) == 3 })
			healed.Store(true)
			operator := p.As(t, "^$", `^amq\.default$|^`+p.Queue+"$", ".*")
			d := suite.NewDesk(t, p.Site, operator)
			ctx := suite.Within(t)
			var kept bytes.Buffer
			file, err := os.Create(filepath.Join(t.TempDir(), "kept"))
			require.NoError(t, err)
			_, err = d.Export(ctx, file, desk.ExportConfig{Queue: dead, Accept: accepted})
			require.NoError(t, err)
			_, err = file.Seek(0, io.SeekStart)
			require.NoError(t, err)
			_, err = kept.ReadFrom(file)
			require.NoError(t, err)
			require.NoError(t, file.Close())

			report, err := d.Replay(ctx, desk.ReplayConfig{Queue: dead, All: true, Accept: accepted})
			require.NoError(t, err)
			assert.EqualValues(t, 3, report.Replayed)
			assert.Zero(t, report.Failed+report.Unknown)
			imported, err := d.Import(ctx, &kept, desk.ImportConfig{Queue: p.Queue})
			require.NoError(t, err)
			assert.EqualValues(t, 3, imported.Imported)
			seen := map[string]int{}
			for range 6 {
				m := suite.Await(t, done, "a replayed message")
				seen[string(m.GetData())]++
				p.KeepsUser(t, m)
			}
			assert.Equal(t, map[string]int{"1": 2, "2": 2, "3": 2}, seen)
			suite.AssertEmpty(t, p.Site, dead)
			assert.Empty(t, done)
		}
	})
}

// A message is scheduled by one user and dispatched by another.
func TestScheduleInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		names := schedule.Names{}
		if m.Second {
			names.Prefix = "second_" // its own ladder, only to test it
		}
		return func(t *testing.T, p *suite.Place) {
			ladder, err := schedule.Topology(names, p.Queue)
			require.NoError(t, err)
			both, err := declare.Merge(ladder, declare.Topology{Queues: []declare.Queue{suite.Quorum(p.Queue, declare.Drop()), suite.Quorum(p.Queue+"-2", declare.Drop())}})
			require.NoError(t, err)
			suite.Apply(t, p.Owner, both)
			done := make(chan *client.Message, 100)
			keep := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error { done <- d.Message(); return nil })
			worker := p.As(t, "^$", `^amq\.default$`, ".*")
			suite.Consume(t, worker, p.Queue, keep, client.ConsumerConfig{})
			suite.Consume(t, worker, p.Queue+"-2", keep, client.ConsumerConfig{})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- schedule.Dispatch(ctx, worker, schedule.DispatchConfig{Names: names}) }()
			conn, sign := p.AsPublisher(t)
			for i, to := range []string{p.Queue, p.Queue + "-2"} {
				pub, err := schedule.NewPublisher[string](suite.Within(t), conn, address.Queue(to), schedule.PublisherConfig{Names: names})
				require.NoError(t, err)
				_, err = pub.Publish(suite.Within(t), schedule.After(time.Duration(i)*200*time.Millisecond), to, sign)
				require.NoError(t, err)
			}
			for range 2 {
				p.KeepsUser(t, suite.Await(t, done, "a scheduled message"))
			}
			cancel()
			require.NoError(t, suite.Await(t, ended, "Dispatch ends"))
			suite.AssertEmpty(t, p.Site, names.UndeliverableQueue())
			assert.Empty(t, done)
		}
	})
}

// A call and its reply, which is a copy of the request, by two users.
func TestCallsInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		return func(t *testing.T, p *suite.Place) {
			suite.Apply(t, p.Owner, suite.QueueOf(suite.Quorum(p.Queue, declare.Drop())))
			worker := p.As(t, "^$", `^amq\.default$`, "^"+p.Queue+"$")
			suite.Consume(t, worker, p.Queue, rpc.Respond(suite.Responder(t, worker), func(ctx context.Context, m *client.Message) (*client.Message, error) {
				p.KeepsUser(t, m)
				return client.Copy(m), nil
			}), client.ConsumerConfig{})
			caller, sign := p.AsCaller(t)
			for _, replies := range suite.Ways(p.Site) {
				r := suite.Requester[*client.Message, *client.Message](t, caller, address.Queue(p.Queue), rpc.RequesterConfig{Replies: replies})
				request := client.NewMessage([]byte("x"))
				sign(request)
				reply, err := r.Call(suite.Within(t), request)
				require.NoError(t, err)
				assert.Equal(t, "x", string(reply.GetData()))
				p.KeepsUser(t, reply)
			}
		}
	})
}

// A queue is moved by somebody who hasn't published what is in it.
func TestMigrateInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		return func(t *testing.T, p *suite.Place) {
			suite.Apply(t, p.Owner, suite.QueueOf(suite.Quorum(p.Queue, declare.Drop())))
			p.Send(t, address.Queue(p.Queue), "1", "2", "3")
			mover := p.As(t, suite.Everything, suite.Everything, suite.Everything)
			report, err := migrate.Run(suite.Within(t), mover, p.API(t), migrate.Config{Old: p.Queue, New: suite.Quorum(p.Queue+"-2", declare.Drop()), Quiet: time.Second})
			require.NoError(t, err)
			assert.EqualValues(t, 3, report.Moved)
			for _, m := range p.Peer(t).Take(p.Queue+"-2", 3) {
				p.KeepsUser(t, m)
			}
		}
	})
}

// The copy of a failed message of a stream.
func TestStreamsInEverySituation(t *testing.T) {
	suite.ForEachSituation(t, func(t *testing.T, m *suite.Team) func(t *testing.T, p *suite.Place) {
		return func(t *testing.T, p *suite.Place) {
			suite.Apply(t, p.Owner, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: p.Queue}, suite.Quorum(p.Queue+".failed", declare.Drop())}})
			p.Send(t, address.Queue(p.Queue), "1", "2")
			reader := p.As(t, "^$", `^amq\.default$`, "^"+p.Queue+"$")
			suite.HandleStream(t, reader, p.Queue, stream.Config{Attempts: 1, Failed: stream.FailedForward, FailedQueue: p.Queue + ".failed"}, nil,
				client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					if string(d.Message().GetData()) == "2" {
						return client.Forward{To: address.Queue(p.Queue + ".failed"), Message: client.Copy(d.Message())}
					}
					return errors.New("no")
				}))
			for _, m := range p.Peer(t).Take(p.Queue+".failed", 2) {
				p.KeepsUser(t, m)
			}
		}
	})
}
