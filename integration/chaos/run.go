package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/internal/backoff"
)

// Config is what to run. Zero values are the defaults.
type Config struct {
	// Version of RabbitMQ, "4.3" or "4.0". Default: "4.3".
	Version string
	// Nodes is 1, the default, or 3.
	Nodes int
	// Strategies of the lanes, by their names. Default: all that the version has.
	Strategies []string
	// Messages to publish in all lanes together, at least. Default: 50,000.
	Messages int
	// Faults is how many. Default: 12.
	Faults int
	// Kinds of faults. Default: all for the number of nodes.
	Kinds []Kind
	// Seed of the fates and of the schedule.
	Seed uint64
	// Workers is how many processes each lane has. Default: 2.
	Workers int
	// Publishers is how many messages each lane publishes at once. Default: 48.
	Publishers int
	// HandOver is after how long RabbitMQ's dead-letter workers try again what they
	// couldn't hand on, in place of RabbitMQ's 180 s: its setting
	// dead_letter_worker_publisher_confirm_timeout. Default: 15 s.
	HandOver time.Duration
	// Patience is for how long nothing may move before the run gives up. It must be
	// above HandOver. Default: 240 s.
	Patience time.Duration
	// Dir is a folder for the history: schedule, records, logs. Default: a new one
	// in the system's folder for temporary files, which is removed unless something
	// is wrong or Keep is set.
	Dir  string
	Keep bool
	// Out gets a log of the run. Default: none.
	Out io.Writer
}

const (
	// idleTimeout of the clients.
	idleTimeout = 4 * time.Second
	// backWithin is how long a lane is waited for after a fault.
	backWithin = 30 * time.Second
	// notifyAfter is for how long nothing moves before the run reports where messages are.
	notifyAfter = 20 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	if c.Version == "" {
		c.Version = "4.3"
	}
	if c.Nodes == 0 {
		c.Nodes = 1
	}
	if c.Nodes != 1 && c.Nodes != 3 {
		return c, argument.New("Config.Nodes", c.Nodes, "is not supported", "use 1 or 3")
	}
	if len(c.Strategies) == 0 {
		c.Strategies = StrategiesOf(c.Version)
	}
	for _, s := range c.Strategies {
		if !slices.Contains(StrategiesOf(c.Version), s) {
			return c, argument.New("Config.Strategies", s, "is none that RabbitMQ "+c.Version+" has", "use some of "+strings.Join(StrategiesOf(c.Version), ", "))
		}
	}
	for _, n := range []struct {
		name          string
		value         *int
		fallback, max int
	}{{"Messages", &c.Messages, 50_000, 100_000_000}, {"Faults", &c.Faults, 12, 10_000}, {"Workers", &c.Workers, 2, 16}, {"Publishers", &c.Publishers, 48, 10_000}} {
		if *n.value < 0 || *n.value > n.max {
			return c, argument.New("Config."+n.name, *n.value, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", n.max))
		}
		if *n.value == 0 {
			*n.value = n.fallback
		}
	}
	if len(c.Kinds) == 0 {
		c.Kinds, _ = ParseKinds("all", c.Nodes)
	}
	if c.HandOver == 0 {
		c.HandOver = 15 * time.Second
	}
	if c.Patience == 0 {
		c.Patience = 240 * time.Second
	}
	if c.Out == nil {
		c.Out = io.Discard
	}
	return c, nil
}

// StrategiesOf a version of RabbitMQ.
func StrategiesOf(version string) []string {
	all := []string{"republish", "dead-letter"}
	if version != "4.0" {
		all = append(all, "native")
	}
	return all
}

// plan is what the schedule of a run is made of: the doomed lane isn't in it.
func (c Config) plan() Plan {
	return Plan{Seed: c.Seed, Faults: c.Faults, Kinds: c.Kinds, Nodes: c.Nodes, Lanes: len(c.Strategies), Workers: c.Workers}
}

// run is a run in progress.
type run struct {
	cfg    Config
	script Script
	number uint64 // in every body, to recognize this run's messages
	dir    string
	began  time.Time
	// declared is when a queue was last declared.
	declared time.Time
	site     *site
	lanes    []*lane
	// conn is for what faults aren't done to: declaring.
	conn *client.Conn

	out     io.Writer
	logging sync.Mutex
	tailing sync.Mutex // guards the tails of all workers
	records atomic.Int64
	trouble violations // of the run, rather than of a message
	notes   []string   // of the broker's own troubles
	mu      sync.Mutex // guards trouble and notes
	// edit, if not nil, changes a message before it is sent.
	edit func(m *client.Message, id uint32)
	// again is for how long publishers wait after a refusal, at least.
	again time.Duration
}

func (r *run) now() uint32 { return uint32(time.Since(r.began).Milliseconds()) }

func (r *run) say(format string, args ...any) {
	r.logging.Lock()
	defer r.logging.Unlock()
	fmt.Fprintf(r.out, "%7.1fs  %s\n", time.Since(r.began).Seconds(), fmt.Sprintf(format, args...))
}

func (r *run) wrong(kind ViolationKind, lane int, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.trouble.add(Violation{Kind: kind, Lane: lane, Detail: fmt.Sprintf(format, args...)})
}

// Run runs, and returns what was counted. Whether anything is wrong is in the
// Report; an error means that the run couldn't be made, or not to the end.
func Run(ctx context.Context, cfg Config) (_ *Report, err error) {
	cfg, err = cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &run{cfg: cfg, script: Script{Seed: cfg.Seed}, number: uint64(time.Now().UnixNano()), began: time.Now()}
	r.out = cfg.Out
	if r.dir = cfg.Dir; r.dir == "" {
		if r.dir, err = os.MkdirTemp("", "hopback-chaos-"); err != nil {
			return nil, err
		}
	} else if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return nil, err
	}
	report, err := r.run(ctx)
	switch {
	case err != nil:
		fmt.Fprintf(cfg.Out, "the history is in %s\n", r.dir)
	case !report.Good():
		report.History = r.dir
	case cfg.Dir == "" && !cfg.Keep:
		_ = os.RemoveAll(r.dir)
	}
	return report, err
}

