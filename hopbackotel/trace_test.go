package hopbackotel_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

var errBank = errors.New("the bank is down")

// failsThreeTimes is a handler whose fourth attempt succeeds, and publishes a receipt.
func failsThreeTimes(conn *client.Conn) client.HandlerFunc {
	return func(ctx context.Context, d *client.Delivery) error {
		time.Sleep(50 * time.Millisecond)
		if retry.Attempt(ctx) < 4 {
			return errBank
		}
		p, err := client.NewPublisher[*client.Message](ctx, conn, address.Queue("receipts"), client.PublisherConfig{})
		if err != nil {
			return err
		}
		defer func() { _ = p.Close(ctx) }()
		return p.Publish(ctx, order("receipt"))
	}
}

// forEachStrategy runs a test with each strategy that a version has.
func forEachStrategy(t *testing.T, test func(t *testing.T, version string, s retry.Strategy)) {
	for _, version := range []string{"4.3.6", "4.0.5"} {
		for _, s := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
			if s == retry.StrategyNative && version == "4.0.5" {
				continue
			}
			t.Run(string(s)+" "+version, func(t *testing.T) { test(t, version, s) })
		}
	}
}

// row is an attempt as it should be: when it begins and ends, for how long the message was
// to wait before and has waited, and for how long it is to wait next; in milliseconds.
type row struct{ begins, ends, asked, had, next int }

var (
	punctual = []row{{0, 50, 0, 0, 1000}, {1050, 1100, 1000, 1000, 2000}, {3100, 3150, 2000, 2000, 4000}, {7150, 7200, 4000, 4000, 0}}
	// RabbitMQ holds a message until the millisecond of its delivery time is over.
	held  = []row{{0, 50, 0, 0, 1000}, {1051, 1101, 1000, 1001, 2000}, {3102, 3152, 2000, 2001, 4000}, {7153, 7203, 4000, 4001, 0}}
	table = map[retry.Strategy][]row{retry.StrategyRepublish: punctual, retry.StrategyDeadLetter: punctual, retry.StrategyNative: held}
)

// expected is the table for a strategy as a story.
func expected(s retry.Strategy, oneTrace bool) []string {
	ms := func(n int) string { return (time.Duration(n) * time.Millisecond).String() }
	sec := func(n int) string { return strconv.FormatFloat(float64(n)/1000, 'g', -1, 64) }
	lines := []string{"0s-0s trace 1: checkout (server) []", "0s-0s trace 1: publish orders (producer) in checkout []"}
	for i, r := range table[s] {
		of, in := i+2, ""
		if oneTrace {
			of, in = 1, " in publish orders"
		}
		line := fmt.Sprintf("%s-%s trace %d: process orders (consumer)%s -> creation publish orders", ms(r.begins), ms(r.ends), of, in)
		came, goes := "", ""
		if i > 0 {
			line += fmt.Sprintf(" -> attempt attempt %d", i)
			came = fmt.Sprintf("attempt.delay.asked=%s attempt.delay.had=%s attempt.strategy=%s ", sec(r.asked), sec(r.had), s)
		}
		if r.next > 0 {
			goes = fmt.Sprintf(" decision=retry delay.asked=%[1]s delay.granted=%[1]s error.type=*errors.errorString strategy=%[2]s", sec(r.next), s)
		}
		line += fmt.Sprintf(" [%sattempt=%d%s]", came, i+1, goes)
		outcome := "modified"
		switch {
		case r.next == 0:
			lines = append(lines, line, fmt.Sprintf("%[1]s-%[1]s trace %[2]d: publish receipts (producer) in attempt 4 []", ms(r.ends), of))
			outcome = "accepted"
		case s == retry.StrategyRepublish:
			lines = append(lines, line+" failed: the bank is down",
				fmt.Sprintf("%[1]s-%[1]s trace %[2]d: publish retry_exchange:delay.%[3]d.orders (producer) in attempt %[4]d []", ms(r.ends), of, r.next, i+1))
			outcome = "accepted"
		default:
			lines = append(lines, line+" failed: the bank is down")
		}
		lines = append(lines, fmt.Sprintf("%[1]s-%[1]s trace %[2]d: settle orders (client) in attempt %[3]d [outcome=%[4]s]", ms(r.ends), of, i+1, outcome))
	}
	return lines
}

// TestOrderThatFailsThrice compares all spans, links, attributes and times with a table.
// In memory they are exact to the millisecond; package integration has real brokers.
func TestOrderThatFailsThrice(t *testing.T) {
	forEachStrategy(t, func(t *testing.T, version string, s retry.Strategy) {
		for _, oneTrace := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				got := failThreeTimesInMemory(t, version, s, hopbackotel.Config{OneTrace: oneTrace})
				require.Equal(t, expected(s, oneTrace), got.lines, "one trace: %v", oneTrace)
				for _, x := range got.spans {
					if x.Name != "checkout" {
						require.Subset(t, x.Attributes, []attribute.KeyValue{semconv.ServerAddress("rabbitmq.memory"), semconv.ServerPort(5672)}, x.Name)
					}
				}
			})
		}
	})
}

func failThreeTimesInMemory(t *testing.T, version string, strategy retry.Strategy, c hopbackotel.Config) history {
	l := newLab()
	broker := hopbacktest.Start(t, hopbacktest.Config{Version: version})
	cfg := l.config(t, c)
	cfg.Dial = broker.Dial
	conn, err := client.Connect(t.Context(), broker.URL(), cfg)
	require.NoError(t, err)
	p := policy
	p.Strategy = strategy
	shop := open(t, t.Context(), conn, p, failsThreeTimes(conn))
	pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
	require.NoError(t, err)
	ctx, span := l.tracer().Start(t.Context(), "checkout", trace.WithSpanKind(trace.SpanKindServer))
	require.NoError(t, pub.Publish(ctx, order("o-1")))
	span.End()
	time.Sleep(time.Minute)
	synctest.Wait()
	shop.stop()
	require.NoError(t, conn.Close(t.Context()))
	return l.history()
}
