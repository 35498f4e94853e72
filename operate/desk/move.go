package desk

import (
	"context"
	"encoding/json"
	"maps"
	"math"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/retry"
)

// A dead-letter queue that is declared with retry.Policy.ReplayByMove dead-letters to an
// exchange that leads back to the work queues. If a message there is settled as modified and
// undeliverable-here, it goes to its work queue, with the annotations of the settlement: the
// broker moves it, at least once, and nothing is published.
//
// A settlement can add and overwrite annotations. It can't remove any, and can't change
// anything else. So a replay overwrites what it has to forget with "" and 0, which package
// retry treats as absent, and some messages can't be moved: see movable.

// wayOut is the exchange that a queue dead-letters to at least once, or "".
func wayOut(info declare.QueueInfo) string {
	text := func(key string) string {
		s, _ := info.Arguments[key].(string)
		return s
	}
	if info.Type != "quorum" || text("x-dead-letter-strategy") != "at-least-once" || text("x-overflow") != string(declare.OverflowRejectPublish) {
		return "" // it could lose what it moves
	}
	return text("x-dead-letter-exchange")
}

// noWay is the limit of a queue to which nothing can be moved.
const noWay = -1

// wayBack is the largest delivery count with which exchange may bring a replayed message to
// queue, or noWay: the count goes along, so a message needs deliveries that are left.
func (d *Desk) wayBack(ctx context.Context, exchange, queue string) (most int64) {
	var limits []int64
	if d.cfg.HTTP != nil {
		reply, err := d.cfg.HTTP.Get(ctx, "/exchanges/"+address.Escape(d.cfg.HTTP.VHost())+"/"+address.Escape(exchange))
		var x struct{ Type string }
		if err != nil || json.Unmarshal(reply, &x) != nil || x.Type != string(declare.ExchangeHeaders) {
			return noWay
		}
		// If 32 messages can't be delivered, everything that the dead-letter queue moves waits.
		p, err := d.policy(ctx, queue)
		if err == nil && p.Limit != nil {
			limits = append(limits, *p.Limit)
		}
		if err != nil || p.MaxLength != nil || p.MaxBytes != nil {
			return noWay
		}
	}
	info, err := declare.Inspect(ctx, d.conn.Management(), queue)
	if err != nil || info.Arguments["x-max-length"] != nil || info.Arguments["x-max-length-bytes"] != nil {
		return noWay
	}
	bindings, err := declare.Bindings(ctx, d.conn.Management(), declare.Binding{Source: exchange, Queue: queue})
	if err != nil {
		return noWay
	}
	want := map[string]any{client.AnnotationReason: string(retry.ReasonReplayed), annotation.Queue: queue, "x-last-death-reason": "rejected"}
	for _, b := range bindings {
		if b.Match == declare.MatchAllWithX && maps.Equal(b.Headers, want) {
			if limit, limited := deliveryLimit(info); limited {
				limits = append(limits, limit)
			}
			most := int64(math.MaxInt64)
			for _, limit := range limits {
				if limit >= 0 {
					most = min(most, limit/2)
				}
			}
			return most
		}
	}
	return noWay
}

// movable reports whether overwriting annotations is enough to make the message as new. RabbitMQ
// removes a time to live itself when it dead-letters a message, although it continues to show
// that of AMQP 0-9-1. It keeps the delivery count, and 4.3 counts it toward the work queue's limit, so
// a message with a count is copied, unless the copy could lack headers: to lose up to half of its
// deliveries is less than that.
func (l *deadLetter) movable(now time.Time, most int64) bool {
	if l.bad != nil {
		return false
	}
	if h := l.header; h != nil && h.DeliveryCount > 0 && (!l.mayHideHeaders() || int64(h.DeliveryCount) > most) {
		return false
	}
	_, counted := l.m.ApplicationProperties[retry.CountProperty]
	if _, too := l.m.Annotations[retry.CountProperty]; counted || too {
		return false
	}
	held, ok := l.m.Annotations[annotation.DeliveryTime]
	if !ok {
		return true
	}
	due, ok := held.(time.Time)
	if ms, is := held.(int64); is {
		due, ok = time.UnixMilli(ms), true
	}
	return ok && due.Before(now)
}

// forgotten are annotations that a replay forgets, and the values that overwrite them.
var forgotten = map[string]any{
	client.AnnotationError: "", annotation.History: "", annotation.ReplayedBy: "",
	annotation.Retries: int64(0), annotation.Delay: int64(0), client.AnnotationKnownCount: int64(0),
}

// moved are the annotations that make the message as new in queue.
func (l *deadLetter) moved(mark ReplayMark, queue string) frames.Map {
	out := frames.Map{
		{Key: frames.Symbol(client.AnnotationReason), Value: string(retry.ReasonReplayed)},
		{Key: frames.Symbol(annotation.Queue), Value: queue},
	}
	set := l.marks(mark)
	out = append(out, set...)
	if h := l.header; h != nil && h.DeliveryCount > 0 {
		// The count goes along. Known failures don't isolate the message.
		out = append(out, frames.Entry{Key: frames.Symbol(client.AnnotationKnownCount), Value: int64(h.DeliveryCount)})
	}
	for _, k := range annotation.OlderKeys {
		if _, has := l.m.Annotations[k]; has {
			out = append(out, frames.Entry{Key: frames.Symbol(k), Value: int64(0)})
		}
	}
	for k, nothing := range forgotten {
		_, has := l.m.Annotations[k]
		if _, again := out.Get(k); has && !again {
			out = append(out, frames.Entry{Key: frames.Symbol(k), Value: nothing})
		}
	}
	for k, origin := range map[string]string{annotation.Exchange: l.death.Exchange, annotation.RoutingKey: l.death.RoutingKey} {
		if l.death.Exchange != "" || l.death.RoutingKey != "" {
			out = append(out, frames.Entry{Key: frames.Symbol(k), Value: origin})
		}
	}
	return out
}

// moves reports whether a message goes to its queue without a copy.
func (r *replay) moves(ctx context.Context, l *deadLetter, to address.Address) bool {
	if r.wayOut == "" || r.cfg.Edit != nil || r.cfg.Copy || !to.IsQueue() || !l.movable(time.Now(), math.MaxInt64) {
		return false
	}
	queue := to.QueueName()
	most, known := r.waysBack[queue]
	if !known {
		most = r.d.wayBack(ctx, r.wayOut, queue)
		if len(r.waysBack) < 10_000 && ctx.Err() == nil {
			r.waysBack[queue] = most
		}
	}
	return most != noWay && l.movable(time.Now(), most)
}

// move makes the broker move a message to queue.
func (r *replay) move(ctx context.Context, w *scan, out *outbox, v dedicated.Delivery, l *deadLetter, id, queue string) error {
	if err := r.room(ctx, w, out, 0, false); err != nil {
		return err
	}
	if err := w.r.Move(ctx, v.ID, l.moved(ReplayMark{ID: r.cfg.ID, By: r.cfg.By, At: time.Now()}, queue)); err != nil {
		return err
	}
	r.selected(l, id)
	r.mu.Lock()
	r.sent++
	r.moving++
	r.mu.Unlock()
	return nil
}
