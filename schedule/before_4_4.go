package schedule

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// noTokens refuses a setting on a broker that parks no messages under a token.
func noTokens(name string, b client.Broker) error {
	return argument.New(name, true, "needs RabbitMQ 4.4 or later, and the broker is "+b.Version, "leave it out, and cancel messages with schedule.Cancel and schedule.With")
}
