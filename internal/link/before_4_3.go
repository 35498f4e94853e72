package link

import (
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/oldbroker"
)

// channelRest is how long a channel is kept out of use once a session on it has ended,
// where RabbitMQ forgets the old session only some time after it has sent its end.
const channelRest = 250 * time.Millisecond

func restChannels(conn *engine.Conn, old oldbroker.Quirks) {
	if old.ForgetsSessionsLate {
		conn.RestChannels(channelRest)
	}
}
