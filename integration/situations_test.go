package integration

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
	"github.com/hopback/hopback/declare/migrate"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/internal/broker"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/rpc"
	"github.com/hopback/hopback/schedule"
	"github.com/hopback/hopback/stream"
)

// accepted are the caveats that situations bring along.
var accepted = []desk.CaveatCode{desk.CaveatLimit, desk.CaveatLoss}

// raw is a handler of texts.
func raw(f func(ctx context.Context, text string) error) client.Handler {
	return client.Typed(client.RawCodec{}, f)
}

// Every strategy retries a message as often as the policy says and no more, dead-letters
// the rest, and keeps who published it. A decorator is one value for all places, and all
// strategies share the default names.
func TestRetriesInEverySituation(t *testing.T) {
	forEachSituation(t, func(t *testing.T, m *team) func(t *testing.T, p *place) {
		policies, decorators := map[string]retry.Policy{}, map[string]func(client.Handler) client.Handler{}
		for name, set := range strategies(&site{Broker: &broker.Broker{Version: "4.3"}}) {
			if name == "native" && !m.allNewer() {
				continue
			}
			policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond), Worker: "tester"}
			set(&policy)
			if policy.AnyDelay != nil {
				policy.AnyDelay.Levels = 3 // a queue each
			}
			policies[name] = m.tuned(policy)
			decorators[name] = retry.With(policies[name])
		}
		return func(t *testing.T, p *place) {
			for name, policy := range policies {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					retriesAt(t, p, p.Queue+"-"+name, policy, decorators[name])
				})
			}
		}
	})
}

func retriesAt(t *testing.T, p *place, queue string, policy retry.Policy, decorate func(client.Handler) client.Handler) {
	applyRetry(t, p.Owner, policy, declare.QuorumQueue{Name: queue})
	worker := p.as(t, "^$", "^(retry_exchange|retry_ladder_.*)$", "^"+queue+"$")
	type attempt struct {
		text    string
		retries int
		m       *client.Message
	}
	attempts := make(chan attempt, 1000)
	consume(t, worker, queue, decorate(raw(func(ctx context.Context, text string) error {
		d, _ := client.DeliveryFrom(ctx)
		n := retry.Count(d.Message())
		attempts <- attempt{text, n, d.Message()}
		if text == "fails once" && n == 1 {
			return nil
		}
		return errors.New("no")
	})), client.ConsumerConfig{})
	dead := make(chan *client.Message, 1000)
	consume(t, p.as(t, "^$", "^$", `^.*\.dead$`), queue+".dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		dead <- d.Message()
		return nil
	}), client.ConsumerConfig{})

	p.send(t, address.Queue(queue), "fails once", "fails always")
	seen := map[string][]int{}
	for range 2 + 3 {
		a := await(t, attempts, "an attempt")
		seen[a.text] = append(seen[a.text], a.retries)
		p.keepsUser(t, a.m)
	}
	assert.Equal(t, map[string][]int{"fails once": {0, 1}, "fails always": {0, 1, 2}}, seen)
	m := await(t, dead, "the dead letter")
	assert.Equal(t, "fails always", string(m.GetData()))
	p.keepsUser(t, m)
	death := retry.DeathOf(m)
	assert.Equal(t, retry.ReasonExhausted, death.Reason)
	assert.Equal(t, queue, death.Queue)
	for _, queue := range []string{queue, queue + ".dead", "parking_queue"} {
		assertEmpty(t, p.site, queue)
	}
	assert.Empty(t, attempts)
	assert.Empty(t, dead)
}

