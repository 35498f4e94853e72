//go:build !js

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
)

// observe runs a message on the broker at a URL, or on the lab's own if that is "". It returns what a client of any broker
// can see: that the message was confirmed, the results of its attempts in order, and why it is a dead letter.
// Only the lab's own broker reports what happens between queues.
func observe(ctx context.Context, s settings, url string) (string, error) {
	l, err := newLab(ctx, s, url)
	if err != nil {
		return "", err
	}
	defer l.close()
	if url != "" {
		l.wg.Go(func() {
			_ = l.conn.Consume(l.ctx, deadQueue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				l.mu.Lock()
				defer l.mu.Unlock()
				if m := l.byID[fmt.Sprint(d.Message().Properties.MessageID)]; m != nil {
					l.catchUp()
					m.dead(d.Message())
				}
				return nil
			}), client.ConsumerConfig{})
		})
	}
	if err := l.send("observed", 1); err != nil {
		return "", err
	}
	for pause := time.NewTicker(10 * time.Millisecond); ; {
		if text, done := l.observed(url != ""); done {
			return text, nil
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return "", fmt.Errorf("%w: so far\n%s", context.Cause(ctx), l.history())
		}
	}
}

// observed returns what can be seen of the first message, and whether that is all.
func (l *lab) observed(elsewhere bool) (string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.catchUp()
	m := l.messages[0]
	l.explain(l.messages)
	confirmed, lines := false, []string{}
	for _, e := range m.Entries {
		switch e.Kind {
		case "published":
			confirmed = true // in which queue, and how often, and whether an attempt was faster, isn't the same everywhere
		case "failed", "panicked", "crashed", "succeeded", "refused", "is a dead letter":
			lines = append(lines, strings.Join(slices.DeleteFunc([]string{e.Kind, e.Queue, e.Text}, func(s string) bool { return s == "" }), " "))
		}
	}
	done := m.State == "dead" && m.reasoned || m.State == "handled" || elsewhere && m.succeeded
	return strings.Join(append([]string{"published"}, lines...), "\n") + "\n", confirmed && done
}
