package client

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/oldbroker"
)

// noTokens says why messages can't be parked, or claimed by token.
func noTokens(b Broker) error {
	if oldbroker.Of(b.AtLeast).LacksTokens {
		return argument.New("queue", nil, "can't park messages: that needs RabbitMQ 4.4 or later, and the broker is "+b.Version, "upgrade the broker, and enable its feature flags")
	}
	return argument.New("queue", nil, "can't park messages: it isn't a quorum queue, or a feature flag of RabbitMQ 4.4 isn't enabled", "use a quorum queue; rabbitmqctl enable_feature_flag all")
}
