// Package inside has what packages client and retry offer to others of this module, and to
// nobody else.
package inside

import (
	"context"
	"log/slog"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/link"
)

// Conn is what Of returns for a *client.Conn. Delivery is *client.Delivery: package
// client imports this one, so it can't be named here.
type Conn[Delivery any] interface {
	// Dial connects to the endpoint that is so many behind the one that the Conn is connected to: see
	// package dedicated.
	Dial(ctx context.Context, behind int) (link.Dialed, error)
	// Closed returns a channel that is closed when the Conn is.
	Closed() <-chan struct{}
	// AwaitVersion waits for a connection, and returns its broker's version, which may be empty. The
	// error is ctx's, or that the Conn is closed.
	AwaitVersion(ctx context.Context) (string, error)
	// Pause is how long to wait before another attempt to connect.
	Pause(failures int) time.Duration
	// Join has the Conn's Stats call count, until leave is called.
	Join(count func(*instrument.Stats)) (leave func())
	// Handle has the Conn's Instrument follow a delivery. The handler gets the ctx that is
	// returned, and handled is called with its result.
	Handle(ctx context.Context, d Delivery) (with context.Context, handled func(error))
	Alarms
	// Start calls f, in which a consumer of the queue asks the broker before it starts, and calls it again if
	// the connection was lost, until ctx ends. It counts as a consumer that is starting, and is logged if it takes
	// long.
	Start(ctx context.Context, queue string, f func() error) error
	// Starting is how many consumers are in Start, or in the Prepare of their handlers.
	Starting() int
	// ReadClock is client.Conn's BrokerTime, and how late that may be.
	ReadClock(ctx context.Context) (brokerclock.Reading, error)
	// Log is the Conn's logger.
	Log() *slog.Logger
	// ConsumeGated consumes from a queue with a single active consumer until ctx ends: see Gated. Its
	// errors are those of client.Conn.Consume.
	ConsumeGated(ctx context.Context, queue string, g Gated[Delivery]) error
	// OpenSession opens a session, which isn't rebuilt when it is lost. While there is no connection, it
	// waits. release closes it.
	OpenSession(ctx context.Context) (s link.Session, release func(), err error)
	// ReserveReplies reserves a session for replies. closed is called when the Conn is being
	// closed, and should return when the session is closed, within ctx. The Conn's Stats
	// call count.
	ReserveReplies(closed func(ctx context.Context), count func(*instrument.Stats)) (link.ReplyPlace, error)
}
