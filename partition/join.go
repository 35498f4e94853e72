package partition

import (
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/startcheck"
)

// mailbox is the queue on which a worker hears the others' beats. Old beats say nothing, so it
// keeps few, and RabbitMQ deletes it when the worker is gone.
func (g Group) mailbox() declare.Topology {
	q := declare.ClassicQueue{
		Name: g.members() + "." + rand.Text(), DeadLetter: declare.Drop(),
		MessageTTL: 10 * time.Second, MaxLength: 10_000, Expires: time.Minute,
	}
	return declare.Topology{Queues: []declare.Queue{q}, Bindings: []declare.Binding{{Source: g.members(), Queue: q.Name}}}
}

const (
	// deaf is after how long without any beat, not even its own, a worker takes another mailbox, and
	// maxDeaf how long it waits at most between two, while nobody is heard.
	deaf    = 5 * time.Second
	maxDeaf = time.Minute
	// mailboxLimit is how long the broker has to declare or delete a mailbox.
	mailboxLimit = 5 * time.Second
)

// listen calls hear with each beat of the group until ctx ends. It returns when there is a mailbox, or
// when alarms reports that the broker can't be asked for one until its alarm is over. fail is called if it can't go on. What beats come from a queue that can be lost: its node may be down,
// and somebody may delete its binding or the exchange, which no consumer notices. So if there are no
// beats, another queue takes its place, unless none are expected yet: waits reports that, and may be nil.
func (g Group) listen(ctx, starting context.Context, conn *client.Conn, hear func(beat), fail context.CancelCauseFunc, alarms inside.Alarms, waits func() bool) (stop func(), err error) {
	l := &listener{group: g, conn: conn, hear: hear, fail: fail, waits: waits}
	box := g.mailbox()
	_, pending, err := startcheck.Check[struct{}]{
		Run:    func(ctx context.Context) (struct{}, error) { return struct{}{}, l.apply(ctx, box) },
		Alarms: alarms, Stop: fail,
	}.Start(starting, func(struct{}) {})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		if pending != nil {
			defer pending.Cancel()
			select {
			case <-pending.Done():
			case <-ctx.Done():
				return
			}
		}
		l.run(ctx, box)
	})
	return func() {
		cancel()
		running.Wait()
	}, nil
}

// listener is a call of listen.
type listener struct {
	group Group
	conn  *client.Conn
	hear  func(beat)
	fail  context.CancelCauseFunc
	waits func() bool  // no worker of the group sends beats yet; nil: all do
	last  atomic.Int64 // when it heard the last beat, in Unix nanoseconds
}

func (l *listener) apply(ctx context.Context, box declare.Topology) error {
	_, err := declare.Apply(ctx, l.conn.Management(), box)
	return err
}

func nameOf(box declare.Topology) string { return box.Queues[0].Address().QueueName() }

// run consumes from a mailbox, and from others after it, until ctx ends.
func (l *listener) run(ctx context.Context, box declare.Topology) {
	log := inside.Of(l.conn).Log().With("group", l.group.Name)
	var deleting sync.WaitGroup
	defer deleting.Wait()
	remove := func() {
		name := nameOf(box)
		deleting.Go(func() {
			ctx, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			defer done()
			_, _ = declare.DeleteQueue(ctx, l.conn.Management(), name)
		})
	}
	var silence, refusal loglines.Outage
	for patience, first := deaf, true; ; first = false {
		heard, err := l.from(ctx, box, patience)
		if err != nil && (first || errors.Is(err, client.ErrClosed)) {
			l.fail(err)
			return
		}
		if ctx.Err() != nil {
			remove()
			return
		}
		if patience = min(2*patience, maxDeaf); heard {
			patience, silence = deaf, loglines.Outage{}
		}
		log.Log(ctx, silence.Level(time.Now()), "hopback: no beat of the group's workers has come, not even this worker's; it listens on another queue", "queue", nameOf(box), "error", err)
		next := l.group.mailbox()
		applying, done := context.WithTimeout(ctx, mailboxLimit)
		err = l.apply(applying, next)
		done()
		if err != nil {
			if ctx.Err() == nil {
				log.Log(ctx, refusal.Level(time.Now()), "hopback: a queue for the beats of the group's workers can't be declared; trying again", "error", err)
			}
			continue
		}
		refusal = loglines.Outage{}
		remove()
		box = next
	}
}

