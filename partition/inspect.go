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
	// Generation is that of the group. If it is an earlier one, messages wait in a queue that
	// [Reshard] has emptied: perhaps an import of old definitions has brought it back. A worker moves
	// them, if the earlier generation has none.
	Generation int    `json:"generation"`
	Partition  int    `json:"partition"`
	Queue      string `json:"queue"`
	// Owner is the Config.Worker of the worker that handles the partition; "" if there is none.
	Owner string `json:"owner"`
	// Waiting is how many messages wait in the queue. It doesn't include those that the owner
	// holds, which are at most Group.Window.
	Waiting uint64 `json:"waiting"`
}

// answering is how long Inspect waits for the workers' answers: every owner answers within beatEvery.
const answering = 2 * beatEvery

// Inspect returns the state of each partition, in their order, and behind them the queues of earlier
// generations in which messages wait. It asks the group's workers, and
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
		states[i] = State{Generation: g.Generation, Partition: i, Queue: info.Name, Waiting: info.Messages}
	}
	earlier, err := g.earlier(ctx, conn.Management())
	if err != nil {
		return nil, err
	}
	owners, err := g.ask(ctx, conn)
	if err != nil {
		return nil, err
	}
	for i := range states {
		states[i].Owner = owners[i]
	}
	return append(states, earlier...), nil
}

// earlier returns the queues of earlier generations in which messages wait.
func (g Group) earlier(ctx context.Context, m declare.Requester) (states []State, err error) {
	for n := max(1, g.Generation-upkeepPast); n < g.Generation; n++ {
		queues, err := (Group{Name: g.Name, Generation: n}).existing(ctx, m)
		if err != nil {
			return nil, err
		}
		for i, q := range queues {
			if q.Messages > 0 {
				states = append(states, State{Generation: n, Partition: i, Queue: q.Name, Waiting: q.Messages})
			}
		}
	}
	return states, nil
}

// existing returns the queues of a generation that exist, from the first one on. Their number isn't
// known.
func (g Group) existing(ctx context.Context, m declare.Requester) (queues []declare.QueueInfo, err error) {
	for i := range maxPartitions {
		q, err := declare.Inspect(ctx, m, g.queue(i))
		if errors.Is(err, declare.ErrNotFound) {
			break
		}
		if err != nil {
			return nil, err
		}
		queues = append(queues, q)
	}
	return queues, nil
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
	}, fail, nil, nil)
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
// [Reshard] or for its end; next.Generation is 0 if there is none. It reads the arguments of the queues. If there
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
		opened, left, err := g.isOpen(ctx, conn.Management())
		if err != nil {
			return Group{}, Group{}, err
		}
		opened = opened && len(left.parts) == 0
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
