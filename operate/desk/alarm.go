package desk

import (
	"context"
	"fmt"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/startcheck"
	"github.com/hopback/hopback/operate/audit"
)

// During a memory or disk alarm RabbitMQ answers no management requests, and accepts no messages. It
// delivers and settles, so queues can be read, and messages can be discarded, which is what an operator
// may want to do against the alarm. What a scan has to know of the queue comes from the HTTP API
// then. Nothing waits for the end of an alarm: an operation that needs more than that returns an error
// that names the alarm.

// inspect is declare.Inspect. During an alarm it reads the HTTP API, and alarm is set.
func (d *Desk) inspect(ctx context.Context, queue string) (info declare.QueueInfo, alarm bool, err error) {
	info, pending, err := startcheck.Check[declare.QueueInfo]{
		Run: func(ctx context.Context) (declare.QueueInfo, error) {
			return declare.Inspect(ctx, d.conn.Management(), queue)
		},
		Alarms: inside.Of(d.conn),
	}.Start(ctx, func(declare.QueueInfo) {})
	if pending == nil {
		return info, false, err
	}
	pending.Cancel()
	if d.cfg.HTTP == nil {
		return info, true, blocked("inspect", queue, "end the alarm, or set Config.HTTP (the command line: HOPBACK_MANAGEMENT_URL) to read and discard messages during it")
	}
	info, err = audit.ReadQueue(ctx, d.cfg.HTTP, queue)
	return info, true, err
}

// blocked is the error of what can't be done during an alarm.
func blocked(op, queue, remedy string) error {
	return &client.Error{Op: op, Target: queue, Kind: client.ErrNotSent, Err: fmt.Errorf("%w; %s", failure.ErrBlocked, remedy)}
}

// unlockAfterAlarm deletes the exclusive queue of a scan that ended during an alarm. It returns when that
// is done, or the Conn is closed.
func (d *Desk) unlockAfterAlarm(queue, path string) {
	if _, err := declare.Inspect(context.Background(), d.conn.Management(), lockName(queue)); err != nil {
		return // its connection is lost, or a later scan has deleted it
	}
	leave, _, err := d.lock(context.Background(), queue, true, false, &notifier{})
	if err != nil {
		return
	}
	defer leave()
	ctx, cancel := context.WithTimeout(context.Background(), lockLimit)
	defer cancel()
	_, _, _ = d.conn.Management().Request(ctx, "DELETE", path, nil)
}
