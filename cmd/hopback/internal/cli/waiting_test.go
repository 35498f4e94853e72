package cli_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

func TestWaitingMessagesOnTheCommandLine(t *testing.T) {
	b := hopbacktest.Start(t, hopbacktest.Config{Version: "4.4.0"})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	conn, err := client.Connect(t.Context(), url, client.Config{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}, declare.ClassicQueue{Name: "old", DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
	p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
	require.NoError(t, err)
	for _, id := range []string{"a", "b", "c"} {
		require.NoError(t, p.Publish(t.Context(), id))
	}
	ctx, stop := context.WithCancel(t.Context())
	again := make(chan string, 3)
	ended := make(chan error, 1)
	go func() {
		ended <- conn.Consume(ctx, "orders", client.JSON(func(ctx context.Context, id string) error {
			d, _ := client.DeliveryFrom(ctx)
			if _, parked := d.Parked(); parked {
				again <- id
				return nil
			}
			return client.Park{Token: id, Until: time.Now().Add(time.Hour)}
		}), client.ConsumerConfig{})
	}()
	queue := b.Queue("orders")
	require.NoError(t, queue.Await(t.Context(), func(c hopbacktest.Counts) bool { return c.Delayed == 3 }))

	run := func(args ...string) (code int, out, errs string) {
		r := world{env: map[string]string{"HOPBACK_URL": url}}.run(args...)
		return r.code, r.stdout, r.stderr
	}
	code, out, errs := run("retry", "cancel", "orders", "a", "x")
	assert.Equal(t, cli.No, code, errs)
	assert.Equal(t, "a: 1 message canceled\nx: no message waits\n", out)
	code, out, errs = run("retry", "run-now", "--json", "orders", "b")
	assert.Equal(t, cli.Done, code, errs)
	assert.JSONEq(t, `[{"token":"b","messages":1}]`, out)
	assert.Equal(t, "b", <-again)
	code, out, errs = run("retry", "reschedule", "orders", "c", "--in", "100ms")
	assert.Equal(t, cli.Done, code, errs)
	assert.Equal(t, "c: 1 message rescheduled\n", out)
	assert.Equal(t, "c", <-again)
	for _, args := range [][]string{{"c"}, {"c", "--in", "-1s"}, {"c", "--at", "2001-01-01T00:00:00Z"}, {"c", "--in", "1s", "--at", "2100-01-01T00:00:00Z"}, {}} {
		code, _, _ = run(append([]string{"retry", "reschedule", "orders"}, args...)...)
		assert.Equal(t, cli.Usage, code, args)
	}
	code, _, errs = run("retry", "cancel", "old", "a")
	assert.Equal(t, cli.No, code)
	assert.Contains(t, errs, "isn't a quorum queue")
	stop()
	require.NoError(t, <-ended)
}

func TestWaitingMessagesNeedRabbitMQ44(t *testing.T) {
	b := hopbacktest.Start(t, hopbacktest.Config{Version: "4.3.6"})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	run := func(args ...string) (code int, out, errs string) {
		r := world{env: map[string]string{"HOPBACK_URL": url}}.run(args...)
		return r.code, r.stdout, r.stderr
	}
	code, _, errs := run("retry", "cancel", "orders", "a")
	assert.Equal(t, cli.No, code)
	assert.Contains(t, errs, "needs RabbitMQ 4.4 or later, and the broker is 4.3.6")
}
