package suite

import (
	"context"
	"errors"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/rpc"
	"github.com/hopback/hopback/schedule"
)

// Ways are those that replies can take on a broker.
func Ways(s *Site) []rpc.Replies {
	if s.AtLeast("4.2") {
		return []rpc.Replies{rpc.RepliesDirect, rpc.RepliesByQueue}
	}
	return []rpc.Replies{rpc.RepliesByQueue}
}

func Requester[Req, Resp any](t *testing.T, conn *client.Conn, to address.Address, cfg rpc.RequesterConfig) *rpc.Requester[Req, Resp] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	r, err := rpc.NewRequester[Req, Resp](ctx, conn, to, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		_ = r.Close(ctx)
	})
	return r
}

func Responder(t *testing.T, conn *client.Conn) *rpc.Responder {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	r, err := rpc.NewResponder(ctx, conn, rpc.ResponderConfig{})
	require.NoError(t, err)
	return r
}

func Within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// RefusesDynamic checks that the broker has no dynamic sources.
func (p *Peer) RefusesDynamic(t *testing.T) {
	t.Helper()
	_, err := p.Site.NewReceiver(Within(t), "", &amqp.ReceiverOptions{DynamicAddress: true, SourceCapabilities: []string{"rabbitmq:volatile-queue"}})
	var refused *amqp.Error
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, amqp.ErrCondNotImplemented, refused.Condition)
}

// Dispatch runs schedule.Dispatch until the test ends.
func Dispatch(t *testing.T, conn *client.Conn, cfg schedule.DispatchConfig) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- schedule.Dispatch(ctx, conn, cfg) }()
	t.Cleanup(func() {
		cancel()
		if err := Await(t, done, "the end of Dispatch"); err != nil && !errors.Is(err, client.ErrClosed) {
			t.Errorf("Dispatch: %v", err)
		}
	})
}
