package partition

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// ReshardConfig configures [Reshard]. The zero value is ready to use.
type ReshardConfig struct {
	// Late is for how long after the switch a message may still be on its way to the old
	// generation inside of RabbitMQ. One that takes longer is handled, but messages of its key
	// that were published later may be handled before it. Default: 5 s.
	Late time.Duration
	// Progress, if not nil, is called with how many of the old partitions are finished.
	Progress func(finished, partitions int)
}

// Reshard moves a group to other Partitions, or another Window, while publishers and workers run.
// to is from with the next Generation. Before the call:
//
//  1. Apply the topology of to.
//  2. Start workers for to. They wait. Those of from continue to run.
//
// Reshard deletes the exchange of the old generation, and with that, in one step, RabbitMQ routes
// all further messages to the new one. It waits until the old workers have completed all messages
// of the old generation, and then has the new workers begin. So the order by key is kept across
// the switch, apart from messages that are later than [ReshardConfig.Late]; no message is lost.
// The new generation stands still while the old one is finished, so reshard when the backlog is
// short.
//
// If Reshard fails or ctx ends, call it again with the same arguments: it continues. Afterwards
// stop the old workers, and delete the old queues when they are empty. Never apply the topology
// of the old generation again: RabbitMQ refuses that, because Reshard leaves an exchange of
// another type in its place.
func Reshard(ctx context.Context, conn *client.Conn, from, to Group, cfg ReshardConfig) error {
	if conn == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	from, err := from.withDefaults()
	if err != nil {
		return err
	}
	if to, err = to.withDefaults(); err != nil {
		return err
	}
	if to.Name != from.Name || to.Generation != from.Generation+1 {
		return argument.At(argument.Root("to").Field("Generation"), argument.CodeConflict, to.Generation, fmt.Sprintf("isn't the one after generation %d of %q", from.Generation, from.Name), "use the same Name, and the next Generation")
	}
	if cfg.Late < 0 {
		return argument.At(argument.Root("ReshardConfig").Field("Late"), argument.CodeOutOfRange, cfg.Late, "is negative", "use a positive duration, or 0 for the default")
	}
	if cfg.Late == 0 {
		cfg.Late = 5 * time.Second
	}
	for _, g := range []Group{from, to} {
		if _, err := g.check(ctx, conn); err != nil {
			return err
		}
	}
	if err := from.redirect(ctx, conn, to); err != nil {
		return err
	}
	for round := range 2 {
		if err := from.finish(ctx, conn, func(finished int) {
			if round == 1 && cfg.Progress != nil {
				cfg.Progress(finished, from.Partitions)
			}
		}); err != nil {
			return err
		}
		if round > 0 {
			break
		}
		select {
		case <-time.After(cfg.Late):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	flag := declare.QuorumQueue{Name: to.opened(), DeadLetter: declare.Drop()}
	_, err = declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{flag}})
	return err
}

// redirect has RabbitMQ route further messages to the next generation.
func (g Group) redirect(ctx context.Context, conn *client.Conn, to Group) error {
	m := conn.Management()
	bound, err := declare.Bindings(ctx, m, declare.Binding{Source: to.front(), Exchange: to.hash()})
	if err != nil {
		return err
	}
	if len(bound) == 0 {
		return fmt.Errorf("hopback: reshard %q: generation %d isn't bound; apply its topology first: %w", g.Name, to.Generation, declare.ErrNotFound)
	}
	// A worker of the old generation may apply its topology in between.
	tombstone := declare.Topology{Exchanges: []declare.Exchange{{Name: g.hash(), Type: declare.ExchangeHeaders}}}
	for range 10 {
		if err = declare.DeleteExchange(ctx, m, g.hash()); err != nil {
			return err
		}
		if _, err = declare.Apply(ctx, m, tombstone); !errors.Is(err, declare.ErrConflict) {
			return err
		}
	}
	return err
}

// finish returns when all messages that are in the group's queues now are completed: it puts a
// marker into each, and waits for the workers' reports.
func (g Group) finish(ctx context.Context, conn *client.Conn, progress func(finished int)) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	reports := make(chan string, maxPartitions)
	hangUp, err := g.listen(ctx, ctx, conn, func(b beat) {
		if b.Drained == "" {
			return
		}
		select {
		case reports <- b.Drained:
		case <-ctx.Done():
		}
	}, fail)
	if err != nil {
		return err
	}
	defer hangUp()
	p, err := client.NewPublisher[string](ctx, conn, address.Address{}, client.PublisherConfig{})
	if err != nil {
		return err
	}
	defer func() { _ = p.Close(context.WithoutCancel(ctx)) }()
	left := map[int]bool{}
	for i := range g.Partitions {
		left[i] = true
	}
	marks := map[string]int{}
	// A report can be lost with its worker, so there is another marker from time to time.
	again := time.NewTicker(markAgain)
	defer again.Stop()
	mark := func() error {
		for i := range left {
			id := rand.Text()
			marks[id] = i
			err := p.Publish(ctx, "", client.PublishTo(address.Queue(g.queue(i))), func(m *client.Message) {
				m.Annotations = map[any]any{markerKey: id}
			})
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := mark(); err != nil {
		return err
	}
	for len(left) > 0 {
		select {
		case id := <-reports:
			if i, ok := marks[id]; ok && left[i] {
				delete(left, i)
				progress(g.Partitions - len(left))
			}
		case <-again.C:
			if err := mark(); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

const markAgain = 30 * time.Second