// A worker rejects a message twice, and Central retries it. What it rejects for good is
// dead-lettered.
func TestCentralInEverySituation(t *testing.T) {
	forEachSituation(t, func(t *testing.T, m *team) func(t *testing.T, p *place) {
		policy := m.tuned(retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond)})
		if m.second {
			policy.Names.Prefix = "second_" // a failed queue has one retrier, which knows all its work queues
		}
		return func(t *testing.T, p *place) {
			failed := policy.Names.Prefix + "failed_queue"
			cfg := retry.CentralConfig{Queues: []string{p.Queue}}
			topology, err := retry.CentralTopology(policy, retry.CentralConfig{}, declare.QuorumQueue{Name: p.Queue})
			require.NoError(t, err)
			apply(t, p.Owner, topology)
			retrier := p.as(t, "^$", `^(amq\.default|.*retry_exchange|.*\.dead)$`, "^"+failed+"$")
			consume(t, retrier, failed, retry.Central(policy, cfg), centralConsumer)
			attempts := make(chan *client.Message, 100)
			consume(t, p.as(t, "^$", "^$", "^"+p.Queue+"$"), p.Queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				attempts <- d.Message()
				return client.Modify{DeadLetter: true}
			}), client.ConsumerConfig{})
			p.send(t, address.Queue(p.Queue), "x")
			for n := range 3 {
				a := await(t, attempts, "an attempt")
				assert.Equal(t, n, retry.Count(a))
				p.keepsUser(t, a)
			}
			dead := p.peer(t).take(p.Queue+".dead", 1)[0]
			assert.Equal(t, retry.ReasonExhausted, retry.DeathOf(dead).Reason)
			p.keepsUser(t, dead)
			assertEmpty(t, p.site, failed)
			assert.Empty(t, attempts)
		}
	})
}

// A dead letter is replayed, exported and imported by an operator, who isn't the user that
// has published it.
func TestDeskInEverySituation(t *testing.T) {
	forEachSituation(t, func(t *testing.T, m *team) func(t *testing.T, p *place) {
		policy := m.tuned(retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond)})
		decorate := retry.With(policy)
		return func(t *testing.T, p *place) {
			applyRetry(t, p.Owner, policy, declare.QuorumQueue{Name: p.Queue})
			var healed atomic.Bool
			done := make(chan *client.Message, 100)
			consume(t, p.as(t, "^$", "^retry_exchange$", "^"+p.Queue+"$"), p.Queue, decorate(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				if !healed.Load() {
					return retry.Permanent(errors.New("no"))
				}
				done <- d.Message()
				return nil
			})), client.ConsumerConfig{})
			p.send(t, address.Queue(p.Queue), "1", "2", "3")
			dead := p.Queue + ".dead"
			poll(t, "three dead letters", func() bool { return ready(t, p.Owner, dead) == 3 })
			healed.Store(true)
			operator := p.as(t, "^$", `^amq\.default$|^`+p.Queue+"$", ".*")
			d := newDesk(t, p.site, operator)
			ctx := within(t)
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
			assert.Zero(t, report.Failed+report.Unsure)
			imported, err := d.Import(ctx, &kept, desk.ImportConfig{Queue: p.Queue})
			require.NoError(t, err)
			assert.EqualValues(t, 3, imported.Imported)
			seen := map[string]int{}
			for range 6 {
				m := await(t, done, "a replayed message")
				seen[string(m.GetData())]++
				p.keepsUser(t, m)
			}
			assert.Equal(t, map[string]int{"1": 2, "2": 2, "3": 2}, seen)
			assertEmpty(t, p.site, dead)
			assert.Empty(t, done)
		}
	})
}

