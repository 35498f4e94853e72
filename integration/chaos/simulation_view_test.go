package chaos

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/middleware/live"
)

// Misshown is a live view that differs from what the workers do, long after all is well.
const Misshown ViolationKind = "misshown"

// shownWithin is how long it may differ. A worker that was refused asks again after five minutes, and one whose exchange
// was deleted binds its queue again after ten.
const shownWithin = 12 * time.Minute

// simView is what an operator watches: the workers of lane "limited". Nil: there is no such lane.
type simView struct {
	mu    sync.Mutex
	lives map[*simShown]struct{} // that last
	shown live.Fleet
}

// simShown is what one life of a worker has done.
type simShown struct {
	host             string
	began            time.Time
	running, handled int
}

// begin returns the middleware for a life of a worker, which lasts until end is called.
func (v *simView) begin(w *simWorker, conn *client.Conn) (show client.Middleware, end func()) {
	x := &simShown{host: fmt.Sprintf("%d since %v", w.n, time.Since(w.lane.began)), began: time.Now()}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lives[x] = struct{}{}
	with := live.With(conn, live.Config{Host: x.host})
	show = func(h client.Handler) client.Handler {
		h = with(h)
		return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
			v.count(x, 1, 0)
			defer v.count(x, -1, 1)
			return h.Handle(ctx, d)
		})
	}
	return show, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.lives, x)
	}
}

func (v *simView) count(x *simShown, running, handled int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	x.running, x.handled = x.running+running, x.handled+handled
}

// openView has an operator watch, as the page of the desk does, until end is called.
func (s *simulation) openView(ctx context.Context) (end func()) {
	if s.view == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		conn, err := s.connect(ctx, "publisher-view", 0, SidePublishers)
		if err != nil {
			return
		}
		defer closeConn(conn)
		for ctx.Err() == nil {
			err := live.Watch(ctx, conn, func(f live.Fleet) {
				s.view.mu.Lock()
				defer s.view.mu.Unlock()
				s.view.shown = f
			})
			if err != nil {
				s.say("publisher-view: %v", err)
				backoff.Sleep(ctx, 2*time.Second)
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// glance checks that the view shows the workers that there are, before the next fault. A worker that was refused a permission
// may be missing for a while. The first fault comes sooner than Watch notices workers that have started after its question.
func (s *simulation) glance(before []simFault) {
	if s.view == nil || len(before) == 0 || slices.ContainsFunc(before[max(len(before)-6, 0):], func(f simFault) bool { return f.kind == PermissionsGone }) {
		return
	}
	is, want := s.view.compared()
	if shown, there := slices.Sorted(maps.Keys(is)), slices.Sorted(maps.Keys(want)); !slices.Equal(shown, there) {
		s.misshown("before the next fault, the view shows %q, and the workers are %q", shown, there)
	}
}

func (s *simulation) misshown(format string, args ...any) {
	s.wrong(Misshown, slices.IndexFunc(s.lanes, func(l *simLane) bool { return l.limit != nil }), format, args...)
}

// checkView waits until what is shown is what the workers do. All messages have been handled.
func (s *simulation) checkView(ctx context.Context) {
	if s.view == nil {
		return
	}
	var is, want map[string]string
	for began := time.Now(); time.Since(began) < shownWithin && ctx.Err() == nil; backoff.Sleep(ctx, 5*time.Second) {
		if is, want = s.view.compared(); maps.Equal(is, want) {
			return
		}
	}
	if ctx.Err() == nil {
		s.misshown("after %v, the view shows %v, and the workers say %v", shownWithin, is, want)
	}
}

// compared describes what is shown and what is so, by worker. What a worker has handled more than an hour ago isn't shown.
func (v *simView) compared() (is, want map[string]string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	is, want = map[string]string{}, map[string]string{}
	young := map[string]bool{}
	describe := func(host string, running, listed, handled int) string {
		if !young[host] {
			return fmt.Sprintf("%d running, %d listed", running, listed)
		}
		return fmt.Sprintf("%d running, %d listed, %d handled", running, listed, handled)
	}
	for x := range v.lives {
		young[x.host] = time.Since(x.began) < 50*time.Minute
		want[x.host] = describe(x.host, x.running, x.running, x.handled)
	}
	for _, w := range v.shown.Workers {
		running, handled := 0, 0
		for _, q := range w.Queues {
			running, handled = running+q.Running, handled+int(q.Handled)
		}
		is[w.Host] = describe(w.Host, running, len(w.Running)+w.More, handled)
	}
	return is, want
}
