package client

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/oldbroker"
)

// supportedBy refuses settings that a broker of this version would ignore.
func (c ConsumerConfig) supportedBy(old oldbroker.Quirks, version string) error {
	switch {
	case c.ConsumerTimeout != 0 && old.LacksConsumerTimeout:
		return argument.New("ConsumerConfig.ConsumerTimeout", c.ConsumerTimeout, "needs RabbitMQ 4.3 or later, and the broker is "+version, "leave it out; earlier versions have no consumer timeout over AMQP 1.0")
	case c.OnActive != nil && old.LacksActiveState:
		return argument.New("ConsumerConfig.OnActive", nil, "needs RabbitMQ 4.3 or later, and the broker is "+version, "leave it out; earlier versions don't report the active consumer")
	}
	return nil
}
