package partition

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
)

// Definitions that were exported before a Reshard can come back at any time, for instance at every
// start of a broker with load_definitions. The owner of a group's first partition looks for what they
// bring back, and removes it.
const (
	upkeepFirst = 3 * time.Second
	upkeepEvery = time.Minute
	// upkeepPast is for how many earlier generations it looks.
	upkeepPast = 20
	// emptyAfter is for how long an old queue must have been empty before its consumer ends.
	emptyAfter = 2 * time.Second
)

// upkeep keeps the routes of a group right that was resharded, until ctx ends.
func (w *worker) upkeep(ctx context.Context, conn *client.Conn) {
	for pause := upkeepFirst; backoff.Sleep(ctx, pause); pause = upkeepEvery {
		owns := make(chan bool, 1)
		w.do(func() { owns <- w.parts[0].serves })
		select {
		case yes := <-owns:
			if !yes {
				continue
			}
		case <-w.ended:
			return
		}
		rescue := func(old Group, q declare.QueueInfo) error { return w.rescue(ctx, conn, old, q) }
		if err := w.keepRoutes(ctx, conn.Management(), rescue); err != nil && ctx.Err() == nil {
			w.log.Warn("hopback: the routes of the group couldn't be checked", "error", err)
		}
	}
}

// keepRoutes repairs the routes, and calls rescue for the queues of earlier generations.
func (w *worker) keepRoutes(ctx context.Context, m declare.Requester, rescue func(old Group, q declare.QueueInfo) error) error {
	g := w.group
	next := Group{Name: g.Name, Generation: g.Generation + 1}
	if moved, err := bound(ctx, m, next.behindNow()); moved || err != nil {
		return err // this generation isn't in use any more
	}
	// Once the next generation is there, a Reshard may remove these bindings at any time, also since the
	// question above. One that is declared again then takes messages back, or to an exchange that leads nowhere.
	applied, err := bound(ctx, m, next.behindFront())
	if err == nil && !applied {
		err = w.repair(ctx, m)
	}
	if err != nil {
		return err
	}
	for n := g.Generation - 1; n > max(0, g.Generation-1-upkeepPast); n-- {
		if err := w.retire(ctx, m, Group{Name: g.Name, Generation: n}, Group{Name: g.Name, Generation: n + 1}, rescue); err != nil {
			return err
		}
	}
	return nil
}

// repair declares the bindings that lead to the generation.
func (w *worker) repair(ctx context.Context, m declare.Requester) error {
	g := w.group
	for _, b := range []declare.Binding{g.behindNow(), g.inUse()} {
		if there, err := bound(ctx, m, b); err != nil {
			return err
		} else if there {
			continue
		}
		// A version before Name.now has resharded the group, or the binding was deleted.
		w.log.Warn("hopback: a binding of the group was missing, and is declared", "source", b.Source, "exchange", b.Exchange)
		if err := replace(ctx, m, declare.Exchange{Name: g.now(), Type: declare.ExchangeModulusHash}); err != nil {
			return err
		}
		if _, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{b}}); err != nil {
			return err
		}
	}
	return nil
}

// retire seals an earlier generation, and removes what leads to its queues.
func (w *worker) retire(ctx context.Context, m declare.Requester, old, next Group, rescue func(old Group, q declare.QueueInfo) error) error {
	queues, err := old.existing(ctx, m)
	if err != nil {
		return err
	}
	back := []declare.Binding{old.behindNow(), {Source: old.Name, Exchange: old.hash()}}
	for _, q := range queues {
		back = append(back, declare.Binding{Source: old.hash(), Queue: q.Name})
	}
	for _, b := range back {
		there, err := bound(ctx, m, b)
		if err != nil {
			return err
		}
		if !there {
			continue
		}
		w.log.Warn("hopback: a binding of an earlier generation is back, perhaps from imported definitions; it is removed", "source", b.Source, "exchange", b.Exchange, "queue", b.Queue)
		if err := declare.DeleteBinding(ctx, m, b); err != nil {
			return err
		}
	}
	_, leads := old.sealed(next)
	sealed, err := bound(ctx, m, leads)
	if err == nil && !sealed {
		err = old.seal(ctx, m, next)
	}
	if err != nil {
		return err
	}
	for _, q := range queues {
		if err := rescue(old, q); err != nil {
			return err
		}
	}
	return nil
}

// rescue moves messages of a queue of old to this generation if nobody consumes from it. Their order
// is kept among themselves, but not relative to later messages of their keys.
func (w *worker) rescue(ctx context.Context, conn *client.Conn, old Group, q declare.QueueInfo) error {
	if q.Messages == 0 || q.Consumers > 0 || w.held.Load() != nil {
		return nil
	}
	w.log.Error("hopback: messages of an earlier generation wait in a queue without a worker; they are moved to this generation, where some may be duplicates", "queue", q.Name, "messages", q.Messages)
	genuine, err := old.markerSeal(ctx, conn)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var last atomic.Int64 // when the last message was moved
	last.Store(time.Now().UnixNano())
	ended := make(chan error, 1)
	go func() {
		ended <- conn.Consume(ctx, q.Name, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			last.Store(time.Now().UnixNano())
			if seal, _, marker := markerOf(d); marker && genuine != "" && seal == genuine {
				return nil // its Reshard has ended
			}
			return client.Forward{To: address.Exchange(w.group.hash(), routingKeys(d)[0]), Message: client.Copy(d.Message())}
		}), client.ConsumerConfig{Concurrency: 1, NoIsolation: true})
	}()
	for {
		select {
		case err := <-ended:
			return err
		case <-time.After(emptyAfter):
		}
		if time.Since(time.Unix(0, last.Load())) < emptyAfter {
			continue
		}
		if now, err := declare.Inspect(ctx, conn.Management(), q.Name); err != nil || now.Messages == 0 {
			stop() // it finishes what it has
		}
	}
}
