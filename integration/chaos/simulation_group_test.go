package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// What an operator does to a group.
const (
	Resharded      Kind = "resharded"       // it gets another number of partitions, and may lose the old queues
	Poisoned       Kind = "poisoned"        // it gets a message that crashes each worker that handles it
	MembersDeleted Kind = "members-deleted" // the exchange over which its workers talk is gone, and declared again
)

// simGroup is what lane "partitioned" has more than others.
type simGroup struct {
	dead string
	// keyed says that its Key is a function that panics over messages without a key.
	keyed bool

	mu   sync.Mutex
	now  []partition.Group // those that have workers, the newest last
	ever []partition.Group
	// changed is closed when now changes.
	changed chan struct{}
	keys    map[string]chan struct{} // a turn each
}

func (g *simGroup) current() []partition.Group {
	now, _ := g.watch()
	return now
}

func (g *simGroup) watch() (now []partition.Group, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.now), g.changed
}

func (g *simGroup) set(now ...partition.Group) {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.changed)
	g.now, g.changed = now, make(chan struct{})
	for _, n := range now {
		if !slices.Contains(g.ever, n) {
			g.ever = append(g.ever, n)
		}
	}
}

// makeGroup declares the lane's group.
func (s *simulation) makeGroup(ctx context.Context, l *simLane) error {
	l.group = &simGroup{dead: l.queue + ".dead", keyed: s.Seed%2 == 0, keys: map[string]chan struct{}{}, changed: make(chan struct{})}
	l.group.set(partition.Group{Name: l.queue, Partitions: 4})
	l.edit = func(m *client.Message, id uint32) { client.PublishTo(l.group.current()[0].Address(l.key(id)))(m) }
	s.add(l)
	return l.declare(ctx)
}

// declareGroup declares generations of the group that have workers, and its dead-letter queue.
func (l *simLane) declareGroup(ctx context.Context, groups ...partition.Group) error {
	for _, g := range groups {
		t, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue(l.group.dead)})
		if err != nil {
			return err
		}
		t.Queues = append(t.Queues, declare.QuorumQueue{Name: l.group.dead, DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
		if _, err := declare.Apply(ctx, l.admin.Management(), t); err != nil {
			return fmt.Errorf("group of lane %s: %w", l.name, err)
		}
	}
	return nil
}

// queuesOfGroup are the names of its queues of all generations, and of its dead-letter queue.
func (l *simLane) queuesOfGroup() []string {
	l.group.mu.Lock()
	defer l.group.mu.Unlock()
	names := []string{l.group.dead}
	for _, g := range l.group.ever {
		names = append(names, g.Queues()...)
	}
	return names
}

// key is the key of a message: messages that fail have other keys than most of those that don't.
func (l *simLane) key(id uint32) string {
	d := int(l.script.dice(l.n, id, 400) >> 33)
	if l.script.Fate(l.n, id) == (Fate{EndHandled, 0}) && id%4 != 0 {
		return fmt.Sprintf("good-%d", d%50)
	}
	return fmt.Sprintf("bad-%d", d%max(4, l.total/16))
}

// waitsForItsKey says that earlier messages of its key may fail, so it may rightly wait.
func (l *simLane) waitsForItsKey(id uint32) bool {
	if l.name == Stranger { // all that it sends to the group has a few keys
		l, _ = l.target(id)
		return l.group != nil
	}
	return l.group != nil && strings.HasPrefix(l.key(id), "bad-")
}

// inOrder publishes a message after the answer to the one before of its key, and notes that in its account.
func (l *simLane) inOrder(of *Ledger, key string, id uint32, publish func()) {
	l.group.mu.Lock()
	if l.group.keys[key] == nil {
		l.group.keys[key] = make(chan struct{}, 1) // in a bubble, time stands still while somebody waits for a mutex
	}
	turn := l.group.keys[key]
	l.group.mu.Unlock()
	turn <- struct{}{}
	defer func() { <-turn }()
	of.Ordered(key, id)
	publish()
}

// consumeGroup is one life of a worker, for each generation that needs workers.
func (w *simWorker) consumeGroup(life, clocked context.Context, conn *client.Conn) {
	l := w.lane
	cfg := partition.Config{
		Worker: fmt.Sprintf("w%d", w.n), Concurrency: 4, Grace: 10 * time.Second,
		Retry: retry.Policy{MaxRetries: maxRetries, Backoff: retry.Delays(l.script.Delays[:]...), Worker: "simulation", GiveUpAfter: l.stretch(giveUpAfter)},
	}
	if l.group.keyed {
		cfg.Key = func(d *client.Delivery) string {
			if id, _ := d.Message().Properties.MessageID.(string); strings.HasPrefix(id, keyless) {
				panic("no key")
			}
			key, _ := d.Annotation("x-routing-key").(string)
			return key
		}
	}
	handler := pause.With(pause.Config{})(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		l.begins()
		return w.handle(ctx, d)
	}))
	var running sync.WaitGroup
	defer running.Wait()
	leave := map[int]context.CancelFunc{}
	for life.Err() == nil {
		current, changed := l.group.watch()
		for _, g := range current {
			if leave[g.Generation] != nil {
				continue
			}
			ctx, cancel := context.WithCancel(clocked)
			leave[g.Generation] = cancel
			running.Go(func() {
				for ctx.Err() == nil {
					if err := partition.Consume(ctx, conn, g, handler, cfg); err != nil && ctx.Err() == nil {
						l.heard.Add(1)
						l.say("worker-%s-%d: generation %d: %v", l.name, w.n, g.Generation, err)
						backoff.Sleep(ctx, 5*time.Second)
					}
				}
			})
		}
		for n, cancel := range leave {
			if !slices.ContainsFunc(current, func(g partition.Group) bool { return g.Generation == n }) {
				cancel()
			}
		}
		select {
		case <-changed:
		case <-life.Done():
		}
	}
	for _, cancel := range leave {
		cancel()
	}
}

