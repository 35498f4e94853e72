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
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
)

// Only one scan reads a queue at a time: each of two would get some of the messages, and
// would return them out of order. A scan declares an exclusive queue, which RabbitMQ refuses
// to every other connection and deletes with the connection. A lock in this process separates
// two scans over one connection.
//
// A user without permission to declare that queue scans without it, and other consumers can
// get messages at any time. So each scan checks at the queue's end whether it is the only
// consumer.

// lockSuffix ends the name of the exclusive queue. The name starts with that of the scanned
// queue, since permissions usually match the start of a name.
const lockSuffix = ".hopback-scan"

const (
	// lockLimit is the timeout of a request about the lock. After it, a scan continues
	// without the lock.
	lockLimit = 5 * time.Second
	// A waiting scan asks again after firstWait, and then after up to longestWait.
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

// localKey is a queue and the connection that scans it.
type localKey struct {
	conn  *client.Conn
	queue string
}

type localLock struct {
	free  chan struct{} // has an element while the lock is free
	users int           // scans that have the lock or wait for it
}

var (
	localMu sync.Mutex
	local   = map[localKey]*localLock{}
)

// enterLocal returns the lock of a queue in this process. The caller calls forget after its last
// use.
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

// enter waits until no other scan reads the queue, and returns the side effects of reading it.
// Unless err is set, the caller calls leave at the end.
func (d *Desk) enter(ctx context.Context, queue string, accept []WarningCode, notify *notifier) (t SideEffects, leave func(), err error) {
	_, alarm, err := d.inspect(ctx, queue)
	if err != nil {
		return SideEffects{}, nil, err
	}
	leave, alone, err := d.lock(ctx, queue, !slices.Contains(accept, WarningScan), !alarm, notify)
	if err != nil {
		return SideEffects{}, nil, err
	}
	if t, err = d.sideEffects(ctx, queue, accept); err != nil {
		leave()
		return t, nil, err
	}
	if t.alarm && alone {
		t.Warnings = append(t.Warnings, Warning{Code: WarningScan, Text: "during the broker's memory or disk alarm it is unknown whether a scan of another process is reading it"})
	}
	if !alone {
		t.Warnings = append(t.Warnings, Warning{Code: WarningScan, Text: "another scan is reading it: each gets some of the messages, and the order isn't kept"})
	}
	return t, leave, nil
}

// lock waits until no other scan reads the queue. Without wait it returns at once, and alone
// reports whether no other scan reads the queue. Without shared it looks at this process only.
func (d *Desk) lock(ctx context.Context, queue string, wait, shared bool, notify *notifier) (leave func(), alone bool, err error) {
	l, forget := enterLocal(localKey{d.conn, queue})
	waiting := func() { notify.now(Progress{Waiting: true}) }
	for delay := firstWait; ; delay = min(2*delay, longestWait) {
		t := time.NewTimer(delay)
		select {
		case <-l.free:
			t.Stop()
			unlock, alone, err := func() {}, true, error(nil)
			if shared {
				unlock, alone, err = d.lockBroker(ctx, queue, wait, waiting)
			}
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
		status, reply, err := d.conn.Management().Request(asking, "PUT", path, inside.LockQueue())
		cancel()
		text, _ := reply.(string)
		switch {
		case ctx.Err() != nil:
			return nil, false, context.Cause(ctx)
		case err == nil && status/100 == 2:
			return func() {
				ctx, cancel := context.WithTimeout(context.Background(), lockLimit)
				defer cancel()
				// If the connection is lost, the queue is deleted with it.
				if _, _, err := d.conn.Management().Request(ctx, "DELETE", path, nil); err != nil {
					go d.unlockAfterAlarm(queue, path)
				}
			}, true, nil
		case err != nil || !inside.LockRefused(text):
			if err == nil {
				err = fmt.Errorf("status %d: %s", status, cut(text, 300))
			}
			d.log.Debug("hopback: a scan couldn't lock its queue; other scans may read it at the same time", "queue", queue, "declare", lockName(queue), "error", err)
			if errors.Is(err, client.ErrUnauthorized) || status/100 == 4 {
				d.unlockable.Store(queue, true)
			}
			return func() {}, true, nil
		case !wait:
			return nil, false, nil
		}
		waiting()
		if !backoff.Sleep(ctx, delay) {
			return nil, false, context.Cause(ctx)
		}
	}
}

// again reports whether a scan that has reached the queue's end must ask for messages once
// more. Unless other consumers were accepted, it checks for them and sets w.unread. If there
// are none, the scan asks again for messages that others held until now. Messages that wait for
// their delivery time are in w.unread, too, unless that was accepted.
func (d *Desk) again(ctx context.Context, w *scan) bool {
	if !w.alone && !slices.Contains(w.accept, WarningConsumers) {
		w.unread = d.others(ctx, w.queue)
		if w.alone = w.unread == ""; w.alone {
			return true
		}
	}
	if slices.Contains(w.accept, WarningWaiting) {
		return false
	}
	if late := d.stillWaiting(ctx, w.queue); late != "" {
		if w.unread != "" {
			late = w.unread + "; " + late
		}
		w.unread = late
	}
	return false
}

// others says that a scanned queue has other consumers. It returns "" if there are none.
func (d *Desk) others(ctx context.Context, queue string) string {
	info, _, err := d.inspect(ctx, queue)
	switch {
	case ctx.Err() != nil:
		return ""
	case err != nil:
		return "it is unknown whether the queue has other consumers: " + err.Error()
	case info.Consumers == 2:
		return "the queue has 1 other consumer: messages that it holds weren't read"
	case info.Consumers > 2:
		return fmt.Sprintf("the queue has %d other consumers: messages that they hold weren't read", info.Consumers-1)
	}
	return ""
}