func (r *run) run(ctx context.Context) (_ *Report, err error) {
	schedule := r.cfg.plan().Schedule()
	r.keep("schedule.json", schedule)
	fmt.Fprintf(r.out, "chaos: RabbitMQ %s, %d node(s), %v, %d messages, %d faults, seed %d\n", r.cfg.Version, r.cfg.Nodes, r.cfg.Strategies, r.cfg.Messages, r.cfg.Faults, r.cfg.Seed)
	if r.site, err = openSite(ctx, r.out, r.cfg.Version, r.cfg.Nodes, r.cfg.HandOver); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.site.close(ctx)) }()
	r.began = time.Now()

	log, err := os.Create(filepath.Join(r.dir, "client.log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	urls := r.site.direct(0)
	if r.conn, err = client.Connect(ctx, urls[0], clientConfig(urls, idleTimeout, log)); err != nil {
		return nil, err
	}
	defer closeConn(r.conn)
	share, err := r.makeLanes(ctx)
	if err != nil {
		return nil, err
	}

	work, stop := context.WithCancel(ctx)
	defer stop()
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	defer r.endWorkers()
	for _, l := range r.lanes {
		if err := r.openLane(work, l, log, &running); err != nil {
			return nil, err
		}
	}
	running.Go(func() { r.tailAll(work) })

	faults := r.breakAll(ctx, schedule, share)
	report := r.drain(ctx, schedule, faults)
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	return report, nil
}

// makeLanes declares what every lane needs, and returns each lane's share of
// messages for one fault, by lane.
func (r *run) makeLanes(ctx context.Context) (share []int, err error) {
	names := slices.Clone(r.cfg.Strategies)
	failing := slices.Contains(r.cfg.Kinds, QueueDeleted)
	n := len(names)
	each := max(1, (r.cfg.Messages+r.cfg.Faults*n-1)/(r.cfg.Faults*n))
	if failing {
		// A tenth of the others'. Its messages don't count toward Messages.
		names = append(names, string(QueueDeleted))
	}
	for i, name := range names {
		strategy, isFailing, part := name, false, each
		if name == string(QueueDeleted) {
			strategy, isFailing, part = "republish", true, max(1, each/10)
		}
		l, err := r.newLane(i, strategy, name, isFailing, part*r.cfg.Faults)
		if err != nil {
			return nil, err
		}
		declaring, cancel := context.WithTimeout(ctx, 2*time.Minute)
		err = l.declare(declaring, r.conn)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("declare lane %s: %w", name, err)
		}
		r.declared = time.Now()
		r.lanes = append(r.lanes, l)
		share = append(share, part)
	}
	return share, nil
}

