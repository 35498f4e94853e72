package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// idleConsumers is how many consumers the contest "idle" has.
const idleConsumers = 1000

// idlePeer is what the consumers have done before they are idle: nothing, or each has
// handled some messages, whose handling failed with retried.
type idlePeer struct{ handled, retried bool }

const (
	nIdleFresh   = "hopback, fresh"
	nIdleHandled = "hopback, has handled"
	nIdleRetried = "hopback, has retried"
)

func idleContest() contest {
	c := contest{
		name: "idle", title: fmt.Sprintf("%d idle consumers in a process of their own", idleConsumers), maxRounds: 3, run: runIdle,
		contestants: []contestant{{name: nIdleFresh, peer: idlePeer{}}, {name: nIdleHandled, peer: idlePeer{handled: true}}, {name: nIdleRetried, peer: idlePeer{handled: true, retried: true}}},
	}
	for _, p := range c.contestants {
		c.limits = append(c.limits, limit{who: p.name, metric: goroutines, most: 5}, limit{who: p.name, metric: held, most: 40}, limit{who: p.name, metric: rss, most: 64})
	}
	return c
}

// idleTask is what runIdle asks of its child.
type idleTask struct {
	URL              string
	Prefix           string
	Queues           []string
	Handled, Retried bool
}

// runIdle weighs consumers in a process of their own, so that the memory that the other
// contests have used isn't on their bill. Ten share a queue: a thousand quorum queues would
// keep a broker busy for long.
func runIdle(ctx context.Context, l *lab, c contestant, _ int) (metrics, error) {
	bed, err := l.retryBed(ctx, idleConsumers/10)
	if err != nil {
		return nil, err
	}
	p := c.peer.(idlePeer)
	task, err := json.Marshal(idleTask{URL: l.url, Prefix: bed.policy.Names.Prefix, Queues: bed.queues, Handled: p.handled, Retried: p.retried})
	if err != nil {
		return nil, err
	}
	cmd, err := child(ctx, "idle "+string(task))
	if err != nil {
		return nil, err
	}
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var m metrics
	return m, json.Unmarshal(out, &m)
}

// idleEach is how many messages there are for each consumer. The broker deals them out in
// turn, more or less, so next to none is left without.
const idleEach = 5

// idleChild starts the consumers, and prints what they hold once all of them wait for
// messages.
func idleChild(arg string) error {
	var task idleTask
	if err := json.Unmarshal([]byte(arg), &task); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	base := weigh()
	up, handled := newMeter(1, idleConsumers-1), newMeter(1, idleEach*idleConsumers-1)
	conn, err := client.Connect(ctx, task.URL, client.Config{Name: "hopback-bench-idle", Logger: quiet, OnEvent: func(e client.Event) {
		if e.Kind == client.EventUp && e.Op == "consume" {
			up.tick()
		}
	}})
	if err != nil {
		return err
	}
	var h client.Handler = client.HandlerFunc(func(context.Context, *client.Delivery) error {
		handled.tick()
		if task.Retried {
			return errFailed
		}
		return nil
	})
	if task.Retried {
		h = retry.With(retry.Policy{MaxRetries: 1, Backoff: retry.Delays(failDelay), Names: retry.Names{Prefix: task.Prefix}, Strategy: retry.StrategyRepublish})(h)
	}
	ended := make(chan error, idleConsumers)
	for i := range idleConsumers {
		go func() {
			ended <- conn.Consume(ctx, task.Queues[i%len(task.Queues)], h, client.ConsumerConfig{})
		}()
	}
	if err := awaitMeter(up, ended); err != nil {
		return err
	}
	if task.Handled {
		if err := feedIdle(ctx, task); err != nil {
			return err
		}
		if err := awaitMeter(handled, ended); err != nil {
			return err
		}
	}
	now := weigh()
	m := metrics{goroutines: (now[0] - base[0]) / idleConsumers, held: (now[1] - base[1]) / idleConsumers / 1000, rss: residentMiB()}
	if err := json.NewEncoder(os.Stdout).Encode(m); err != nil {
		return err
	}
	cancel()
	for range idleConsumers {
		if err := <-ended; err != nil {
			return err
		}
	}
	return conn.Close(context.Background())
}

func awaitMeter(m *meter, ended <-chan error) error {
	select {
	case <-m.done:
		return nil
	case err := <-ended:
		return fmt.Errorf("a consumer ended: %w", err)
	}
}

// feedIdle publishes messages for all, from a connection that is closed again.
func feedIdle(ctx context.Context, task idleTask) error {
	for _, q := range task.Queues {
		if err := (hopback{callers: 10}).publish(ctx, task.URL, q, body(256), newMeter(1, idleEach*idleConsumers/len(task.Queues)-1)); err != nil {
			return err
		}
	}
	return nil
}

// weigh counts the goroutines and the bytes of heap and stacks, once they are as few
// as they get: what a run has left behind ends within a moment.
func weigh() [2]float64 {
	var least [2]float64
	for i := range 20 {
		settleDown()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		now := [2]float64{float64(runtime.NumGoroutine()), float64(m.HeapAlloc + m.StackInuse)}
		if i > 0 && now[0] >= least[0] && now[1] > 0.999*least[1] {
			break
		}
		least = now
		time.Sleep(50 * time.Millisecond)
	}
	return least
}

// residentMiB is the memory of this process, by the kernel's count where it tells, and
// else by the runtime's.
func residentMiB() float64 {
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		if _, after, ok := strings.Cut(string(b), "VmRSS:"); ok {
			if kib, err := strconv.ParseFloat(strings.Fields(after)[0], 64); err == nil {
				return kib / 1024
			}
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.Sys-m.HeapReleased) / (1 << 20)
}
