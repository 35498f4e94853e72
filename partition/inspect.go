package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// State is what a partition's owner and its queue report. [Inspect] returns it.
type State struct {
	Partition int    `json:"partition"`
	Queue     string `json:"queue"`
	// Owner is the Config.Worker of the worker that handles the partition; "" if there is none.
	Owner string `json:"owner"`
	// Waiting is how many messages wait in the queue. It doesn't include those that the owner
	// holds, which are at most Group.Window.
	Waiting uint64 `json:"waiting"`
}

// answering is how long Inspect waits for the workers' answers: every worker reports at least once
// in beatEvery.
const answering = 2 * beatEvery

// Inspect returns the state of each partition, in their order. It asks the group's workers, and
// waits for up to 2 s if a partition has no owner. It needs the permissions of a worker.
//
// The errors are those of declare.Inspect, such as declare.ErrNotFound.
func Inspect(ctx context.Context, conn *client.Conn, g Group) ([]State, error) {
	if conn == nil {
		return nil, argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	g, err := g.withDefaults()
	if err != nil {
		return nil, err
	}
	states := make([]State, g.Partitions)
	for i := range states {
		info, err := declare.Inspect(ctx, conn.Management(), g.queue(i))
		if err != nil {
			return nil, err
		}
		states[i] = State{Partition: i, Queue: info.Name, Waiting: info.Messages}
	}
	owners, err := g.ask(ctx, conn)
	if err != nil {
		return nil, err
	}
	for i := range states {
		states[i].Owner = owners[i]
	}
	return states, nil
}

// ask returns the owner of each partition that has one.
func (g Group) ask(ctx context.Context, conn *client.Conn) (map[int]string, error) {
	asking, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	beats := make(chan beat, 16)
	hangUp, err := g.listen(asking, asking, conn, func(b beat) {
		select {
		case beats <- b:
		case <-asking.Done():
		}
	}, fail)
	if err != nil {
		return nil, err
	}
	defer hangUp()
	defer fail(nil) // before: hear may be waiting
	p, err := client.NewPublisher[beat](ctx, conn, address.Exchange(g.members(), ""), client.PublisherConfig{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = p.Close(context.WithoutCancel(ctx)) }()
	question := beat{Worker: "hopback: Inspect", Born: time.Now().UnixNano(), N: 1, Asks: true, Leave: true}
	if err := p.Publish(ctx, question); err != nil {
		return nil, err
	}
	enough := time.NewTimer(answering)
	defer enough.Stop()
	last := map[string]beat{} // of each worker
	for {
		select {
		case b := <-beats:
			if b.N > last[b.name()].N {
				last[b.name()] = b
			}
		case <-enough.C:
			return ownersOf(last), nil
		case <-asking.Done():
			return nil, context.Cause(asking)
		}
		if owners := ownersOf(last); len(owners) == g.Partitions {
			return owners, nil
		}
	}
}

func ownersOf(last map[string]beat) map[int]string {
	owners := map[int]string{}
	for _, b := range last {
		for _, i := range b.Owns {
			owners[i] = max(owners[i], b.Worker) // if two claim it, the result is the same each time
		}
	}
	return owners
}

// Find returns the generation of a group that is in use, and the next one, which waits for
// [Reshard]; next.Generation is 0 if there is none. It reads the arguments of the queues. If there
// is no such group, the error matches declare.ErrNotFound.
func Find(ctx context.Context, conn *client.Conn, name string) (now, next Group, err error) {
	if conn == nil {
		return now, next, argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	if _, err := (Group{Name: name, Partitions: 1}).withDefaults(); err != nil {
		return now, next, err
	}
	var absent error
	for n := 1; n <= maxGenerations; n++ {
		g := Group{Name: name, Generation: n}
		opened := n == 1
		if !opened {
			_, err := declare.Inspect(ctx, conn.Management(), g.opened())
			if err != nil && !errors.Is(err, declare.ErrNotFound) {
				return Group{}, Group{}, err
			}
			opened = err == nil
		}
		info, err := declare.Inspect(ctx, conn.Management(), g.queue(0))
		switch {
		case errors.Is(err, declare.ErrNotFound) && opened: // its queues were deleted after a Reshard
			absent = cmp.Or(absent, err)
			continue
		case errors.Is(err, declare.ErrNotFound):
		case err != nil:
			return Group{}, Group{}, err
		default:
			partitions, _ := info.Arguments[argPartitions].(int64)
			window, _ := info.Arguments[argWindow].(int64)
			g.Partitions, g.Window = int(partitions), int(window)
			if _, err := g.withDefaults(); err != nil || partitions < 1 {
				return Group{}, Group{}, fmt.Errorf("hopback: inspect %q: %w: it isn't a queue of package partition", info.Name, ErrWrongGroup)
			}
			if opened {
				now = g
				continue
			}
			next = g
		}
		break
	}
	if now.Generation == 0 {
		return Group{}, Group{}, absent
	}
	return now, next, nil
}