// openLane starts the lane's workers, publishers, and what looks at its dead.
func (r *run) openLane(ctx context.Context, l *lane, log io.Writer, running *sync.WaitGroup) error {
	direct := r.site.direct(l.n)
	burying, err := client.Connect(ctx, direct[0], clientConfig(direct, idleTimeout, log))
	if err != nil {
		return err
	}
	running.Go(func() {
		<-ctx.Done()
		closeConn(burying)
	})
	for queue, parked := range map[string]bool{l.policy.Names.DeadLetterQueue(l.queue): false, l.policy.Names.ParkingQueue(): true} {
		running.Go(func() {
			if err := l.drainDeadLetters(ctx, burying, queue, parked); err != nil && ctx.Err() == nil {
				r.wrong(ViolationStuck, l.n, "%v", err)
			}
		})
	}
	workers := r.cfg.Workers
	if l.failing {
		workers = 1
	}
	for i := range workers {
		w := &worker{lane: l, n: i}
		if err := w.start(); err != nil {
			return err
		}
		l.workers = append(l.workers, w)
	}
	urls := r.site.urls(l.n, func(n *node) *proxy.Proxy { return n.publishers })
	publishing, err := client.Connect(ctx, urls[0], clientConfig(urls, idleTimeout, log))
	if err != nil {
		return err
	}
	p, err := client.NewPublisher[*client.Message](ctx, publishing, address.Queue(l.queue), client.PublisherConfig{})
	if err != nil {
		return err
	}
	var publishers sync.WaitGroup
	for range r.cfg.Publishers {
		publishers.Go(func() { l.publish(ctx, p) })
	}
	running.Go(func() {
		<-ctx.Done()
		l.halt()
		publishers.Wait()
		closeConn(publishing)
	})
	return nil
}

func closeConn(c *client.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	_ = c.Close(ctx)
}

// tailAll reads what the workers note, until ctx ends, and once more then.
func (r *run) tailAll(ctx context.Context) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		r.tailOnce()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (r *run) tailOnce() {
	r.tailing.Lock()
	defer r.tailing.Unlock()
	for _, l := range r.lanes {
		for _, w := range l.workers {
			for _, t := range w.tails {
				n := int64(0)
				if err := t.read(func(x record) { n++; l.ledger.attempted(x) }); err != nil {
					r.wrong(ViolationStuck, l.n, "records of a worker can't be read: %v", err)
				}
				r.records.Add(n)
			}
		}
	}
}

// restartDead starts workers again that have died by themselves, which they
// shouldn't.
func (r *run) restartDead() {
	for _, l := range r.lanes {
		for _, w := range l.workers {
			if w.cmd != nil && w.died() {
				r.wrong(ViolationStuck, l.n, "a worker died by itself: see %s", w.log)
				if err := w.start(); err != nil {
					r.wrong(ViolationStuck, l.n, "%v", err)
				}
			}
		}
	}
}

// endWorkers ends what is left of them.
func (r *run) endWorkers() {
	for _, l := range r.lanes {
		for _, w := range l.workers {
			if w.cmd != nil {
				_ = w.stdin.Close()
				w.kill()
			}
		}
	}
	r.tailOnce()
	for _, l := range r.lanes {
		for _, w := range l.workers {
			for _, f := range w.files {
				_ = f.Close()
			}
		}
	}
}

func (r *run) published() (n int) {
	for _, l := range r.lanes {
		n += l.done()
	}
	return n
}

