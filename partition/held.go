package partition

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/phash2"
)

// A generation can be opened before the one before it is finished: its workers keep the messages of
// keys that have unfinished messages there. Which ones these are is stored in the broker:
//
//	queue Name.2.opened         its arguments: how many partitions there were, and which are unfinished
//	binding flag → opened, "3"  partition 3 is finished, except for the keys of
//	queue Name.2.held.003       its argument: the keys that were waiting in partition 3
//	binding flag → opened, "3/8c4f…"  and this key of partition 3 is finished
//
// Each step only adds something, so Reshard can be killed after any of them.
const (
	argBefore     = "x-hopback-partitions-before"
	argUnfinished = "x-hopback-unfinished"
	argHeld       = "x-hopback-held"
)

// flags is the exchange whose bindings are the flags. Nothing is published to it.
func (g Group) flags() string { return fmt.Sprintf("%s.%d.flags", g.Name, g.Generation) }

func (g Group) heldIn(i int) string { return fmt.Sprintf("%s.%d.held.%03d", g.Name, g.Generation, i) }

func (g Group) flag(key string) declare.Binding {
	return declare.Binding{Source: g.flags(), Queue: g.opened(), Key: key}
}

// unfinished is what is left of the generation before.
type unfinished struct {
	before int // its partitions
	// parts has the hashes of the unfinished keys of each unfinished partition; nil: all keys.
	parts map[int][]string
}

const hashSize = 16

// hashOf is how keys are stored: they may be long, and aren't for everybody's eyes.
func hashOf(key string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	return fmt.Sprintf("%016x", h.Sum64())
}

// open has the workers of the generation begin.
func (g Group) open(ctx context.Context, m declare.Requester, left unfinished) error {
	var parts []string
	for i := range left.parts {
		parts = append(parts, strconv.Itoa(i))
	}
	slices.Sort(parts)
	_, err := declare.Apply(ctx, m, declare.Topology{
		Exchanges: []declare.Exchange{{Name: g.flags(), Type: declare.ExchangeDirect}},
		Queues: []declare.Queue{declare.QuorumQueue{Name: g.opened(), DeadLetter: declare.Drop(), Arguments: map[string]any{
			argBefore: int64(left.before), argUnfinished: strings.Join(parts, " "),
		}}},
	})
	return err
}

// finished stores that a partition of the generation before is finished, except for these keys. It
// returns the keys that are stored: a Reshard that was interrupted may have stored more.
func (g Group) finished(ctx context.Context, m declare.Requester, i int, held []string) ([]string, error) {
	if len(held) > 0 {
		_, err := declare.Apply(ctx, m, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{
			Name: g.heldIn(i), DeadLetter: declare.Drop(), Arguments: map[string]any{argHeld: strings.Join(held, " ")},
		}}})
		if errors.Is(err, declare.ErrConflict) {
			held, err = g.heldKeys(ctx, m, i)
		}
		if err != nil {
			return nil, err
		}
	}
	_, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{g.flag(strconv.Itoa(i))}})
	return held, err
}

// heldKeys reads the keys that were waiting in a partition of the generation before.
func (g Group) heldKeys(ctx context.Context, m declare.Requester, i int) ([]string, error) {
	info, err := declare.Inspect(ctx, m, g.heldIn(i))
	if errors.Is(err, declare.ErrNotFound) {
		return nil, nil
	}
	list, _ := info.Arguments[argHeld].(string)
	return strings.Fields(list), err
}

// finishedKey stores that a key of it is finished, too.
func (g Group) finishedKey(ctx context.Context, m declare.Requester, i int, hash string) error {
	_, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{g.flag(fmt.Sprint(i, "/", hash))}})
	return err
}

// isOpen reports whether the generation was opened, and what is left of the one before. The first
// generation is always open.
func (g Group) isOpen(ctx context.Context, m declare.Requester) (opened bool, left unfinished, err error) {
	if g.Generation == 1 {
		return true, left, nil
	}
	info, err := declare.Inspect(ctx, m, g.opened())
	if errors.Is(err, declare.ErrNotFound) {
		return false, left, nil
	}
	if err != nil {
		return false, left, err
	}
	before, _ := info.Arguments[argBefore].(int64)
	list, _ := info.Arguments[argUnfinished].(string)
	left = unfinished{before: int(before), parts: map[int][]string{}}
	for _, text := range strings.Fields(list) {
		if i, err := strconv.Atoi(text); err == nil && i >= 0 && i < left.before {
			left.parts[i] = nil
		}
	}
	left, err = g.refresh(ctx, m, left)
	return true, left, err
}

// refresh returns what is still left of what was left before.
func (g Group) refresh(ctx context.Context, m declare.Requester, was unfinished) (unfinished, error) {
	left := unfinished{before: was.before, parts: map[int][]string{}}
	for i, keys := range was.parts {
		if keys == nil {
			flagged, err := bound(ctx, m, g.flag(strconv.Itoa(i)))
			if err != nil {
				return was, err
			}
			if !flagged {
				left.parts[i] = nil
				continue
			}
			if keys, err = g.heldKeys(ctx, m, i); err != nil {
				return was, err
			}
		}
		for _, hash := range keys {
			flagged, err := bound(ctx, m, g.flag(fmt.Sprint(i, "/", hash)))
			if err != nil {
				return was, err
			}
			if !flagged {
				left.parts[i] = append(left.parts[i], hash)
			}
		}
	}
	return left, nil
}

// holds reports whether a message has to wait for the generation before.
func (u *unfinished) holds(key func() string, d *client.Delivery) bool {
	if u == nil || len(u.parts) == 0 {
		return false
	}
	whole, hash := -1, ""
	for i, keys := range u.parts {
		if keys == nil {
			if whole < 0 {
				whole = int(phash2.Strings(routingKeys(d)...) % uint32(u.before))
			}
			if whole == i {
				return true
			}
			continue
		}
		if hash == "" {
			hash = hashOf(key())
		}
		if slices.Contains(keys, hash) {
			return true
		}
	}
	return false
}

// routingKeys are what RabbitMQ has routed a message by.
func routingKeys(d *client.Delivery) []string {
	key, _ := d.Annotation("x-routing-key").(string)
	keys := []string{key}
	if more, ok := d.Annotation("x-cc").([]any); ok {
		for _, v := range more {
			if key, ok := v.(string); ok {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

const (
	// heldPause is how long a message waits before its worker looks again whether its key is held.
	heldPause = 500 * time.Millisecond
	// refreshEvery is how often a worker reads what is left of the generation before.
	refreshEvery = time.Second
)

// holding is what a worker knows of the generation before; nil: it is finished.
type holding struct{ atomic.Pointer[unfinished] }

// watchHeld reads what is left of the generation before, until nothing is.
func (w *worker) watchHeld(ctx context.Context, m declare.Requester, left unfinished) {
	w.log.Info("hopback: messages of some keys wait until the generation before has handled theirs", "partitions", len(left.parts))
	for len(left.parts) > 0 {
		known := left // handlers read it while left changes
		w.held.Store(&known)
		if !backoff.Sleep(ctx, refreshEvery) {
			return
		}
		if now, err := w.group.refresh(ctx, m, left); err == nil {
			left = now
		}
	}
	w.held.Store(nil)
}
