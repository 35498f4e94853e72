package desk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/link"
)

// Scans of a queue take turns: of two at the same time each would see a part of the
// messages, and what they give back would be out of order. A scan declares an exclusive
// queue, which RabbitMQ refuses to every other connection and deletes with the connection.
// Two scans over one connection are kept apart by this process.
//
// Who may not declare that queue scans without it, and other consumers may take messages at
// any time. So each scan asks at the queue's end whether it is the only consumer.

// lockSuffix ends the name of the exclusive queue. It begins with the name of the queue that
// is scanned, which permissions usually go by.
const lockSuffix = ".hopback-scan"

const (
	// lockLimit bounds a request about the lock. A scan continues without it.
	lockLimit = 5 * time.Second
	// A scan that waits asks again after firstWait, and then after up to longestWait.
	firstWait   = 50 * time.Millisecond
	longestWait = time.Second
)

// maxQueueName is AMQP's limit in bytes.
const maxQueueName = 255

func lockName(queue string) string {
	if len(queue)+len(lockSuffix) > maxQueueName {
		sum := sha256.Sum256([]byte(queue))
		return strings.ToValidUTF8(queue[:maxQueueName-len(lockSuffix)-17], "") + "-" + hex.EncodeToString(sum[:8]) + lockSuffix
	}
	return queue + lockSuffix
}

// localKey is a queue as a connection sees it.
type localKey struct {
	conn  *client.Conn
	queue string
}

type localLock struct {
	free  chan struct{} // has one while nobody has the lock
	users int           // who has it or waits for it
}

var (
	localMu sync.Mutex
	local   = map[localKey]*localLock{}
)

// enterLocal returns the lock of a queue in this process, and what to call when it isn't
// used any more.
func enterLocal(key localKey) (l *localLock, forget func()) {
	localMu.Lock()
	defer localMu.Unlock()
	if l = local[key]; l == nil {
		l = &localLock{free: make(chan struct{}, 1)}
		l.free <- struct{}{}
		local[key] = l
	}
	l.users++
	return l, func() {
		localMu.Lock()
		defer localMu.Unlock()
		if l.users--; l.users == 0 {
			delete(local, key)
		}
	}
}

// enter waits until no other scan reads the queue, and returns the queue's terms. leave must
// be called unless err is set.
func (d *Desk) enter(ctx context.Context, queue string, accept []WarningCode, notify *notifier) (t SideEffects, leave func(), err error) {
	if _, err := declare.Inspect(ctx, d.conn.Management(), queue); err != nil {
		return SideEffects{}, nil, err
	}
	leave, alone, err := d.lock(ctx, queue, !slices.Contains(accept, WarningScan), notify)
	if err != nil {
		return SideEffects{}, nil, err
	}
	if t, err = d.sideEffects(ctx, queue, accept); err != nil {
		leave()
		return t, nil, err
	}
	if !alone {
		t.Warnings = append(t.Warnings, Warning{Code: WarningScan, Text: "another scan reads it: each sees a part of the messages, and the order isn't kept"})
	}
	return t, leave, nil
}

// lock waits until no other scan reads the queue. Without wait it doesn't, and alone says
// whether another scan does.
func (d *Desk) lock(ctx context.Context, queue string, wait bool, notify *notifier) (leave func(), alone bool, err error) {
	l, forget := enterLocal(localKey{d.conn, queue})
	waiting := func() { notify.now(Progress{Waiting: true}) }
	for delay := firstWait; ; delay = min(2*delay, longestWait) {
		t := time.NewTimer(delay)
		select {
		case <-l.free:
			t.Stop()
			unlock, alone, err := d.lockBroker(ctx, queue, wait, waiting)
			if err != nil || !alone {
				l.free <- struct{}{}
			}
			switch {
			case err != nil:
				forget()
				return nil, false, err
			case !alone:
				return forget, false, nil
			}
			return func() {
				unlock()
				l.free <- struct{}{}
				forget()
			}, true, nil
		case <-ctx.Done():
			t.Stop()
			forget()
			return nil, false, context.Cause(ctx)
		case <-t.C:
		}
		if !wait {
			return forget, false, nil
		}
		waiting()
	}
}

// lockBroker declares the exclusive queue.
func (d *Desk) lockBroker(ctx context.Context, queue string, wait bool, waiting func()) (unlock func(), alone bool, err error) {
	if _, no := d.unlockable.Load(queue); no {
		return func() {}, true, nil
	}
	path := "/queues/" + address.Escape(lockName(queue))
	for delay := firstWait; ; delay = min(2*delay, longestWait) {
		asking, cancel := context.WithTimeout(ctx, lockLimit)
		status, reply, err := d.conn.Management().Request(asking, "PUT", path, map[string]any{
			"durable": false, "exclusive": true, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "classic"},
		})
		cancel()
		text, _ := reply.(string)
		switch {
		case ctx.Err() != nil:
			return nil, false, context.Cause(ctx)
		case err == nil && status/100 == 2:
			return func() {
				ctx, cancel := context.WithTimeout(context.Background(), lockLimit)
				defer cancel()
				// Where this fails, the connection has ended, and the queue with it.
				_, _, _ = d.conn.Management().Request(ctx, "DELETE", path, nil)
			}, true, nil
		case err != nil || !strings.Contains(text, "exclusive access to locked queue"):
			if err == nil {
				err = fmt.Errorf("status %d: %s", status, cut(text, 300))
			}
			d.log.Debug("hopback: a scan can't keep other scans away from its queue", "queue", queue, "declare", lockName(queue), "error", err)
			if errors.Is(err, client.ErrUnauthorized) || status/100 == 4 {
				d.unlockable.Store(queue, true)
			}
			return func() {}, true, nil
		case !wait:
			return nil, false, nil
		}
		waiting()
		if !link.Pause(ctx, delay) {
			return nil, false, context.Cause(ctx)
		}
	}
}

// again is asked where a queue has no more messages. It finds out whether others consume
// from the queue, unless that was accepted: w.unread says so. Where nobody does, the walk has
// to ask the queue once more, for what others held until then.
func (d *Desk) again(ctx context.Context, w *scan) bool {
	if w.alone || w.othersToo {
		return false
	}
	w.unread = d.others(ctx, w.queue)
	w.alone = w.unread == ""
	return w.alone
}

// others says who else consumes from a queue that a walk reads; empty if nobody does.
func (d *Desk) others(ctx context.Context, queue string) string {
	info, err := declare.Inspect(ctx, d.conn.Management(), queue)
	switch {
	case ctx.Err() != nil:
		return ""
	case err != nil:
		return "it couldn't be checked whether others consume from the queue: " + err.Error()
	case info.Consumers == 2:
		return "1 other consumer is on the queue: messages that it holds weren't read"
	case info.Consumers > 2:
		return fmt.Sprintf("%d other consumers are on the queue: messages that they hold weren't read", info.Consumers-1)
	}
	return ""
}
