package main

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

func TestAnOrderWaitsForItsPayment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{Version: "4.4.0"})
		conn, err := hopback.Connect(t.Context(), b.URL(), hopback.Config{Dial: b.Dial, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer func() { assert.NoError(t, conn.Close(context.Background())) }()
		orders := hopback.Queue[Order]{Conn: conn, Name: "orders", Retry: hopback.Policy{Strategy: retry.StrategyNative}}
		require.NoError(t, orders.Declare(t.Context()))
		for _, id := range []string{"o-1", "o-2"} {
			require.NoError(t, orders.Publish(t.Context(), Order{ID: id}))
		}
		ended := map[string]time.Duration{}
		began := time.Now()
		end := func(how string) { ended[how] = time.Since(began).Round(time.Minute) }
		cancel = func(o Order) error { end("canceled " + o.ID); return nil }
		ship = func(_ context.Context, o Order) error { end("shipped " + o.ID); return nil }
		ctx, stop := context.WithCancel(t.Context())
		stopped := make(chan error, 1)
		go func() { stopped <- orders.Consume(ctx, waitForPayment, hopback.ConsumerConfig{}) }()

		time.Sleep(10 * time.Minute)
		claimer, err := client.NewClaimer(ctx, conn, "orders")
		require.NoError(t, err)
		for _, want := range []bool{true, false} {
			shipped, err := paymentArrived(ctx, claimer, "o-1")
			require.NoError(t, err)
			assert.Equal(t, want, shipped, "it is shipped once")
		}
		n, err := claimer.RunNow(ctx, "payment/o-2")
		require.NoError(t, err)
		assert.Equal(t, 1, n, "it is parked again, since its time isn't over")
		time.Sleep(time.Hour)
		stop()
		require.NoError(t, <-stopped)
		assert.Equal(t, map[string]time.Duration{"shipped o-1": 10 * time.Minute, "canceled o-2": time.Hour}, ended)
	})
}