// from consumes from a mailbox until ctx ends, or there was no beat for so long. It reports whether
// there was one.
func (l *listener) from(ctx context.Context, box declare.Topology, patience time.Duration) (heard bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	l.last.Store(began.UnixNano())
	silence := time.NewTicker(deaf / 5)
	defer silence.Stop()
	ended := make(chan error, 1)
	go func() {
		ended <- l.conn.Consume(ctx, nameOf(box), client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if b, ok := readBeat(d.Message().GetData()); ok {
				l.last.Store(time.Now().UnixNano())
				l.hear(b)
			}
			return nil
		}), client.ConsumerConfig{Prefetch: 100, Grace: time.Second, OnGone: func(ctx context.Context) error { return l.apply(ctx, box) }})
	}()
	for {
		select {
		case err := <-ended:
			return l.last.Load() > began.UnixNano(), err
		case <-silence.C:
			last := l.last.Load()
			switch silent := time.Since(time.Unix(0, last)); {
			case silent < 0 /* the host's clock was set back */, l.waits != nil && l.waits():
				l.last.CompareAndSwap(last, time.Now().UnixNano())
			case silent > patience:
				cancel()
				<-ended
				return last > began.UnixNano(), nil
			}
		}
	}
}

// join connects the worker with the others. heard is the ctx of that.
func (w *worker) join(ctx, heard context.Context, conn *client.Conn, fail context.CancelCauseFunc) (leave func(), err error) {
	to := address.Exchange(w.group.members(), "")
	p, err := client.NewPublisher[beat](ctx, conn, to, client.PublisherConfig{})
	if err != nil {
		return nil, err
	}
	hangUp, err := w.group.listen(heard, ctx, conn, func(b beat) { w.do(func() { w.hear(b) }) }, fail, inside.Of(conn), w.waits.Load)
	if err != nil {
		return nil, errors.Join(err, p.Close(ctx))
	}
	var sending sync.WaitGroup
	quit := make(chan struct{})
	failing := false
	send := func(b beat) {
		err := send(heard, p, b)
		if err != nil && !failing && heard.Err() == nil {
			w.log.Warn("hopback: a beat can't be published, so the group's other workers don't know what this one has", "error", err)
		}
		failing = err != nil
	}
	sending.Go(func() {
		for {
			select {
			case b := <-w.beats:
				send(b)
			case <-quit:
				select {
				case b := <-w.beats:
					send(b)
				default:
				}
				return
			}
		}
	})
	return func() {
		close(quit)
		sending.Wait()
		hangUp()
		ctx, done := context.WithTimeout(context.Background(), time.Second)
		defer done()
		_ = p.Close(ctx)
	}, nil
}

// send publishes a beat. If it can't be sent soon, the next one says more.
func send(ctx context.Context, p *client.Publisher[beat], b beat) error {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	return p.Publish(ctx, b)
}

// awaitOpen waits until Reshard has opened the group's generation; false: ctx has ended.
func (w *worker) awaitOpen(ctx context.Context, conn *client.Conn, in inside.Conn[*client.Delivery]) bool {
	for failures := 0; ; {
		var opened bool
		var left unfinished
		err := in.Start(ctx, w.group.Name, func() (err error) { // which takes as long as an alarm
			opened, left, err = w.group.isOpen(ctx, conn.Management())
			return err
		})
		switch {
		case opened && err == nil:
			if len(left.parts) > 0 {
				known := left
				w.held.Store(&known)
				w.consumers.Go(func() { w.watchHeld(ctx, conn.Management(), left) })
			}
			w.consumers.Go(func() { w.upkeep(ctx, conn) })
			return true
		case err != nil:
			failures++
		case failures == 0:
			w.log.Info("hopback: this generation of the group waits for Reshard", "generation", w.group.Generation)
			failures++
		}
		if !backoff.Sleep(ctx, time.Second) {
			return false
		}
	}
}

// lastReports sends the last beat, after the loop has ended.
func (w *worker) lastReports() {
	w.leaving = true
	for _, p := range w.parts {
		if p.serves {
			p.serves = false
			w.assigned(p, false)
		}
	}
	w.report(false)
}
