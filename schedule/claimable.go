package schedule

import (
	"context"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
)

// shortest is how long a message is parked at least. The queue delivers a parked message at its time, so it isn't parked
// again for less: clocks are known to some milliseconds.
const shortest = 50 * time.Millisecond

// parker handles the messages of the claimable queue. A published message can't have a token, so it
// parks each one when it comes, and hands it to the dispatcher when it comes again.
type parker struct {
	dispatcher *dispatcher
	conn       *client.Conn
}

func (p parker) Handle(ctx context.Context, d *client.Delivery) error {
	m := d.Message()
	due, ok := m.Annotations[annotation.Due].(int64)
	id, named := "", false
	if m.Properties != nil {
		id, named = m.Properties.MessageID.(string)
	}
	if !ok || !named {
		return client.DeadLetter{Reason: client.ReasonUndeliverable, Err: argument.New("message", nil, "has no due time or no message-id", "publish scheduled messages with schedule.Publisher")}
	}
	until := time.UnixMilli(due)
	now, err := inside.Of(p.conn).ReadClock(ctx)
	if err != nil {
		now.Broker = time.Now()
	}
	left := until.Sub(now.Broker)
	at, _ := m.Annotations[annotation.DeliveryTime].(int64)
	_, again := m.Annotations[annotation.Parked]
	if parked, known := d.Parked(); known { // a Claimer may have rescheduled it
		left = time.Until(parked.Until)
	} else if !again && until.After(now.Broker.Add(-now.Late)) {
		left = max(left, shortest) // its time may not have come
	}
	switch {
	case again && at == 0: // a Claimer has it run now
	case left > maxDelay+time.Hour:
		return client.DeadLetter{Reason: client.ReasonUndeliverable, Err: argument.New("message", until.UTC().Format(time.RFC3339), "is due more than 366 days ahead", "publish scheduled messages with schedule.Publisher")}
	case left >= shortest:
		return client.Park{Token: id, Until: time.Now().Add(left)}
	}
	return p.dispatcher.Handle(ctx, d)
}
