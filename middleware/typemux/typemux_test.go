package typemux_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/typemux"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func delivery(subject, body string) *client.Delivery {
	m := client.NewMessage([]byte(body))
	if subject != "" {
		m.Properties.Subject = &subject
	}
	return client.NewDelivery("orders", m)
}

type placed struct{ ID int }

type canceled struct{ Why string }

// Two types of messages in one queue, and a third that nobody knows.
func Example() {
	mux := typemux.New(typemux.Config{Handlers: map[string]client.Handler{
		"order.placed": client.JSON(func(_ context.Context, e placed) error {
			fmt.Println("placed", e.ID)
			return nil
		}),
		"order.canceled": client.JSON(func(_ context.Context, e canceled) error {
			fmt.Println("canceled:", e.Why)
			return nil
		}),
	}})
	ctx := context.Background()
	_ = mux.Handle(ctx, delivery("order.placed", `{"ID": 17}`))
	_ = mux.Handle(ctx, delivery("order.canceled", `{"Why": "too late"}`))
	fmt.Println(mux.Handle(ctx, delivery("order.lost", `{}`)))
	// Output:
	// placed 17
	// canceled: too late
	// dead-letter (unknown-type): no handler is registered for the type "order.lost"
}

// Without a subject, the type is that of AMQP 0-9-1, which RabbitMQ delivers as an annotation.
func TestTheTypeOfAMQP091(t *testing.T) {
	t.Parallel()
	var got []string
	handler := func(name string) client.Handler {
		return client.HandlerFunc(func(context.Context, *client.Delivery) error {
			got = append(got, name)
			return nil
		})
	}
	mux := typemux.New(typemux.Config{Handlers: map[string]client.Handler{"": handler("none"), "placed": handler("placed"), "subject": handler("subject")}})
	for _, subject := range []string{"", "subject"} {
		for _, annotation := range []any{nil, "placed", int64(7)} {
			d := delivery(subject, "")
			d.Message().Annotations = map[any]any{"x-basic-type": annotation}
			require.NoError(t, mux.Handle(t.Context(), d))
		}
	}
	assert.Equal(t, []string{"none", "placed", "none", "subject", "subject", "subject"}, got)
}

func TestAnUnknownTypeIsDeadAtOnceWithItsReason(t *testing.T) {
	t.Parallel()
	mux := typemux.New(typemux.Config{Handlers: map[string]client.Handler{"known": client.JSON(func(context.Context, int) error { return nil })}})
	for _, policy := range []retry.Policy{{}, {Strategy: retry.StrategyNative}, {Strategy: retry.StrategyDeadLetter}} {
		unknown, known := client.NewMessage([]byte("1")), client.NewMessage([]byte("1"))
		unknown.Properties.Subject, known.Properties.Subject = new("unknown"), new("known")
		unknown.Properties.MessageID, known.Properties.MessageID = "unknown", "known"
		result := hopbacktest.Run(t, policy, mux, unknown, known)
		assert.Equal(t, "handled", result.ByID("known").Fate)
		dead := result.ByID("unknown")
		assert.Equal(t, "dead-lettered", dead.Fate)
		assert.Len(t, dead.Attempts, 1)
		assert.Equal(t, client.ReasonUnknownType, dead.DeadLetter.Reason)
	}
}

func TestFallbackAndTypesFromProperties(t *testing.T) {
	t.Parallel()
	say := func(what string) client.Handler {
		return client.HandlerFunc(func(context.Context, *client.Delivery) error { return errors.New(what) })
	}
	mux := typemux.New(typemux.Config{
		Type: typemux.Property("type"), Fallback: say("fallback"),
		Handlers: map[string]client.Handler{"a": say("a"), "": say("none")},
	})
	for want, v := range map[string]any{"a": "a", "none": 17, "fallback": "b"} {
		d := delivery("", "1")
		d.Message().ApplicationProperties = map[string]any{"type": v}
		require.EqualError(t, mux.Handle(t.Context(), d), want)
	}
	require.EqualError(t, mux.Handle(t.Context(), client.NewDelivery("orders", &client.Message{})), "none")
}

func TestAllHandlersArePrepared(t *testing.T) {
	t.Parallel()
	ok := client.JSON(func(context.Context, int) error { return nil })
	for _, cfg := range []typemux.Config{
		{},
		{Handlers: map[string]client.Handler{"a": nil}},
		{Handlers: map[string]client.Handler{"a": ok, "b": client.JSON[int](nil)}},
		{Handlers: map[string]client.Handler{"a": ok}, Fallback: client.JSON[int](nil)},
	} {
		h := typemux.New(cfg)
		require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{}), new(*argument.Error))
	}
	requeue, is := errors.AsType[client.Requeue](typemux.New(typemux.Config{}).Handle(t.Context(), delivery("a", "1")))
	assert.True(t, is && requeue.Failed)
	require.NoError(t, client.Prepare(t.Context(), typemux.New(typemux.Config{Handlers: map[string]client.Handler{"a": ok}}), client.Start{}))
}
