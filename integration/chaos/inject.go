package chaos

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/internal/backoff"
)

// inject does a fault, and returns what undoes it; nil if nothing has to.
func (r *run) inject(ctx context.Context, f Fault) (heal func(context.Context) error, err error) {
	n := r.site.nodes[f.Node]
	switch f.Kind {
	case Reset:
		return nil, r.onLinks(f.Side, func(p *proxy.Proxy) error { p.Cut(); return nil })
	case HalfOpen:
		return nil, r.onLinks(f.Side, func(p *proxy.Proxy) error { p.Drop(); return nil })
	case Freeze:
		return func(context.Context) error {
			return r.onLinks(f.Side, func(p *proxy.Proxy) error { p.Resume(); return nil })
		}, r.onLinks(f.Side, func(p *proxy.Proxy) error { p.Stall(); return nil })
	case SlowLink:
		return func(context.Context) error {
			return r.onLinks(f.Side, func(p *proxy.Proxy) error { p.Slow(0, 0); return nil })
		}, r.onLinks(f.Side, func(p *proxy.Proxy) error { p.Slow(30*time.Millisecond, 200_000); return nil })
	case Refuse:
		return func(context.Context) error {
			return r.onLinks(f.Side, (*proxy.Proxy).Admit)
		}, r.onLinks(f.Side, func(p *proxy.Proxy) error { p.Refuse(); p.Cut(); return nil })
	case BrokerKilled, NodeKilled:
		if young := time.Since(r.declared); young < registered {
			backoff.Sleep(ctx, registered-young)
		}
		return r.together(n.startAgain), n.Kill(ctx)
	case BrokerPaused, NodePaused:
		return r.together(n.unpause), n.pause(ctx)
	case MemoryAlarm:
		return n.set("vm_memory_monitor:set_vm_memory_high_watermark(0.6)"), n.set("vm_memory_monitor:set_vm_memory_high_watermark(0.000001)")(ctx)
	case DiskAlarm:
		return n.set(`rabbit_disk_monitor:set_disk_free_limit("50MB")`), n.set(`rabbit_disk_monitor:set_disk_free_limit("100000GB")`)(ctx)
	case QueueDeleted:
		return r.deleteQueue(ctx)
	case WorkerKilled, WorkerPaused, WorkerDrained:
		return r.breakWorkers(f)
	case NodeIsolated:
		p, ok := n.machine.(interface {
			Isolate(context.Context) error
			Rejoin(context.Context) error
		})
		if !ok {
			return nil, errors.ErrUnsupported
		}
		return r.together(p.Rejoin), p.Isolate(ctx)
	case RollingRestart:
		return nil, r.rollingRestart(ctx)
	case LeaderMoved:
		return nil, r.moveLeader(ctx, r.lanes[f.Lane], n)
	}
	return nil, fmt.Errorf("no fault %q", f.Kind)
}

// registered is after how long RabbitMQ has surely written down that a queue's member
// is on a node. A kill -9 within about 3 s of the declaration makes 4.0.5 start the
// queue again as a member of nothing, empty and without a leader, permanently. That loses
// what the queue held, and no client can help it.
const registered = 6 * time.Second

// onLinks does something to the proxies of one side, or both, of every node.
func (r *run) onLinks(side Side, do func(*proxy.Proxy) error) error {
	var errs []error
	for _, n := range r.site.nodes {
		if side != SideWorkers {
			errs = append(errs, do(n.publishers))
		}
		if side != SidePublishers {
			errs = append(errs, do(n.workers))
		}
	}
	return errors.Join(errs...)
}

// set calls a function of the broker that returns ok.
func (n *node) set(call string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := n.Eval(ctx, "ok = "+call+".")
		return err
	}
}

// deleteQueue deletes the work queues of the doomed lanes.
func (r *run) deleteQueue(ctx context.Context) (heal func(context.Context) error, err error) {
	for _, l := range r.lanes {
		if !l.failing {
			continue
		}
		err := api[struct{}](ctx, r.site, http.MethodDelete, "/queues/%2F/"+l.queue, nil)
		if err != nil {
			return nil, err
		}
		l.ledger.Deleted(r.now())
	}
	return func(ctx context.Context) error {
		for _, l := range r.lanes {
			if l.failing {
				if err := l.declare(ctx, r.conn); err != nil {
					return err
				}
				r.declared = time.Now()
			}
		}
		return nil
	}, nil
}

// breakWorkers does a fault to one worker of a lane, or all.
func (r *run) breakWorkers(f Fault) (heal func(context.Context) error, err error) {
	l := r.lanes[f.Lane]
	workers := l.workers
	if f.Worker >= 0 {
		workers = workers[f.Worker : f.Worker+1]
	}
	each := func(do func(*worker) error) error {
		var errs []error
		for _, w := range workers {
			errs = append(errs, do(w))
		}
		return errors.Join(errs...)
	}
	again := func(context.Context) error { return each((*worker).start) }
	switch f.Kind {
	case WorkerKilled:
		return again, each(func(w *worker) error { w.kill(); return nil })
	case WorkerDrained:
		return again, each((*worker).drain)
	}
	return func(context.Context) error {
		return each(func(w *worker) error { return continueProcess(w.cmd.Process) })
	}, each(func(w *worker) error { return pauseProcess(w.cmd.Process) })
}

func (r *run) rollingRestart(ctx context.Context) error {
	for _, n := range r.site.nodes {
		if err := n.Stop(ctx); err != nil {
			return err
		}
		if err := n.startAgain(ctx); err != nil {
			return err
		}
		// One after the other: two down at once would be without a majority.
		if err := r.site.whole(ctx); err != nil {
			return err
		}
	}
	return nil
}

// together undoes a fault of a node, and waits until a cluster is whole again, so
// that the next fault finds a majority.
func (r *run) together(heal func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := heal(ctx); err != nil || r.site.whole == nil {
			return err
		}
		return r.site.whole(ctx)
	}
}

// moveLeader moves the leader of a lane's work queue to a node.
func (r *run) moveLeader(ctx context.Context, l *lane, to *node) error {
	_, err := to.Eval(ctx, fmt.Sprintf(
		`{ok,Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>,queue,<<"%s">>)), rabbit_quorum_queue:transfer_leadership(Q, '%s').`, l.queue, to.name))
	return err
}
