package client

import (
	"fmt"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/oldbroker"
)

// mayHaveLost is why a session is replaced after the queue's leader has moved.
func mayHaveLost(was, leader string) error {
	return fmt.Errorf("the queue's leader has moved from %s to %s: RabbitMQ below 4.3 may have lost settlements", was, leader)
}

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
