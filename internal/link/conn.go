package link

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/userid"

	"github.com/hopback/hopback/internal/failure"
)

const (
	// tcpTimeout is short because a broker answers a SYN at once: no answer means that packets are dropped.
	tcpTimeout = 4 * time.Second
	// LinkTimeout bounds opening a session, or a link that doesn't wait for a queue. A broker that
	// doesn't answer in that time counts as lost.
	LinkTimeout = 15 * time.Second
	// attachTimeout bounds attaching a receiver. It is long because RabbitMQ waits for the queue:
	// it asks each replica of a quorum queue for up to 30 s before it ends the session.
	attachTimeout = 2 * time.Minute
	// MaxSessions is how many sessions a connection carries, which is RabbitMQ's default
	// (session_max_per_connection). A broker may allow fewer. It closes a connection that opens one
	// more.
	MaxSessions = 64
	// MaxName is how many bytes a connection's name may have.
	MaxName = 255
)

// Wire is one AMQP connection. When it is lost, its pool opens another. Its fields don't change once it is open,
// except for those that are atomic or say what guards them.
type Wire struct {
	generation uint64 // its number in the pool; pooledConn.begin sets it before the Wire has users
	maxMessage uint64 // DialConfig.MaxMessageSize
	endpoint   Endpoint
	AMQP       *engine.Conn
	Net        net.Conn
	Blockage   *Blockage
	intakes    intakes // for the goroutine that reads from the connection
	Version    string  // of the broker; "": it doesn't say
	Node       string  // the broker's
	Old        oldbroker.Quirks
	login      *userid.Login
	expires    time.Time             // of the token that it logged in with; zero: never
	Limit      int                   // sessions that it can carry
	sessions   atomic.Int64          // that are open
	Spare      chan struct{}         // holds one element for each open session of the client itself
	heard      atomic.Uint64         // counts answers to messages, and deliveries
	GivenUp    atomic.Pointer[error] // why giveUp closed it; nil: it didn't
	// question is the one that answering asks the broker.
	question struct {
		sync.Mutex
		answered chan struct{} // closed when the broker has answered; nil: it isn't asked
	}
	// Ctx ends when the connection does. It has no deadline.
	Ctx    context.Context
	cancel context.CancelFunc
}

// Says returns a property of the broker's open frame, such as "product". It returns "" if there is none, or if
// it isn't a text.
func (w *Wire) Says(property string) string {
	v, _ := w.AMQP.Peer().Properties.Get(property)
	s, _ := v.(string)
	return s
}

// fail closes the network connection without AMQP's close, which a broker that doesn't answer would delay.
func (w *Wire) fail() { _ = w.Net.Close() }

// giveUp closes a connection whose broker doesn't answer. The pool then tries the next endpoint first.
func (w *Wire) giveUp(why error) {
	w.GivenUp.CompareAndSwap(nil, &why)
	w.fail()
}

// over returns why the connection has ended.
func (w *Wire) over() error {
	if err := w.AMQP.Err(); err != nil {
		return transport(err)
	}
	return net.ErrClosed
}

// lost returns the error of a connection that has ended, as users get it.
func (w *Wire) lost() error {
	why := w.over()
	if given := w.GivenUp.Load(); given != nil {
		why = *given
	}
	return failure.NewError("connection", w.endpoint.Shown, failure.ErrConnectionLost, why)
}

// Answered calls open, which waits for an answer of the broker. If there is none within limit, the connection
// counts as lost. After an error nothing stays open: if the broker opens something after ctx has ended, the
// engine closes it.
func (w *Wire) Answered(ctx context.Context, limit time.Duration, open func(ctx context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := open(limited)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case limited.Err() != nil:
		w.giveUp(noAnswer(limit))
		return w.lost()
	}
	return transport(err)
}

// close closes the connection with AMQP's close, within ctx.
func (w *Wire) close(ctx context.Context) {
	_ = w.AMQP.Close(ctx)
	w.cancel()
}

// sessionDeliveries is after how many deliveries a session is replaced: at half of the delivery-ids, which have
// 32 bits. This end's ids wrap around. Whether RabbitMQ's do isn't known.
const sessionDeliveries = 1 << 31

// MaxSpare is how many sessions of a connection are kept for the client itself: management requests, the request
// that needs a separate session, token renewals, and the questions for the broker's time and for a sign of life.
const MaxSpare = 4

// spareSessions is how many of limit sessions can't be reserved.
func spareSessions(limit int) int { return min(MaxSpare, max(limit/2, 1)) }

// CloseTimeout bounds closing a link, a session, or a connection. A broker answers that at once, if at all.
const CloseTimeout = 5 * time.Second

// closeWire closes a connection that isn't needed. It waits for CloseTimeout at most.
func closeWire(w *Wire) {
	ctx, cancel := context.WithTimeout(context.Background(), CloseTimeout)
	defer cancel()
	w.close(ctx)
}
