package engine

import "github.com/hopback/hopback/internal/frames"

// Consumer is a link on which a client receives.
type Consumer struct {
	// Tag is the wire's.
	Tag any
}

// Attach is the broker's answer to the attach frame, without name and handle.
func (c *Consumer) Attach() *frames.Attach { return nil }

// Flow takes the link's fields of a client's flow frame: delivery-count, link-credit,
// drain, echo. The engine counts the credit.
func (c *Consumer) Flow(flow *frames.Flow) {}

// Close closes the link at the client's wish. Its unsettled deliveries go back to the
// queue. It has no events afterwards.
func (c *Consumer) Close() {}

// Delivery is a message that was given to a consumer.
type Delivery struct {
	Consumer *Consumer
	// Tag is the wire's.
	Tag any
}

// Settled says whether the delivery is sent settled: then nobody settles it.
func (d *Delivery) Settled() bool { return false }

// DeliveryTag is what RabbitMQ puts into the transfer frame.
func (d *Delivery) DeliveryTag() []byte { return nil }

// Append writes the message behind b. It may be called by the goroutine that took the
// event, until the delivery is settled.
func (d *Delivery) Append(b []byte) []byte { return b }

// Size is how many bytes Append writes.
func (d *Delivery) Size() int { return 0 }
