package client_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// A source of tokens that fails for hours is logged about once an hour, and asked more often.
func TestATokenSourceThatFailsForHoursIsFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		broker.AddUser("", "token")
		require.NoError(t, broker.SetPermissions("", "/", ".*", ".*", ".*"))
		log := new(lines)
		asked := 0
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{
			Dial: broker.Dial, Logger: slog.New(slog.NewTextHandler(log, nil)),
			SASL: client.OAuth2(func(context.Context) (client.Token, error) {
				if asked++; asked > 1 {
					return client.Token{}, errors.New("unavailable")
				}
				return client.Token{Value: "token", Expires: time.Now().Add(100 * time.Hour)}, nil
			}),
		})
		require.NoError(t, err)
		time.Sleep(99 * time.Hour)
		require.NoError(t, conn.Close(context.Background()))
		assert.Greater(t, asked, 19*360)
		n := strings.Count(log.String(), "the token wasn't renewed")
		assert.GreaterOrEqual(t, n, 19)
		assert.Less(t, n, 30)
	})
}