// A message is scheduled by one user and dispatched by another.
func TestScheduleInEverySituation(t *testing.T) {
	forEachSituation(t, func(t *testing.T, m *team) func(t *testing.T, p *place) {
		names := schedule.Names{}
		if m.second {
			names.Prefix = "second_" // its own ladder, only to test it
		}
		return func(t *testing.T, p *place) {
			ladder, err := schedule.Topology(names, p.Queue)
			require.NoError(t, err)
			both, err := declare.Merge(ladder, declare.Topology{Queues: []declare.Queue{quorum(p.Queue, declare.Drop()), quorum(p.Queue+"-2", declare.Drop())}})
			require.NoError(t, err)
			apply(t, p.Owner, both)
			done := make(chan *client.Message, 100)
			keep := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error { done <- d.Message(); return nil })
			worker := p.as(t, "^$", `^amq\.default$`, ".*")
			consume(t, worker, p.Queue, keep, client.ConsumerConfig{})
			consume(t, worker, p.Queue+"-2", keep, client.ConsumerConfig{})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- schedule.Dispatch(ctx, worker, schedule.DispatchConfig{Names: names}) }()
			conn, sign := p.asPublisher(t)
			for i, to := range []string{p.Queue, p.Queue + "-2"} {
				pub, err := schedule.NewPublisher[string](within(t), conn, address.Queue(to), schedule.PublisherConfig{Names: names})
				require.NoError(t, err)
				_, err = pub.Publish(within(t), schedule.After(time.Duration(i)*200*time.Millisecond), to, sign)
				require.NoError(t, err)
			}
			for range 2 {
				p.keepsUser(t, await(t, done, "a scheduled message"))
			}
			cancel()
			require.NoError(t, await(t, ended, "Dispatch ends"))
			assertEmpty(t, p.site, names.UndeliverableQueue())
			assert.Empty(t, done)
		}
	})
}

// A call and its reply, which is a copy of the request, by two users.
func TestCallsInEverySituation(t *testing.T) {
	forEachSituation(t, func(t *testing.T, m *team) func(t *testing.T, p *place) {
		return func(t *testing.T, p *place) {
			apply(t, p.Owner, queueOf(quorum(p.Queue, declare.Drop())))
			worker := p.as(t, "^$", `^amq\.default$`, "^"+p.Queue+"$")
			consume(t, worker, p.Queue, rpc.Respond(responder(t, worker), func(ctx context.Context, m *client.Message) (*client.Message, error) {
				p.keepsUser(t, m)
				return client.Copy(m), nil
			}), client.ConsumerConfig{})
			caller, sign := p.asCaller(t)
			for _, replies := range ways(p.site) {
				r := requester[*client.Message, *client.Message](t, caller, address.Queue(p.Queue), rpc.RequesterConfig{Replies: replies})
				request := client.NewMessage([]byte("x"))
				sign(request)
				reply, err := r.Call(within(t), request)
				require.NoError(t, err)
				assert.Equal(t, "x", string(reply.GetData()))
				p.keepsUser(t, reply)
			}
		}
	})
}

// A queue is moved by somebody who hasn't published what is in it.
func TestMigrateInEverySituation(t *testing.T) {
	forEachSituation(t, func(t *testing.T, m *team) func(t *testing.T, p *place) {
		return func(t *testing.T, p *place) {
			apply(t, p.Owner, queueOf(quorum(p.Queue, declare.Drop())))
			p.send(t, address.Queue(p.Queue), "1", "2", "3")
			mover := p.as(t, everything, everything, everything)
			report, err := migrate.Run(within(t), mover, p.api(t), migrate.Config{Old: p.Queue, New: quorum(p.Queue+"-2", declare.Drop()), Quiet: time.Second})
			require.NoError(t, err)
			assert.EqualValues(t, 3, report.Moved)
			for _, m := range p.peer(t).take(p.Queue+"-2", 3) {
				p.keepsUser(t, m)
			}
		}
	})
}

// The copy of a failed message of a stream.
func TestStreamsInEverySituation(t *testing.T) {
	forEachSituation(t, func(t *testing.T, m *team) func(t *testing.T, p *place) {
		return func(t *testing.T, p *place) {
			apply(t, p.Owner, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: p.Queue}, quorum(p.Queue+".failed", declare.Drop())}})
			p.send(t, address.Queue(p.Queue), "1", "2")
			reader := p.as(t, "^$", `^amq\.default$`, "^"+p.Queue+"$")
			handleStream(t, reader, p.Queue, stream.Config{Attempts: 1, Failed: stream.FailedForward, FailedQueue: p.Queue + ".failed"}, nil,
				client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					if string(d.Message().GetData()) == "2" {
						return client.Forward{To: address.Queue(p.Queue + ".failed"), Message: client.Copy(d.Message())}
					}
					return errors.New("no")
				}))
			for _, m := range p.peer(t).take(p.Queue+".failed", 2) {
				p.keepsUser(t, m)
			}
		}
	})
}
