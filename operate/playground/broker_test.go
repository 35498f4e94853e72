package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

var (
	brokerURL      = flag.String("broker", "", "`URL` of a broker with an empty virtual host, which TestTheSameOnABroker uses")
	brokerStrategy = flag.String("strategy", "", "the `strategy` that TestTheSameOnABroker uses")
)

// A client sees the same on any broker as in the page: the results of the attempts, in order, and where the message ends up and
// why. TestThePlaygroundsHistoriesAreThoseOfABroker, in integration/retry, runs this with real ones. What happens between
// queues isn't compared, since RabbitMQ doesn't report it, nor are times.
func TestTheSameOnABroker(t *testing.T) {
	scripts := []string{"fail 2, succeed", "fail", "succeed", "permanent", "after 1s, succeed", "slow 50ms", "panic", "crash", "fail, slow 20ms after 1s, succeed", "fail 2, panic"}
	url, of := *brokerURL, []retry.Strategy{retry.Strategy(*brokerStrategy)}
	if url == "" { // only that it can be done: with the same broker, over TCP and in real time, and without waiting
		scripts, of = []string{"succeed", "permanent", "slow 50ms", "panic"}, strategies
		var err error
		url, err = hopbacktest.Start(t, hopbacktest.Config{}).Listen("127.0.0.1:0")
		require.NoError(t, err)
	}
	for _, strategy := range of {
		for _, script := range scripts {
			s := settings{Strategy: strategy, MaxRetries: 2, Delays: "1s 2s", Handler: script}
			want := seenInPage(t, s)
			require.NotEmpty(t, want)
			assert.Equal(t, want, seenOn(t, s, url), "%s: %s", strategy, script)
			t.Logf("%s: %s\n%s", strategy, script, want)
		}
	}
}

// seen keeps what a client of any broker can see of a message.
func seen(entries []entry) string {
	var b strings.Builder
	for _, e := range entries {
		switch e.Kind {
		case "failed", "panicked", "crashed", "succeeded", "refused", "is a dead letter":
			fmt.Fprintln(&b, e.Kind, e.Queue, e.Text)
		}
	}
	return b.String()
}

// seenInPage runs a message in a lab, as the page does.
func seenInPage(t *testing.T, s settings) (text string) {
	inLab(t, s, func(t *testing.T, l *lab) {
		require.NoError(t, l.send("x", 1))
		settled(t, l)
		l.history()
		text = seen(l.messages[0].Entries)
	})
	return text
}

// seenOn runs the same lab on another broker, and waits for the message to be handled, or to arrive in the dead-letter queue.
func seenOn(t *testing.T, s settings, url string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	l, err := prepare(ctx, s)
	require.NoError(t, err)
	l.broker = hopbacktest.Start(t, hopbacktest.Config{}) // which nobody uses
	defer l.close()
	var mu sync.Mutex
	var wires []net.Conn
	l.url = url
	l.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			wires = append(wires, c)
		}
		return c, err
	}
	require.NoError(t, l.connect(ctx))
	mu.Lock()
	wires = nil // what follows are the worker's
	mu.Unlock()
	l.cut = func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range wires {
			_ = c.Close()
		}
		wires = nil
	}
	dead := make(chan *client.Message, 10)
	l.wg.Go(func() {
		_ = l.conn.Consume(l.ctx, deadQueue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			dead <- d.Message()
			return nil
		}), client.ConsumerConfig{})
	})
	l.startWorker()
	require.NoError(t, l.send("x", 1))
	m := l.messages[0]
	for pause := time.NewTicker(5 * time.Millisecond); ; {
		select {
		case deadLetter := <-dead:
			require.Equal(t, m.ID, deadLetter.Properties.MessageID)
			l.mu.Lock()
			defer l.mu.Unlock()
			m.Entries = m.results
			m.explain(deadLetter)
			return seen(m.Entries)
		case <-pause.C:
			l.mu.Lock()
			results := slices.Clone(m.results)
			l.mu.Unlock()
			if n := len(results); n > 0 && (results[n-1].Kind == "succeeded" || results[n-1].Kind == "refused") {
				return seen(results)
			}
		case <-ctx.Done():
			l.mu.Lock()
			defer l.mu.Unlock()
			require.NoError(t, ctx.Err(), "so far: %v\n%s", m.results, strings.Join(l.lines, "\n"))
		}
	}
}
