package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/internal/backoff"
)

// Fair is a team whose tenants share its workers with package fair. Two of them are noisy: they publish
// volleys, and some of their handlers take half a minute.
const Fair = "fair"

// Unfair is a tenant that had more handlers than it may, or a slot that was given twice or never came back.
const Unfair ViolationKind = "unfair"

const (
	// volley is how many messages a noisy tenant publishes at once, and volleyEach after how many others.
	volley, volleyEach = 64, 21
	// volleyRest of them come later, when the tenant is bound to a lane.
	volleyRest, volleyPause = 16, 2 * time.Second
	// stuckFor is how long one in 32 of the noisy tenants' handlers takes.
	stuckFor = 30 * time.Second
	// sharedWorkers are the workers of the lane.
	sharedWorkers = 3
	// attending begins the message-id of messages whose handlers wait until their worker uses all of its slots.
	attending = "attending-"
)

// simFair is what lane "fair" has more than others.
type simFair struct {
	queue fair.Queue
	cfg   fair.Config
	// ordinary are how many messages aren't in volleys.
	ordinary int

	mu   sync.Mutex
	full map[int]bool  // workers that have used all of their slots at once
	over chan struct{} // ends the wait for that
}

// makeFair prepares the lane.
func (s *simulation) makeFair(l *simLane) {
	l.fair = &simFair{
		queue: fair.Queue{Name: l.queue, Lanes: 1 + int(s.Seed%3)}, ordinary: l.total,
		cfg:  fair.Config{Concurrency: 4, Retry: l.policies[0], Grace: 10 * time.Second},
		full: map[int]bool{}, over: make(chan struct{}),
	}
	if s.Seed%4 < 2 {
		l.fair.cfg.Concurrency = 8 // a tenant of weight 2 is noisy with six messages
		l.fair.cfg.Weight = func(tenant string) int {
			if tenant == "noisy-1" {
				return 2
			}
			return 1
		}
	}
	l.total += (l.total + volleyEach - 1) / volleyEach * volley
	l.edit = func(m *client.Message, id uint32) { l.fair.queue.To(l.tenant(id))(m) }
}

// tenant is whose a message is. Quiet tenants have a few messages each.
func (l *simLane) tenant(id uint32) string {
	d := l.script.dice(l.n, id, 700)
	switch n := int(id) - l.fair.ordinary; {
	case n >= 0:
		return fmt.Sprintf("noisy-%d", n/volley%2)
	case d%8 == 0:
		return fmt.Sprintf("noisy-%d", d>>8%2)
	}
	return fmt.Sprintf("quiet-%d", int(d>>8%uint64(max(l.fair.ordinary/2, 8))))
}

// isNoisy says that a message may rightly wait for others of its tenant.
func (l *simLane) isNoisy(id uint32) bool {
	return l.fair != nil && strings.HasPrefix(l.tenant(id), "noisy-")
}

// volley are the messages that are to be published together with one.
func (f *simFair) volley(id uint32) []uint32 {
	ids := []uint32{id}
	if id%volleyEach == 0 {
		for k := range uint32(volley) {
			ids = append(ids, uint32(f.ordinary)+id/volleyEach*volley+k)
		}
	}
	return ids
}

// publishFair publishes a message, and a volley now and then.
func (l *simLane) publishFair(ctx context.Context, sending *sync.WaitGroup, p publishing, id uint32) {
	for k, id := range l.fair.volley(id) {
		sending.Go(func() {
			if k > volley-volleyRest {
				backoff.Sleep(ctx, volleyPause)
			}
			l.publish(ctx, p, id)
		})
	}
}

// strangeTenant addresses one of the stranger's messages to the lane, on behalf of a tenant that has no other: by the
// exchange or straight to the queue, with a group-id or without.
func (l *simLane) strangeTenant(m *client.Message, id uint32) {
	tenant := fmt.Sprintf("strange-%d", id)
	if id%4 == 0 {
		tenant += strings.Repeat("x", 255-len(tenant))
	}
	l.fair.queue.To(tenant)(m)
	switch id % 3 {
	case 0:
		client.PublishTo(address.Queue(l.queue))(m)
	case 1:
		m.Properties.GroupID = nil
	}
}

