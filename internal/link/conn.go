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
	// tcpTimeout finds a black hole soon; a broker answers a SYN at once.
	tcpTimeout = 4 * time.Second
	// LinkTimeout bounds opening a session or a link. A broker that doesn't
	// answer in that time counts as lost.
	LinkTimeout = 15 * time.Second
	// attachTimeout bounds attaching a receiver, which waits for the queue, and not
	// for the connection alone: RabbitMQ asks each replica of a quorum queue for up
	// to 30 s before it gives up and ends the session.
	attachTimeout = 2 * time.Minute
	// MaxSessions is how many sessions a connection carries, which is RabbitMQ's default
	// (session_max_per_connection). A broker may allow fewer. It ends the connection over
	// one more.
	MaxSessions = 64
	// MaxName is how many bytes a connection's name may have.
	MaxName = 255
)

// Wire is one live connection: one generation of a Conn.
type Wire struct {
	generation uint64
	maxMessage uint64 // DialConfig.MaxMessageSize
	endpoint   Endpoint
	AMQP       *engine.Conn
	Net        net.Conn
	Blockage   *Blockage
	intakes    intakes
	Version    string // of the broker; "": it doesn't say
	Node       string // the broker's
	Old        oldbroker.Quirks
	login      *userid.Login
	expires    time.Time             // of the token that it logged in with; zero: never
	Limit      int                   // sessions that it can carry
	sessions   atomic.Int64          // that are open
	Spare      chan struct{}         // has one for each session of the machinery itself
	heard      atomic.Uint64         // answers to messages, and deliveries
	GivenUp    atomic.Pointer[error] // why; another endpoint is to be tried first
	question   struct {
		sync.Mutex
		answered chan struct{} // closed when it is; nil: nobody asks
	}
	// Ctx ends when the connection does. It has no deadline.
	Ctx    context.Context
	cancel context.CancelFunc
}

// Says returns what the broker says of itself as it opens a connection, such as "product"; "": nothing.
func (w *Wire) Says(property string) string {
	v, _ := w.AMQP.Peer().Properties.Get(property)
	s, _ := v.(string)
	return s
}

// fail ends the connection at once, without the close handshake that a broker
// which doesn't answer would delay.
func (w *Wire) fail() { _ = w.Net.Close() }

// giveUp ends a connection whose broker doesn't answer: another endpoint is tried first.
func (w *Wire) giveUp(why error) {
	w.GivenUp.CompareAndSwap(nil, &why)
	w.fail()
}

// over is why the connection has ended.
func (w *Wire) over() error {
	if err := w.AMQP.Err(); err != nil {
		return transport(err)
	}
	return net.ErrClosed
}

// lost is the error of a connection that has ended.
func (w *Wire) lost() error {
	why := w.over()
	if given := w.GivenUp.Load(); given != nil {
		why = *given
	}
	return failure.NewError("connection", w.endpoint.Shown, failure.ErrConnectionLost, why)
}

// Answered runs an operation that waits for the broker, which has limit for its answer; else it
// counts as lost. After an error nothing is open: what the broker opens behind the end of
// ctx, the engine ends.
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

// close ends the connection in order, within ctx.
func (w *Wire) close(ctx context.Context) {
	_ = w.AMQP.Close(ctx)
	w.cancel()
}

// sessionDeliveries is after how many deliveries a session is replaced: half of those that
// have a delivery-id, which is 32 bits wide. This end's ids wrap, and what RabbitMQ's do after
// 2³² deliveries nobody has seen.
const sessionDeliveries = 1 << 31

// MaxSpare is how many sessions of a connection are kept for the machinery: the
// management, its request that goes alone, the renewal of a token, the questions for
// the broker's time and for a sign of life.
const MaxSpare = 4

// spareSessions is how many sessions nobody can reserve where the broker allows limit.
func spareSessions(limit int) int { return min(MaxSpare, max(limit/2, 1)) }

// CloseTimeout bounds the orderly closing of a link or session, which the broker
// answers at once if it answers at all.
const CloseTimeout = 5 * time.Second

// closeWire ends a connection that isn't wanted, without waiting long.
func closeWire(w *Wire) {
	ctx, cancel := context.WithTimeout(context.Background(), CloseTimeout)
	defer cancel()
	w.close(ctx)
}
