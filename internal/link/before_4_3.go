package link

import (
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/oldbroker"
)

// channelRest is how long a channel isn't used after a session on it has ended, for brokers that forget the
// session only some time after they have sent its end.
const channelRest = 250 * time.Millisecond

func restChannels(conn *engine.Conn, old oldbroker.Quirks) {
	if old.ForgetsSessionsLate {
		conn.RestChannels(channelRest)
	}
}
