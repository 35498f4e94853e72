package partition

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
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
//  2. Start workers for to. They wait. Workers of from continue to run.
//
// Reshard has RabbitMQ route all further messages to the new generation: each key moves in one step.
// It waits until the old workers have completed the messages of the old generation, and then has the
// new workers begin. So the order by key is kept across the switch, apart from messages that are later
// than [ReshardConfig.Late]; no message is lost. The new generation stands still while the old one is
// finished, so reshard when the backlog is short.
//
// Reshard doesn't wait for keys whose messages workers hold, because of [BlockKey] or a long delay,
// nor for a partition that isn't finished after 15 s: the new workers begin with the other keys.
// They keep the messages of these keys until the old workers have completed theirs, and Reshard
// returns when all are.
//
// If Reshard fails or ctx ends, call it again with the same arguments: it continues. It can be
// interrupted anywhere. Before the new workers begin, all messages wait until it is called again;
// afterwards, only those of the keys that aren't finished.
//
// Afterwards stop the old workers, and delete the old queues when they are empty, but no exchange.
// Never apply the topology of the old generation again: RabbitMQ refuses that, because Reshard leaves
// an exchange of another type in its place, which leads to the next generation. So definitions that
// were exported before the Reshard can be imported again. The new workers remove the bindings and
// report that, and bring messages of the old queues to the new ones.
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
	m := conn.Management()
	opened, left, err := to.isOpen(ctx, m)
	if err != nil {
		return err
	}
	for _, g := range []Group{from, to} {
		if g.Generation == from.Generation && opened && len(left.parts) == 0 {
			continue // its queues may be gone
		}
		if _, err := g.check(ctx, conn); err != nil {
			return err
		}
	}
	if err := from.redirect(ctx, m, to); err != nil {
		return err
	}
	if opened && len(left.parts) == 0 {
		return nil
	}
	seal, err := from.makeSeal(ctx, conn, rand.Text())
	if err != nil {
		return err
	}
	d, err := from.newDrain(ctx, conn, seal, cfg.Progress)
	if err != nil {
		return err
	}
	defer d.end()
	if !opened {
		if left, err = d.both(cfg.Late); err != nil {
			return err
		}
		if err := to.open(d.ctx, m, left); err != nil {
			return err
		}
	}
	return d.rest(m, to, left)
}

const (
	// markAgain is after how long another marker is put into a partition: a report can be lost with
	// its worker.
	markAgain = 30 * time.Second
	// stalled is for how long Reshard waits for a partition before the other ones go on.
	stalled = 15 * time.Second
	// restEvery is how often it looks for what is finished afterwards.
	restEvery = time.Second
)

// drain finishes a generation: it puts markers into its queues, and waits for the workers' reports.
type drain struct {
	g        Group
	ctx      context.Context
	end      func()
	seal     string // that its markers contain
	markers  *client.Publisher[string]
	reports  chan string
	progress func(finished int)

	round int
	marks map[string]mark
}

// mark is a marker that is in a partition.
type mark struct{ partition, round int }

func (g Group) newDrain(ctx context.Context, conn *client.Conn, seal string, progress func(finished, partitions int)) (*drain, error) {
	ctx, fail := context.WithCancelCause(ctx)
	d := &drain{g: g, ctx: ctx, seal: seal, reports: make(chan string, maxPartitions), marks: map[string]mark{}}
	d.progress = func(finished int) {
		if progress != nil {
			progress(finished, g.Partitions)
		}
	}
	hangUp, err := g.listen(ctx, ctx, conn, func(b beat) {
		if b.Drained == "" {
			return
		}
		select {
		case d.reports <- b.Drained:
		case <-ctx.Done():
		}
	}, fail, nil, nil)
	if err != nil {
		fail(nil)
		return nil, err
	}
	d.markers, err = client.NewPublisher[string](ctx, conn, address.Address{}, client.PublisherConfig{})
	if err != nil {
		fail(nil) // before: hear may be waiting
		hangUp()
		return nil, err
	}
	d.end = func() {
		fail(nil)
		_ = d.markers.Close(context.WithoutCancel(ctx))
		hangUp()
	}
	return d, nil
}

