package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/retry"
)

// publishing is a publisher of any kind.
type publishing interface {
	Publish(ctx context.Context, m *client.Message, edit ...func(*client.Message)) error
}

// lane is a work queue with its publishers and workers.
type lane struct {
	*run
	n        int
	strategy string
	// failing lanes have their queue deleted now and then.
	failing bool
	name    string // of the lane: the strategy, or "queue-deleted"
	prefix  string
	queue   string
	total   int // messages
	policy  retry.Policy
	ledger  *Ledger
	workers []*worker

	mu        sync.Mutex
	next      int // the next message to publish
	limit     int // and where to wait
	published int // answered
	moved     *sync.Cond
	stopped   bool
}

func (r *run) newLane(n int, strategy, name string, failing bool, total int) (*lane, error) {
	l := &lane{
		run: r, n: n, strategy: strategy, name: name, failing: failing, total: total,
		prefix: name + ".", queue: "work-" + name, ledger: NewLedger(r.script, n, total),
	}
	l.moved = sync.NewCond(&l.mu)
	var err error
	l.policy, err = policyOf(strategy, l.prefix)
	return l, err
}

func (l *lane) declare(ctx context.Context, conn *client.Conn) error {
	t, err := retry.Topology(l.policy, declare.QuorumQueue{Name: l.queue, DeliveryLimit: declare.Unlimited})
	if err != nil {
		return err
	}
	for {
		_, err = declare.Apply(ctx, conn.Management(), t)
		// A busy broker may not be able to start a queue in time, again and again.
		if busy, ok := errors.AsType[*declare.Error](err); !ok || !busy.WorthRetrying() || ctx.Err() != nil {
			return err
		}
	}
}

// open lets publishers go on up to message limit.
func (l *lane) open(limit int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit = min(limit, l.total)
	l.moved.Broadcast()
}

// halt lets none go on.
func (l *lane) halt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	l.moved.Broadcast()
}

// take returns the next message to publish, when it may be.
func (l *lane) take() (uint32, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.next >= l.limit && !l.stopped && l.next < l.total {
		l.moved.Wait()
	}
	if l.stopped || l.next >= l.total {
		return 0, false
	}
	l.next++
	return uint32(l.next - 1), true
}

func (l *lane) done() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.published
}

// publish is one of the lane's publishers.
func (l *lane) publish(ctx context.Context, p *client.Publisher[*client.Message]) {
	for {
		id, ok := l.take()
		if !ok {
			return
		}
		l.ledger.Sending(id)
		l.ledger.Answered(id, l.send(ctx, p, id), l.now())
		l.mu.Lock()
		l.published++
		l.mu.Unlock()
	}
}

// send publishes one message, again if need be, and says what is known of it.
func (l *lane) send(ctx context.Context, p publishing, id uint32) Answer {
	m := l.script.makeMessage(l.number, l.n, id)
	if l.edit != nil {
		l.edit(m, id)
	}
	limit := time.Minute
	if l.script.Impatient(l.n, id) {
		limit = 20 * time.Millisecond
	}
	known := AnswerRefused
	for {
		once, cancel := context.WithTimeout(ctx, limit)
		err := p.Publish(once, m)
		cancel()
		switch {
		case err == nil:
			return AnswerAccepted
		case !client.SafeToRetry(err):
			known = AnswerUnknown // and stays unknown after the next try, unless it is accepted
		}
		if ctx.Err() != nil || !l.script.Insists(l.n, id) {
			return known
		}
		limit = time.Minute
		if !errors.Is(err, client.ErrOutcomeUnknown) {
			backoff.Sleep(ctx, max(l.again, 20*time.Millisecond))
		}
	}
}

// drainDeadLetters consumes the dead letters, or what is parked.
func (l *lane) drainDeadLetters(ctx context.Context, conn *client.Conn, queue string, parked bool) error {
	h := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		id, err := readMessage(d.Message(), l.number, l.n)
		if err != nil {
			l.ledger.Foreign(fmt.Sprintf("in %s: %v", queue, err))
			return nil
		}
		end, why := endOf(d.Message())
		if parked {
			end = EndParked
		}
		l.ledger.Dead(id, end, why, retry.Count(d.Message()), l.now())
		return nil
	})
	for ctx.Err() == nil {
		if err := conn.Consume(ctx, queue, h, client.ConsumerConfig{Concurrency: 4, Grace: 5 * time.Second}); err != nil {
			if errors.Is(err, client.ErrClosed) {
				return nil
			}
			return fmt.Errorf("consume %s: %w", queue, err)
		}
	}
	return nil
}

// worker is a place for one worker process after the other.
type worker struct {
	lane  *lane
	n     int
	lives int
	cmd   *exec.Cmd
	stdin interface{ Close() error }
	ended chan struct{}
	// paused, and the records of all lives.
	tails []*tail
	files []*os.File
	log   string
	// expected says that the process is being ended on purpose.
	expected bool
}

// start starts a process.
func (w *worker) start() error {
	l := w.lane
	w.lives++
	base := filepath.Join(l.dir, fmt.Sprintf("worker-%s-%d-%d", l.name, w.n, w.lives))
	w.log = base + ".log"
	j := job{
		URLs: l.site.urls(l.n+w.n, func(n *node) *proxy.Proxy { return n.workers }), Queue: l.queue, Strategy: l.strategy, Prefix: l.prefix,
		Lane: l.n, Seed: l.cfg.Seed, Run: l.number, Began: l.began.UnixMilli(), Records: base + ".records",
		Concurrency: 16, Idle: idleTimeout,
	}
	text, err := json.Marshal(j)
	if err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.Create(w.log)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), workerEnv+"="+string(text), "GOMAXPROCS=2")
	cmd.Stdout, cmd.Stderr = log, log
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	w.cmd, w.stdin, w.ended, w.expected = cmd, stdin, ended, false
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	return w.follow(base + ".records")
}

// follow opens the records, which the process makes as it begins.
func (w *worker) follow(path string) error {
	for began := time.Now(); time.Since(began) < time.Minute; {
		f, err := os.Open(path)
		if err == nil {
			w.lane.tailing.Lock()
			defer w.lane.tailing.Unlock()
			w.files = append(w.files, f)
			w.tails = append(w.tails, &tail{r: f})
			return nil
		}
		select {
		case <-w.ended:
			return fmt.Errorf("worker ended at once: see %s", w.log)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return fmt.Errorf("worker doesn't begin: see %s", w.log)
}

// died says whether the process has ended though nobody wanted that.
func (w *worker) died() bool {
	select {
	case <-w.ended:
		return !w.expected
	default:
		return false
	}
}

// kill ends the process by -9.
func (w *worker) kill() {
	w.expected = true
	_ = w.cmd.Process.Kill()
	<-w.ended
}

// drain ends it in order, or by force after a while, which is an error.
func (w *worker) drain() error {
	w.expected = true
	if err := w.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-w.ended:
		return nil
	case <-time.After(60 * time.Second):
		_ = logStacks(w.cmd.Process)
		select {
		case <-w.ended:
		case <-time.After(5 * time.Second):
			w.kill()
		}
		return fmt.Errorf("a worker doesn't end within 60 s of being told to: its goroutines are in %s", w.log)
	}
}
