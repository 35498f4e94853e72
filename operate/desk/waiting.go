package desk

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/oldbroker"
)

// Claimer opens a client.Claimer for a queue: it cancels, runs, or reschedules waiting messages by
// their tokens. RabbitMQ doesn't show waiting messages, so a Desk can't list them. The caller
// closes it. The errors are those of [client.NewClaimer].
func (d *Desk) Claimer(ctx context.Context, queue string) (*client.Claimer, error) {
	return client.NewClaimer(ctx, d.conn, queue)
}

// waiting are the messages of a queue that wait for their delivery time, some seconds ago.
// RabbitMQ delivers them to nobody before that, so no scan reads them.
type waiting struct {
	messages   uint64
	next, last int64  // when the first and the last one come, in milliseconds since 1970
	unknown    string // why it isn't known whether there are any, or ""
}

// String is for people, "" if none wait.
func (w waiting) String() string {
	switch {
	case w.unknown != "":
		return "it is unknown whether messages wait in it for their delivery time, because only the HTTP API counts them: " + w.unknown
	case w.messages == 0:
		return ""
	}
	text := many(w.messages, "message waits in it for its delivery time", "messages wait in it for their delivery time")
	at := func(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }
	switch {
	case w.next <= 0 || w.last > maxMillis:
	case w.next == w.last:
		text += ", " + at(w.next)
	default:
		text += ", between " + at(w.next) + " and " + at(w.last)
	}
	return text + ": RabbitMQ hides " + map[bool]string{true: "it", false: "them"}[w.messages == 1] + " until then"
}

// whole reads an integer, 0 if it isn't one.
func whole(text json.RawMessage) int64 {
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// maxMillis is the end of the year 9999.
const maxMillis = 253402300799999

// unseen is what is known of waiting messages without the HTTP API. Before RabbitMQ 4.4 no
// dead letter waits.
func (d *Desk) unseen(queueType string) (w waiting) {
	if queueType == "quorum" && !oldbroker.Of(d.conn.Broker().AtLeast).DeliversPublishedAtOnce {
		w.unknown = "it isn't used"
	}
	return w
}

// stillWaiting says which messages a scan that has reached a queue's end can't have read. It
// returns "" if there are none.
func (d *Desk) stillWaiting(ctx context.Context, queue string) string {
	old := oldbroker.Of(d.conn.Broker().AtLeast)
	if old.IgnoresDeliveryTime || d.cfg.HTTP == nil && old.DeliversPublishedAtOnce {
		return ""
	}
	if d.cfg.HTTP == nil {
		info, _, err := d.inspect(ctx, queue)
		if err != nil {
			info.Type = "quorum"
		}
		return d.unseen(info.Type).String()
	}
	p, err := d.policy(ctx, queue)
	switch {
	case err == nil:
		return p.waiting.String()
	case ctx.Err() != nil || old.DeliversPublishedAtOnce:
		return ""
	}
	return waiting{unknown: fmt.Sprint(err)}.String()
}
