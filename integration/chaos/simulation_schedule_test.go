package chaos

import (
	"context"
	"sync"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/schedule"
)

// Scheduled is a service whose messages are published for later with package schedule.
const Scheduled = "scheduled"

// ladder are the names of the lane's schedule.
func (l *simLane) ladder() schedule.Names { return schedule.Names{Prefix: l.prefix} }

// wait is how long a message of the lane is to wait: up to 100 s, mostly below 10 s, and one in eight no time. In a
// simulation of days, it is up to a week.
func (l *simLane) wait(id uint32) time.Duration {
	if l.name != Scheduled {
		return 0
	}
	d := l.script.dice(l.n, id, 500)
	switch span := time.Duration(d >> 16); d % 8 {
	case 0:
		return 0
	case 1:
		if l.Stretch > 1 {
			return l.stretch(span % (14 * time.Minute))
		}
		return span % (100 * time.Second)
	default:
		return l.stretch(span % (10 * time.Second))
	}
}

// scheduling publishes the messages of lane "scheduled".
type scheduling struct {
	l *simLane
	p *schedule.Publisher[*client.Message]
}

// publisher opens what publishes to the lane.
func (l *simLane) publisher(ctx context.Context, conn *client.Conn) (publishing, error) {
	switch l.name {
	case Partitioned, Fair:
		return client.NewPublisher[*client.Message](ctx, conn, address.Address{}, client.PublisherConfig{}) // it depends on the key, or the tenant
	case Called:
		return l.newCalling(ctx, conn)
	case Scheduled:
		p, err := schedule.NewPublisher[*client.Message](ctx, conn, address.Queue(l.queue), schedule.PublisherConfig{Names: l.ladder()})
		return scheduling{l, p}, err
	}
	return client.NewPublisher[*client.Message](ctx, conn, address.Queue(l.queue), client.PublisherConfig{})
}

// Publish schedules m, by its time or for after a delay. What was scheduled before without a known outcome may be
// due earlier.
func (s scheduling) Publish(ctx context.Context, m *client.Message, edit ...func(*client.Message)) error {
	_, id, err := s.l.read(m)
	if err != nil {
		return err
	}
	wait := s.l.wait(id)
	when := schedule.After(wait)
	if id%2 == 0 {
		when = schedule.At(time.Now().Add(wait))
	}
	s.l.ledger.Due(id, s.l.now()+uint32(wait.Milliseconds()))
	_, err = s.p.Publish(ctx, when, m, append(edit, func(m *client.Message) {
		if id%8 == 3 {
			m.Header = &amqp.MessageHeader{Durable: true, Priority: 4} // which takes Dispatch
		}
	})...)
	return err
}

// dispatch publishes what the broker can't route by itself, until life ends.
func (w *simWorker) dispatch(life, clocked context.Context, conn *client.Conn) {
	l := w.lane
	for life.Err() == nil {
		if err := schedule.Dispatch(clocked, conn, schedule.DispatchConfig{Names: l.ladder()}); err != nil && life.Err() == nil {
			l.heard.Add(1)
			l.say("worker-%s-%d: dispatch: %v", l.name, w.n, err)
			backoff.Sleep(life, 5*time.Second)
		}
	}
}

// publishers opens a publisher for each lane.
func (s *simulation) publishers(ctx context.Context, conn *client.Conn) []publishing {
	all := make([]publishing, len(s.lanes))
	var opening sync.WaitGroup
	for i, l := range s.lanes {
		opening.Go(func() {
			for ctx.Err() == nil {
				var err error
				if all[i], err = l.publisher(ctx, conn); err == nil {
					return
				}
				backoff.Sleep(ctx, time.Second)
			}
		})
	}
	opening.Wait()
	return all
}
