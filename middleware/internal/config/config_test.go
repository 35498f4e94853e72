package config_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/internal/config"
)

func TestRefused(t *testing.T) {
	t.Parallel()
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
	assert.Nil(t, config.Refused("m", h, nil))
	bad := errors.New("bad")
	for _, inner := range []client.Handler{h, nil} {
		refused := config.Refused("m", inner, bad)
		require.ErrorIs(t, client.Prepare(t.Context(), refused, client.Start{}), bad)
		assert.Equal(t, client.Requeue{Failed: true, Err: bad}, refused.Handle(t.Context(), nil))
	}
	require.EqualError(t, client.Prepare(t.Context(), config.Refused("m", nil, nil), client.Start{}), "hopback: handler is nil; pass a Handler to m's Middleware")
}

func TestPause(t *testing.T) {
	t.Parallel()
	p := config.Pause{Of: "m.Config", Name: "First", LimitName: "Last", Default: 10 * time.Second, LimitDefault: time.Minute}
	for _, c := range []struct{ pause, limit, wantPause, wantLimit time.Duration }{
		{0, 0, 10 * time.Second, time.Minute},
		{0, time.Second, time.Second, time.Second},
		{0, time.Hour, 10 * time.Second, time.Hour},
		{time.Hour, 0, time.Hour, time.Hour},
		{time.Second, 2 * time.Second, time.Second, 2 * time.Second},
	} {
		require.NoError(t, p.Set(&c.pause, &c.limit))
		assert.Equal(t, []time.Duration{c.wantPause, c.wantLimit}, []time.Duration{c.pause, c.limit})
	}
	for want, c := range map[string][2]time.Duration{
		"m.Config.First = \"-1ns\" is negative": {-1, 0}, "m.Config.Last = \"-1ns\" is negative": {0, -1}, `m.Config.Last = "1s" is less than First`: {2 * time.Second, time.Second},
	} {
		require.ErrorContains(t, p.Set(&c[0], &c[1]), want)
	}
}