// mark puts a marker into a partition.
func (d *drain) mark(i int) error {
	id := rand.Text()
	d.marks[id] = mark{i, d.round}
	return d.markers.Publish(d.ctx, "", client.PublishTo(address.Queue(d.g.queue(i))), func(m *client.Message) {
		m.Data = [][]byte{{}}
		m.Annotations = map[any]any{markerKey: d.seal + "/" + id}
	})
}

// read returns the partition that a report of this round is about, and the hashes of the keys that its
// marker has passed.
func (d *drain) read(report string) (i int, held []string, ok bool) {
	id, rest, _ := strings.Cut(report, " ")
	m, ok := d.marks[id]
	for _, hash := range strings.Fields(rest) {
		if len(hash) == hashSize && len(held) < maxWindow {
			held = append(held, hash)
		}
	}
	return m.partition, held, ok && m.round == d.round
}

// both waits twice until what is in the queues is completed, with a pause in between for late
// messages. It returns what isn't after a while.
func (d *drain) both(late time.Duration) (unfinished, error) {
	if _, err := d.all(false); err != nil {
		return unfinished{}, err
	}
	select {
	case <-time.After(late):
	case <-d.ctx.Done():
		return unfinished{}, context.Cause(d.ctx)
	}
	return d.all(true)
}

// all waits until a marker was reported from every partition, or for a while.
func (d *drain) all(last bool) (unfinished, error) {
	d.round++
	left := unfinished{before: d.g.Partitions, parts: map[int][]string{}}
	waits := map[int]bool{}
	for i := range d.g.Partitions {
		left.parts[i], waits[i] = nil, true
		if err := d.mark(i); err != nil {
			return left, err
		}
	}
	enough := time.NewTimer(stalled)
	defer enough.Stop()
	for len(waits) > 0 {
		select {
		case report := <-d.reports:
			i, held, ok := d.read(report)
			if !ok || !waits[i] {
				continue
			}
			delete(waits, i)
			if len(held) == 0 {
				delete(left.parts, i)
			}
			if last {
				d.progress(d.g.Partitions - len(left.parts))
			}
		case <-enough.C:
			return left, nil
		case <-d.ctx.Done():
			return left, context.Cause(d.ctx)
		}
	}
	return left, nil
}

// rest waits until what is left is finished, and stores what is.
func (d *drain) rest(m declare.Requester, to Group, left unfinished) error {
	d.round++
	marked := map[int]time.Time{} // when a partition got a marker that wasn't reported
	again := time.NewTicker(restEvery)
	defer again.Stop()
	for len(left.parts) > 0 {
		for i := range left.parts {
			if at, waits := marked[i]; waits && time.Since(at) < markAgain {
				continue
			}
			if err := d.mark(i); err != nil {
				return err
			}
			marked[i] = time.Now()
		}
		select {
		case <-again.C: // markers that were reported aren't followed at once
		case <-d.ctx.Done():
			return context.Cause(d.ctx)
		}
		for more := true; more; {
			select {
			case report := <-d.reports:
				i, held, ok := d.read(report)
				if !ok {
					continue
				}
				delete(marked, i)
				if err := to.store(d.ctx, m, left, i, held); err != nil {
					return err
				}
				d.progress(d.g.Partitions - len(left.parts))
			default:
				more = false
			}
		}
	}
	return nil
}

// store stores what a report says, and takes it out of left.
func (g Group) store(ctx context.Context, m declare.Requester, left unfinished, i int, held []string) error {
	keys, unfinished := left.parts[i]
	if !unfinished {
		return nil
	}
	if keys == nil {
		var err error
		if keys, err = g.finished(ctx, m, i, held); err != nil {
			return err
		}
	}
	still := []string{}
	for _, hash := range keys {
		if slices.Contains(held, hash) {
			still = append(still, hash)
		} else if err := g.finishedKey(ctx, m, i, hash); err != nil {
			return err
		}
	}
	left.parts[i] = still
	if len(still) > 0 {
		return nil
	}
	delete(left.parts, i)
	_, err := declare.DeleteQueue(ctx, m, g.heldIn(i)) // all of its keys have a flag
	return err
}
