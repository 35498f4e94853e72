package link

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/failure"
)

// However a broker is silent, it is one error, also behind that of the lost connection.
func TestEachSilenceIsOneError(t *testing.T) {
	for _, why := range []error{errSilent, errOverdue, noAnswer(time.Second), engine.ErrSilent} {
		require.ErrorIs(t, failure.NewError("connection", "broker:5672", failure.ErrConnectionLost, why), engine.ErrSilent)
	}
}