// sharing is one call of fair.Consume, and its handlers that run.
type sharing struct {
	w   *simWorker
	all int
	of  map[string]int
	mu  sync.Mutex
	// attending are those that wait until all slots are in use, and ready is closed then.
	attending int
	ready     chan struct{}
}

// consumeFair is one life of a worker.
func (w *simWorker) consumeFair(life, clocked context.Context, conn *client.Conn) {
	l := w.lane
	for life.Err() == nil {
		h := &sharing{w: w, of: map[string]int{}, ready: make(chan struct{})}
		if err := fair.Consume(clocked, conn, l.fair.queue, h, l.fair.cfg); err != nil && life.Err() == nil {
			l.heard.Add(1)
			l.say("worker-%s-%d: %v", l.name, w.n, err)
			backoff.Sleep(life, 5*time.Second)
		}
	}
}

func (h *sharing) Handle(ctx context.Context, d *client.Delivery) error {
	l := h.w.lane
	name, _ := d.Message().Properties.MessageID.(string)
	tenant := name
	of, id, err := l.read(d.Message())
	if err == nil && of == l {
		tenant = l.tenant(id)
	}
	if d.Queue() != l.queue {
		l.laned.Add(1)
	}
	h.begin(tenant)
	defer h.end(tenant)
	if strings.HasPrefix(name, attending) {
		return h.attend()
	}
	if err == nil && of == l && l.isNoisy(id) {
		dice := l.script.dice(l.n, id, 701)
		time.Sleep(time.Duration(dice >> 8 % uint64(300*time.Millisecond)))
		if dice%32 == 0 {
			time.Sleep(stuckFor)
		}
	}
	return h.w.handle(ctx, d)
}

// begin notes that a handler runs.
func (h *sharing) begin(tenant string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all++
	h.of[tenant]++
	l := h.w.lane
	if most := l.fair.cfg.Concurrency; h.all > most {
		l.wrong(Unfair, l.n, "worker %d runs %d handlers, and may run %d", h.w.n, h.all, most)
	} else if n := h.of[tenant]; n >= most {
		l.wrong(Unfair, l.n, "worker %d runs %d handlers of %s, and no slot is left for others", h.w.n, n, tenant)
	}
}

func (h *sharing) end(tenant string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all--
	if h.of[tenant]--; h.of[tenant] == 0 {
		delete(h.of, tenant)
	}
}

// attend waits until all slots of the worker are in use.
func (h *sharing) attend() error {
	f := h.w.lane.fair
	h.mu.Lock()
	if h.attending++; h.attending == f.cfg.Concurrency {
		f.mu.Lock()
		f.full[h.w.n] = true
		f.mu.Unlock()
		close(h.ready)
	}
	h.mu.Unlock()
	select {
	case <-h.ready:
	case <-f.over:
	}
	return nil
}

// checkSlots looks whether each worker of lane "fair" has all of its slots at the end.
func (s *simulation) checkSlots(ctx context.Context) {
	i := slices.IndexFunc(s.lanes, func(l *simLane) bool { return l.fair != nil })
	if i < 0 || ctx.Err() != nil {
		return
	}
	l := s.lanes[i]
	f := l.fair
	defer close(f.over)
	p, err := client.NewPublisher[*client.Message](ctx, s.admin, address.Address{}, client.PublisherConfig{})
	var publishing sync.WaitGroup
	for n := range 2 * sharedWorkers * f.cfg.Concurrency {
		if err != nil {
			break
		}
		m := client.NewMessage([]byte("attend"))
		m.Properties.MessageID = fmt.Sprintf("%s%d", attending, n)
		publishing.Go(func() { _ = p.Publish(ctx, m, f.queue.To(fmt.Sprintf("%s%d", attending, n))) })
	}
	publishing.Wait()
	for range 60 {
		f.mu.Lock()
		n := len(f.full)
		f.mu.Unlock()
		if n == sharedWorkers {
			return
		}
		backoff.Sleep(ctx, time.Second)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s.wrong(Unfair, l.n, "slots are missing at the end: of %d workers, only %v use all of theirs (publishing: %v)", sharedWorkers, f.full, err)
}
