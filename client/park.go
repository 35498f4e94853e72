package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/brokerclock"
)

// Park makes the message wait in its queue until a time, or until a [Claimer] claims it by Token.
// Use it in a handler that needs something that isn't there yet: a payment, an approval, another
// message. If nobody claims the message, the queue delivers it again at Until, to any consumer.
// [Delivery.Parked] tells the handler that the message was parked before.
//
// It needs RabbitMQ 4.4 or later and a quorum queue. On others, the message is dead-lettered with
// [ReasonUnparkable]: they would deliver it again at once, without end.
//
//   - Several messages may be parked under one token. A Claimer gets all of them.
//   - A parked message counts toward the length of its queue, and isn't delivered to anyone. Its
//     place takes memory of the broker: 0.8 KB each with 20,000 small messages, in a preview of 4.4.
//   - The message's ttl and the queue's message TTL keep running, but only take effect at Until.
//   - A message can't be parked while it is published. Package schedule does it for messages that
//     you want to cancel.
type Park struct {
	// Token is what the message can be claimed by: UTF-8 of 1 to 512 bytes. A sender who may
	// publish to the queue can send messages that your handler parks under a token that the sender
	// knows. So use a token that only the parties know, or check the claimed message.
	Token string
	// Until is when the queue delivers the message if nobody claims it. It must be in the future,
	// by this host's clock. The consumer converts it to the broker's clock, if it may ask for it
	// (see [Conn.BrokerTime]). RabbitMQ uses whole milliseconds; it is rounded up.
	Until time.Time
	// Annotations are merged into the message; see [Modify] for the allowed types.
	Annotations map[string]any
	Err         error // for logs; may be nil
}

func (Park) outcome() {}

func (o Park) Error() string {
	return describe("park until "+o.Until.UTC().Format(time.RFC3339), o.Err)
}

// Unwrap returns Err.
func (o Park) Unwrap() error { return o.Err }

// maxToken is how many bytes a token has at most.
const maxToken = 512

// Parked returns how a message was parked: its Token and Until. It returns false if the message
// wasn't parked, or was retried since. Until is by this host's clock. If it is still to come, a
// Claimer woke the message with RunNow, or a program that had claimed it failed: check whether what
// the message waits for is there, and park it again if not.
//
// A sender can forge this.
func (d *Delivery) Parked() (Park, bool) {
	token, ok := d.Annotation(annotation.DeferralToken).(string)
	until, parked := d.Annotation(annotation.Parked).(int64)
	if !ok || !parked || until == 0 {
		return Park{}, false
	}
	p := Park{Token: token, Until: time.UnixMilli(until)}
	if d.core != nil && d.core.consumer.conn != nil {
		if now, known := d.core.consumer.conn.certainNow(); known {
			p.Until = time.Now().Add(p.Until.Sub(now))
		}
	}
	return p, true
}

func checkToken(name, token string) error {
	if token == "" || len(token) > maxToken || !utf8.ValidString(token) {
		return argument.New(name, token, "isn't 1 to 512 bytes of UTF-8", "use an id, such as the message's")
	}
	return nil
}

func (o Park) check() error {
	if err := checkToken("Park.Token", o.Token); err != nil {
		return err
	}
	switch {
	case o.Until.IsZero():
		return argument.New("Park.Until", nil, "is the zero time", "set the time at which the message comes back if nobody claims it")
	case !time.Now().Before(o.Until):
		return argument.New("Park.Until", o.Until.UTC().Format(time.RFC3339Nano), "is in the past", "return another outcome: the message would come back at once")
	case o.Until.Year() > maxYear:
		return argument.New("Park.Until", o.Until.Year(), "is too far ahead", fmt.Sprintf("use a time before the year %d", maxYear))
	}
	return checkModified(o.Annotations)
}

// maxYear keeps times within an int64 of milliseconds, and of nanoseconds.
const maxYear = 2200

// at returns o with Until by the broker's clock.
func (o Park) at(ctx context.Context, brokerTime func(context.Context) (time.Time, error)) Park {
	if brokerTime == nil {
		return o
	}
	if r, err := brokerclock.Read(ctx, time.Now, brokerTime, brokerTime); err == nil {
		o.Until = r.Broker.Add(o.Until.Sub(r.Own))
	}
	return o
}

// parked resolves o, whose Until is by the broker's clock.
func (o Park) parked() Resolution {
	a := make(map[string]any, len(o.Annotations)+3)
	maps.Copy(a, o.Annotations)
	until := o.Until.Add(time.Millisecond - 1).UnixMilli()
	a[annotation.DeferralToken], a[annotation.DeliveryTime], a[annotation.Parked] = o.Token, until, until
	return Resolution{Kind: ResolutionModify, Annotations: a}
}

// unparkable replaces o where messages can't be parked.
func (o Park) unparkable(why error) Resolution {
	r := DeadLetter{Reason: ReasonUnparkable, Err: errors.Join(why, o.Err), Annotations: o.Annotations}.resolve()
	r.Refused = cmp.Or(r.Refused, why)
	return r
}

var errNoPark = errors.New("client.Park works only in client.Conn.Consume and client.Claimer")

// resolve checks o. parks says that the queue can park messages.
func (o Park) resolve(ctx context.Context, parks bool, b Broker, brokerTime func(context.Context) (time.Time, error)) Resolution {
	if !parks {
		return o.unparkable(noTokens(b))
	}
	if err := o.check(); err != nil {
		r := failedDelivery
		r.Refused = err
		return r
	}
	return o.at(ctx, brokerTime).parked()
}
