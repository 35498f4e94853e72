package cli_test

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// The twelve mistakes that new users make: each error names its cause and the remedy.
func TestTypicalMistakesNameCauseAndRemedy(t *testing.T) {
	t.Parallel()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	target, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	_, at, _ := strings.Cut(strings.TrimSuffix(target, "/"), "@")
	broker.AddUser("eve", "eve")
	require.NoError(t, broker.SetPermissions("eve", "/", "^$", "^$", "^$"))
	other, stop := answering(t, "") // a port of another protocol
	defer stop()
	api, stop := answering(t, "HTTP/1.1 400 Bad Request\r\n")
	defer stop()
	old, stop := answering(t, "AMQP\x00\x00\x09\x01")
	defer stop()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	down := l.Addr().String()
	require.NoError(t, l.Close())

	applied := file(t, "applied.yaml", "queues: {audit: {delivery-limit: 5, dead-letter: drop}}\n")
	r := world{env: map[string]string{"HOPBACK_URL": target, "HOPBACK_MANAGEMENT_URL": "none"}}.run("topology", "apply", applied)
	require.Zero(t, r.code, r.stderr)
	different := file(t, "different.yaml", "queues: {audit: {delivery-limit: 6, dead-letter: drop}}\n")
	typo := file(t, "typo.yaml", "work-queues:\n  orders: {delivery-limt: 5}\n")
	central := file(t, "central.yaml", small+"central:\n")

	for _, c := range []struct {
		mistake, url, args string
		code               int
		cause, remedy      string
	}{
		{"wrong port", "amqp://guest:guest@" + other, "dlq survey audit", cli.Unknown, "this may not be an AMQP 1.0 port", "correct the port of the URL: by default it is 5672 for amqp://"},
		{"port of the HTTP API", "amqp://guest:guest@" + api, "dlq survey audit", cli.Unknown, "this isn't an AMQP 1.0 port: it answers in HTTP", "correct the port of the URL"},
		{"RabbitMQ 3", "amqp://guest:guest@" + old, "dlq survey audit", cli.Unknown, "it offers another version of AMQP", "use RabbitMQ 4"},
		{"wrong scheme", "http://guest:guest@" + at, "dlq survey audit", cli.Usage, "isn't an AMQP URL: its scheme is http", "write it as amqp://user:password@host:5672/vhost"},
		{"wrong password", "amqp://guest:wrong@" + at, "dlq survey audit", cli.Unknown, `the broker refused PLAIN for user "guest"`, "check the user and the password"},
		{"wrong virtual host", "amqp://guest:guest@" + at + "/shop", "dlq survey audit", cli.Unknown, `virtual host "shop"`, "correct the path of the URL, create the virtual host, or grant the user access to it"},
		{"missing queue", target, "dlq list orders.dead", cli.No, "queue 'orders.dead' in vhost '/' not found", `"hopback topology apply" declares the queues of a file`},
		{"missing permission", "amqp://eve:eve@" + at, "dlq list audit", cli.Unknown, "configure access to queue 'audit' in vhost '/' refused for user 'eve'", "grant the permission, for example with rabbitmqctl set_permissions"},
		{"different arguments", target, "topology apply " + different, cli.No, `x-delivery-limit: "5"`, "remedy: declare it under a new name and move the messages, as hopback topology migrate does"},
		{"YAML typo", target, "topology apply " + typo, cli.Usage, "typo.yaml:2:12: work-queues.orders.delivery-limt isn't a known key", `did you mean "delivery-limit"?`},
		{"broker down", "amqp://guest:guest@" + down, "dlq survey audit", cli.Unknown, "connection refused", "start the broker, or correct the host and the port of the URL"},
		{"amqps:// on 5672", "amqps://guest:guest@" + at, "dlq survey audit", cli.Unknown, "the port answers without TLS", "use amqp://, or the port for amqps://, which is 5671 by default"},
		{"policy without topology", target, "retry run " + central, cli.No, `queue "orders": it doesn't exist`, "declare the topology of the file: hopback topology apply"},
	} {
		t.Run(c.mistake, func(t *testing.T) {
			r := world{env: map[string]string{"HOPBACK_URL": c.url, "HOPBACK_MANAGEMENT_URL": "none"}}.run(strings.Fields(c.args)...)
			text := r.stdout + r.stderr
			assert.Equal(t, c.code, r.code, text)
			assert.Contains(t, text, c.cause)
			assert.Contains(t, text, c.remedy)
			assert.NotContains(t, text, ":wrong@")
		})
	}

	conn := connected(t, target)
	policy := retry.Policy{}
	handler := retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
	t.Run("unprepared middleware", func(t *testing.T) {
		publisher, err := client.NewPublisher[string](t.Context(), conn, address.Queue("audit"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, publisher.Publish(t.Context(), "hello"))
		hides := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error { return handler.Handle(ctx, d) })
		err = conn.Consume(t.Context(), "audit", hides, client.ConsumerConfig{})
		require.ErrorContains(t, err, "hides the Prepare method of retry.With")
		require.ErrorContains(t, err, "with client.Wrap, or give its Handler a Prepare method")
	})
	t.Run("policy without topology, in Go", func(t *testing.T) {
		err := conn.Consume(t.Context(), "audit", handler, client.ConsumerConfig{})
		require.ErrorContains(t, err, "is missing")
		require.ErrorContains(t, err, "apply retry.Topology of this policy")
	})
	t.Run("missing queue, in Go", func(t *testing.T) {
		err := conn.Consume(t.Context(), "orders", handler, client.ConsumerConfig{})
		require.ErrorIs(t, err, client.ErrNotFound)
		require.ErrorContains(t, err, "orders")
	})
}

// answering listens as a server of another protocol does, which answers and hangs up.
func answering(t *testing.T, answer string) (at string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 8))
			_, _ = c.Write([]byte(answer))
			_ = c.Close()
		}
	}()
	return l.Addr().String(), func() {
		_ = l.Close()
		<-done
	}
}