// openMessages are those that are certainly somewhere and haven't ended.
func (r *run) openMessages() (n int) {
	for _, l := range r.lanes {
		n += l.ledger.Open()
	}
	return n
}

var errStuck = errors.New("nothing moves")

// await waits until done says so. It gives up when nothing at all has moved for
// Patience: then there is a violation, and errStuck. Before that, it reports where
// messages are.
func (r *run) await(ctx context.Context, what string, done func() bool) error {
	type mark struct {
		published, open int
		records         int64
	}
	moved, last, notified := time.Now(), mark{}, false
	for !done() {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		r.restartDead()
		if now := (mark{r.published(), r.openMessages(), r.records.Load()}); now != last {
			if notified {
				r.say("... and after %v something moves again", time.Since(moved).Round(time.Second))
			}
			last, moved, notified = now, time.Now(), false
		}
		still := time.Since(moved)
		if still > notifyAfter && !notified {
			notified = true
			r.say("waiting until %s: nothing has moved for %v", what, still.Round(time.Second))
			r.logWhere(ctx)
		}
		if still > r.cfg.Patience {
			r.wrong(ViolationStuck, -1, "waiting until %s: nothing has moved for %v; published %d, open %d", what, still.Round(time.Second), last.published, last.open)
			r.logWhere(ctx)
			r.keepStacks()
			return errStuck
		}
		backoff.Sleep(ctx, 20*time.Millisecond)
	}
	return nil
}

// logWhere says what each queue holds, and some messages that are missing.
func (r *run) logWhere(ctx context.Context) {
	qs, err := r.site.queues(ctx)
	if err != nil {
		r.say("what queues hold can't be told: %v", err)
	}
	for _, q := range qs {
		if q.total() > 0 || q.Messages == nil {
			r.say("  %v", q)
		}
	}
	for _, l := range r.lanes {
		if n := l.ledger.Open(); n > 0 {
			r.say("  lane %s: %d open, such as %v", l.name, n, l.ledger.Missing(8))
		}
	}
	r.keep(fmt.Sprintf("queues-%d.json", r.now()), qs)
}

// breakAll does one fault after the other, each during its share of the messages.
func (r *run) breakAll(ctx context.Context, schedule []Fault, share []int) []FaultReport {
	perFault := 0
	for _, n := range share {
		perFault += n
	}
	reports := make([]FaultReport, len(schedule))
	for i, f := range schedule {
		for k, l := range r.lanes {
			l.open((i + 1) * share[k])
		}
		at := i*perFault + int(f.At*float64(perFault))
		if r.await(ctx, "the next fault is due", func() bool { return r.published() >= at }) != nil {
			return reports[:i]
		}
		reports[i] = r.breakOne(ctx, i, f)
		// All of the share is published, and messages in flight don't pile up.
		if r.await(ctx, fmt.Sprintf("all is published after %v", f), func() bool { return r.published() >= (i+1)*perFault }) != nil ||
			r.await(ctx, fmt.Sprintf("handlers catch up after %v", f), func() bool { return r.openMessages() <= max(2000, perFault) }) != nil {
			return reports[:i+1]
		}
	}
	return reports
}

func (r *run) breakOne(ctx context.Context, i int, f Fault) FaultReport {
	x := FaultReport{Fault: f, From: r.now()}
	var heal func(context.Context) error
	// A fault that can't be done or undone in five minutes is a failure of the run.
	bounded, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	heal, err := r.inject(bounded, f)
	x.Injected = r.now()
	if err == nil {
		backoff.Sleep(ctx, f.For)
		if heal != nil {
			err = heal(bounded)
		}
	}
	x.Healed = r.now()
	if err != nil {
		x.Error = err.Error()
		r.wrong(ViolationStuck, -1, "%v can't be done: %v", f, err)
	}
	// Every lane that has something to do does something again. What it has may be
	// with a broker that waits for HandOver before it hands it on: then it continues
	// without, and the end of the run waits for it.
	back, healed := false, time.Now()
	_ = r.await(ctx, fmt.Sprintf("every lane handles again after %v", f), func() bool {
		back = true
		for _, l := range r.lanes {
			if last, any := l.ledger.LastAttempt(); (!any || last+slot < x.Healed) && l.ledger.Open() > 0 {
				back = false
			}
		}
		return back || time.Since(healed) > backWithin
	})
	if !back {
		r.say("%v: a lane doesn't handle again within %v, though it has messages", f, backWithin)
		r.logWhere(ctx)
	}
	x.Back = r.now()
	r.say("fault %d/%d: %v; healed after %v, every lane handles again %v later; %d published, %d open",
		i+1, r.cfg.Faults, f, ms(x.Healed-x.From), ms(x.Back-x.Healed), r.published(), r.openMessages())
	return x
}