// poisonous begins the message-id of a message that crashes its workers.
const poisonous = "poisonous-"

// poison sends one to the group, with the key of other messages. It has to be dead-lettered, and nothing
// else with it.
func (s *simulation) poison(ctx context.Context, l *simLane, n int) {
	m := client.NewMessage([]byte("crash"))
	m.Properties.MessageID = fmt.Sprintf("%s%d", poisonous, n)
	s.step("the group gets a message that crashes its workers")
	to := l.group.current()[0].Address(fmt.Sprintf("good-%d", n%50))
	s.insist(ctx, "send poison", func(ctx context.Context) error {
		p, err := client.NewPublisher[*client.Message](ctx, s.admin, to, client.PublisherConfig{})
		if err != nil {
			return err
		}
		return p.Publish(ctx, m)
	})
	s.unread.Add(1)
}

// special says that a message isn't in any account: it is to die without having been handled.
func special(m *client.Message) bool {
	if m.Properties == nil {
		return false
	}
	id, _ := m.Properties.MessageID.(string)
	return strings.HasPrefix(id, keyless) || strings.HasPrefix(id, poisonous)
}

// operateGroup does what an operator does to a group. It reports whether kind is one of those.
func (s *simulation) operateGroup(ctx context.Context, f simFault) (heal func(), done bool) {
	if f.kind != Resharded && f.kind != MembersDeleted && f.kind != Poisoned {
		return nil, false
	}
	i := slices.IndexFunc(s.lanes, func(l *simLane) bool { return l.group != nil })
	if i < 0 {
		return nil, true
	}
	l := s.lanes[i]
	d := &damage{simulation: s, ctx: ctx, l: l, r: f.dice}
	current := l.group.current()
	from := current[len(current)-1]
	if f.kind == Poisoned {
		s.poison(ctx, l, f.n)
		return nil, true
	}
	if f.kind == MembersDeleted {
		name := fmt.Sprintf("%s.%d.members", l.queue, max(from.Generation, 1))
		s.step("exchange %s is deleted", name)
		d.deleteExchange(name)
		return d.repair, true
	}
	began := time.Since(s.began)
	to := partition.Group{Name: from.Name, Partitions: 1 + d.r.IntN(6), Generation: max(from.Generation, 1) + 1}
	s.step("the group is resharded from %d partitions to %d", from.Partitions, to.Partitions)
	d.insist(ctx, "declare the next generation", func(ctx context.Context) error { return l.declareGroup(ctx, to) })
	l.group.set(from, to)
	backoff.Sleep(ctx, 3*time.Second)
	if d.r.IntN(3) == 0 {
		within, cancel := context.WithTimeout(ctx, time.Duration(d.r.Int64N(int64(40*time.Second))))
		s.step("the first Reshard is interrupted: %v", partition.Reshard(within, s.admin, from, to, partition.ReshardConfig{}))
		cancel()
	}
	finished := make(chan error, 1)
	go func() {
		for {
			err := partition.Reshard(ctx, s.admin, from, to, partition.ReshardConfig{})
			if err == nil || ctx.Err() != nil {
				finished <- err
				return
			}
			s.say("reshard: %v", err)
			backoff.Sleep(ctx, time.Second)
		}
	}()
	resume := func() {}
	if d.r.IntN(3) == 0 {
		resume = l.pause(ctx)
	} else {
		s.flowing = append(s.flowing, flowing{l.n, span{began + time.Minute, began + f.lasts}})
	}
	return func() {
		resume()
		select {
		case <-finished:
		case <-ctx.Done():
			<-finished
			return
		case <-time.After(s.stretch(simPatience)): // it waits for keys whose messages wait for a retry
			s.wrong(ViolationStuck, l.n, "Reshard from %d to %d partitions hasn't ended after %v", from.Partitions, to.Partitions, s.stretch(simPatience))
			s.giveUp()
			<-finished
			return
		}
		s.step("it is resharded; the old workers leave")
		l.group.set(to)
		backoff.Sleep(ctx, 15*time.Second)
		if d.r.IntN(2) == 0 {
			for _, q := range from.Queues() {
				if s.count(q, true) == 0 {
					d.insist(ctx, "delete "+q, func(ctx context.Context) error {
						_, err := declare.DeleteQueue(ctx, s.admin.Management(), q)
						return err
					})
				}
			}
			s.step("its old queues are deleted, as far as they are empty")
		}
	}, true
}
