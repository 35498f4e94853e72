package client_test

import (
	"context"
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

// In an alarm that lasts for a day, one line an hour says that the broker's time can't be read, however often it is
// asked for.
func TestAnAlarmOfADayHidesTheTimeWithFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		log := new(lines)
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.NewTextHandler(log, nil))})
		require.NoError(t, err)
		broker.SetMemoryAlarm(true)
		for range 24 * 60 {
			_, err := conn.BrokerTime(t.Context())
			require.Error(t, err)
			time.Sleep(time.Minute)
		}
		broker.SetMemoryAlarm(false)
		require.NoError(t, conn.Close(context.Background()))
		n := strings.Count(log.String(), "the broker's time can't be read")
		assert.GreaterOrEqual(t, n, 24)
		assert.Less(t, n, 35)
	})
}