// drain waits until everything has ended, ends the workers, and asks the ledgers.
func (r *run) drain(ctx context.Context, schedule []Fault, faults []FaultReport) *Report {
	for _, l := range r.lanes {
		l.open(l.total)
	}
	stuck := len(faults) < len(schedule)
	if !stuck {
		stuck = r.await(ctx, "all messages have ended", func() bool { return r.openMessages() == 0 }) != nil
	}
	if !stuck {
		stuck = r.awaitEmpty(ctx) != nil
	}
	last := r.now()
	if stuck {
		for _, l := range r.lanes {
			for _, w := range l.workers {
				_ = logStacks(w.cmd.Process)
				w.expected = true
			}
		}
	}
	var draining sync.WaitGroup
	for _, l := range r.lanes {
		for _, w := range l.workers {
			draining.Go(func() {
				if err := w.drain(); err != nil {
					r.wrong(ViolationStuck, l.n, "%v", err)
				}
			})
		}
	}
	draining.Wait()
	r.tailOnce()
	return r.report(schedule, faults, last)
}

// awaitEmpty waits until all queues are empty, and have been for a few of the
// broker's counts.
//
// If the broker can't even count a queue's messages, that is the broker's trouble, and
// noted: see registered. Had it held anything, that would be missing, and this not
// be asked.
func (r *run) awaitEmpty(ctx context.Context) error {
	const want, silentFor = 3, 45 * time.Second
	empty := 0
	began, asked := time.Now(), time.Time{}
	var left []QueueCount
	err := r.await(ctx, "all queues are empty", func() bool {
		if time.Since(asked) < 1100*time.Millisecond {
			return false
		}
		asked = time.Now()
		qs, err := r.site.queues(ctx)
		if err != nil {
			return false
		}
		silent := func(q QueueCount) bool { return q.Messages == nil }
		left = slices.DeleteFunc(qs, func(q QueueCount) bool { return !silent(q) && q.total() == 0 })
		if empty++; len(left) > 0 {
			empty = 0
		}
		if len(left) > 0 && time.Since(began) > silentFor && !slices.ContainsFunc(left, func(q QueueCount) bool { return !silent(q) }) {
			for _, q := range left {
				r.note("the broker tells no count of %s, which isn't missing anything: %s", q.Name, r.statusOf(ctx, q.Name))
			}
			left = nil
			return true
		}
		return empty >= want
	})
	for _, q := range left {
		r.wrong(ViolationLeft, -1, "%v", q)
	}
	return err
}

// statusOf is what the broker says of a queue's process.
func (r *run) statusOf(ctx context.Context, queue string) string {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out, err := r.site.nodes[0].Eval(ctx, fmt.Sprintf(
		`{ok,Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>,queue,<<"%s">>)), {N,_} = amqqueue:get_pid(Q), {N, whereis(N), catch rabbit_quorum_queue:status(<<"/">>,<<"%s">>)}.`, queue, queue))
	if err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(string(out)), " ")
}

func (r *run) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

func (r *run) keep(name string, v any) {
	text, err := json.MarshalIndent(v, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(r.dir, name), text, 0o644)
	}
	if err != nil {
		r.say("%s can't be kept: %v", name, err)
	}
}

func (r *run) keepStacks() {
	buf := make([]byte, 16<<20)
	buf = buf[:runtime.Stack(buf, true)]
	_ = os.WriteFile(filepath.Join(r.dir, "goroutines.txt"), buf, 0o644)
}
