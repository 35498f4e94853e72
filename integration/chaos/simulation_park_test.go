package chaos

import (
	"context"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/retry"
)

// Parking is a service whose handlers park messages until something else happens, or a time comes. It needs
// RabbitMQ 4.4.
const Parking = "parking"

// parks notes that a handler should park the message now: half of them, before anything else.
func (l *simLane) parks(ctx context.Context, d *client.Delivery) (park client.Park, parks bool) {
	of, id, err := l.read(d.Message())
	if l.name != Parking || err != nil || of != l || retry.Attempt(ctx) > 1 {
		return park, false
	}
	if _, was := d.Parked(); was || l.script.dice(l.n, id, 600)%2 == 0 {
		return park, false
	}
	until := time.Now().Add(l.stretch(2*time.Second + time.Duration(l.script.dice(l.n, id, 601)%uint64(time.Minute))))
	l.mu.Lock()
	w := &l.waits[l.n][id]
	w.due = max(w.due, until.Sub(l.began))
	l.mu.Unlock()
	select {
	case l.parked <- id:
	default: // nobody claims it
	}
	return client.Park{Token: messageName(l.n, id), Until: until}, true
}

// claim does with parked messages what other parts of a service do, until life ends: it handles, cancels,
// wakes, or reschedules them.
func (w *simWorker) claim(life context.Context, conn *client.Conn) {
	l := w.lane
	for life.Err() == nil {
		claimer, err := client.NewClaimer(life, conn, l.queue)
		if err != nil {
			backoff.Sleep(life, time.Second)
			continue
		}
		for err == nil && life.Err() == nil {
			select {
			case id := <-l.parked:
				err = w.claimOne(life, claimer, id)
			case <-life.Done():
			}
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(life), 5*time.Second)
		_ = claimer.Close(ctx)
		cancel()
	}
}

// claimOne does it with one. An error means that the message is due, or waits as before.
func (w *simWorker) claimOne(ctx context.Context, claimer *client.Claimer, id uint32) error {
	l, token := w.lane, messageName(w.lane.n, id)
	dice := l.script.dice(l.n, id, 602)
	backoff.Sleep(ctx, l.stretch(time.Duration(dice>>32%uint64(10*time.Second))))
	once, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var n int
	var err error
	switch fate := l.script.Fate(l.n, id); {
	case fate == Fate{EndHandled, 0} && dice%4 < 2:
		n, err = claimer.Claim(once, token, client.HandlerFunc(w.handle))
	case dice%16 == 4:
		l.ledger.Gone(id) // at the latest when Cancel returns, if it was still waiting
		n, err = claimer.Cancel(once, token)
	case dice%4 == 2:
		n, err = claimer.RunNow(once, token)
	default:
		until := time.Now().Add(l.stretch(30 * time.Second))
		l.mu.Lock()
		l.waits[l.n][id].due = max(l.waits[l.n][id].due, until.Sub(l.began))
		l.mu.Unlock()
		n, err = claimer.Reschedule(once, token, until)
	}
	l.claimed.Add(int64(n))
	return err
}
