package client

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A handler that asks whether its ctx has ended, as retry does at each failure, doesn't
// pay for a context; once it has ended, the cause is there all the same.
func TestErrOfAHandlersContextMakesNone(t *testing.T) {
	notUnderRace(t)
	d := &delivery{}
	ctx := d.context(t.Context())
	assert.Zero(t, testing.AllocsPerRun(100, func() { require.NoError(t, ctx.Err()) }))

	gone := errors.New("gone")
	d.end(gone)
	require.ErrorIs(t, ctx.Err(), context.Canceled)
	assert.Equal(t, gone, context.Cause(ctx))
	require.ErrorIs(t, ctx.Err(), context.Canceled)

	outer, cancel := context.WithCancelCause(t.Context())
	ctx = (&delivery{}).context(outer)
	cancel(gone)
	require.ErrorIs(t, ctx.Err(), context.Canceled)
	assert.Equal(t, gone, context.Cause(ctx))
}
