package web

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/middleware/live"
)

const (
	// workersLimit is how long it may take to ask the workers. Visitors share what they answer, until nobody has visited for
	// workersIdle, and an error for workersAge.
	workersLimit, workersIdle, workersAge = 15 * time.Second, 15 * time.Second, 2 * time.Second
	// shownWorkers and shownRunning are how many are shown.
	shownWorkers, shownRunning = 200, 100
	// maxLiveQueues is how many queues are shown. Forged answers may name any number, and the authorizer is asked
	// about each.
	maxLiveQueues = 1000
)

// fleet is what the workers have answered last. They are watched while somebody visits.
type fleet struct {
	mu      sync.Mutex
	last    live.Fleet
	err     error
	failed  time.Time
	visited time.Time
	known   chan struct{} // closed when last or err is known; nil: nobody watches
}

// get returns what the workers do, as of a moment ago.
func (f *fleet) get(ctx context.Context, h *Handler) (live.Fleet, error) {
	f.mu.Lock()
	f.visited = time.Now()
	if f.known == nil && f.err != nil && time.Since(f.failed) < workersAge {
		defer f.mu.Unlock()
		return f.last, f.err
	}
	if f.known == nil {
		known := make(chan struct{})
		if !h.spawn(func() { f.watch(h, known) }) {
			f.mu.Unlock()
			return live.Fleet{}, errEnding
		}
		f.known = known
	}
	known := f.known
	f.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, workersLimit)
	defer cancel()
	select {
	case <-known:
	case <-ctx.Done():
		return live.Fleet{}, context.Cause(ctx)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last, f.err
}

// watch watches the workers until nobody visits, or the broker doesn't answer.
func (f *fleet) watch(h *Handler, known chan struct{}) {
	ctx, cancel := context.WithCancel(h.ctx)
	defer cancel()
	done := sync.OnceFunc(func() { close(known) })
	err := live.Watch(ctx, h.desk.Conn(), func(all live.Fleet) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.last, f.err = all, nil
		if time.Since(f.visited) > workersIdle {
			cancel()
		}
		done()
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known = nil; err != nil {
		f.last, f.err, f.failed = live.Fleet{}, err, time.Now()
	}
	done()
}

// workersData is the page about the workers.
type workersData struct {
	page
	Err     string
	Workers []workerView
	Running []runningView // the longest first
	Dropped int

	// These are of all workers. The lists have the first ones.
	Count, RunningNow, Stuck int
	Handled, Failed          uint64
}

// workerView is a worker, as far as the visitor may view its queues.
type workerView struct {
	live.Worker
	RunningNow, Stuck int
	Handled, Failed   uint64
}

type runningView struct {
	live.Running
	Host string
}

// For is how long the handler has run.
func (r runningView) For() time.Duration { return max(time.Since(r.Since), 0) }

// workers shows what the workers do.
func (h *Handler) workers(v *visit) *refusal {
	data := workersData{page: h.page(v, "Workers")}
	data.Refresh = 2
	all, err := h.fleet.get(v.Context(), h)
	data.Err, data.Dropped = plainError(err), all.Dropped
	known := map[string]bool{}
	sees := func(queue string) bool {
		if _, ok := known[queue]; !ok && len(known) < maxLiveQueues {
			known[queue] = h.sees(v, queue)
		}
		return known[queue]
	}
	for _, w := range all.Workers {
		data.add(w, sees)
	}
	slices.SortStableFunc(data.Workers, func(a, b workerView) int { return cmp.Compare(b.Stuck, a.Stuck) })
	slices.SortStableFunc(data.Running, func(a, b runningView) int { return a.Since.Compare(b.Since) })
	data.Count = len(data.Workers)
	data.Workers = data.Workers[:min(len(data.Workers), shownWorkers)]
	data.Running = data.Running[:min(len(data.Running), shownRunning)]
	h.render(v.w, http.StatusOK, "workers", data)
	return nil
}

// add adds what the visitor may see of a worker. A worker of other queues isn't shown.
func (data *workersData) add(w live.Worker, sees func(queue string) bool) {
	x := workerView{Worker: w}
	seen := 0
	for _, q := range w.Queues {
		if !sees(q.Name) {
			continue
		}
		seen++
		x.RunningNow, x.Stuck, x.Handled, x.Failed = x.RunningNow+q.Running, x.Stuck+q.Stuck, x.Handled+q.Handled, x.Failed+q.Failed
	}
	if seen == 0 && len(w.Queues) > 0 {
		return
	}
	data.Workers = append(data.Workers, x)
	data.RunningNow, data.Stuck, data.Handled, data.Failed = data.RunningNow+x.RunningNow, data.Stuck+x.Stuck, data.Handled+x.Handled, data.Failed+x.Failed
	for _, r := range w.Running {
		if sees(r.Queue) {
			data.Running = append(data.Running, runningView{r, w.Host})
		}
	}
}

// More is how many running handlers aren't shown.
func (data workersData) More() int { return max(data.RunningNow-len(data.Running), 0) }
