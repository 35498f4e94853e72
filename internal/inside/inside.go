// Package inside has what packages client and retry offer to other packages of this module, but not to users.
package inside

import (
	"context"
	"log/slog"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/link"
)

// Conn is what Of returns for a *client.Conn. Its methods are safe for concurrent use. Delivery is
// *client.Delivery, which can't be named here because package client imports this one.
type Conn[Delivery any] interface {
	// Dial opens a network connection for package dedicated, to the endpoint that comes behind places
	// after the one that the Conn is connected to, or to the next one that can be reached.
	Dial(ctx context.Context, behind int) (link.Dialed, error)
	// Closed returns a channel that is closed when the Conn is.
	Closed() <-chan struct{}
	// AwaitVersion waits for a connection, and returns its broker's version, which may be "". It returns
	// an error if ctx ends, or the Conn is closed.
	AwaitVersion(ctx context.Context) (string, error)
	// Pause returns how long to wait before the next attempt to connect, after so many failures in a row.
	Pause(failures int) time.Duration
	// Join makes the Conn's Stats call count until leave is called.
	Join(count func(*instrument.Stats)) (leave func())
	// Handle reports a delivery to the Conn's Instrument. Call the handler with the returned ctx, and
	// handled with its result.
	Handle(ctx context.Context, d Delivery) (with context.Context, handled func(error))
	Alarms
	// Start calls f, with which a consumer of the queue makes its requests to the broker before it starts. If
	// the connection is lost, it calls f again, until ctx ends. Until then the consumer counts as starting, which
	// is logged if it takes long.
	Start(ctx context.Context, queue string, f func() error) error
	// Starting returns how many consumers are in Start, or in the Prepare of their handlers.
	Starting() int
	// ReadClock is client.Conn.BrokerTime, with how much later than the broker's clock the result may be.
	ReadClock(ctx context.Context) (brokerclock.Reading, error)
	// Log returns the Conn's logger.
	Log() *slog.Logger
	// ConsumeGated consumes from a queue with a single active consumer until ctx ends: see Gated. It
	// returns the errors of client.Conn.Consume.
	ConsumeGated(ctx context.Context, queue string, g Gated[Delivery]) error
	// OpenSession opens a session, which isn't rebuilt when it is lost. While there is no connection,
	// OpenSession waits. release closes the session.
	OpenSession(ctx context.Context) (s link.Session, release func(), err error)
	// ReserveReplies reserves a session slot for replies. closed is called when the Conn is being closed;
	// it should close the session, and return within ctx. The Conn's Stats call count.
	ReserveReplies(closed func(ctx context.Context), count func(*instrument.Stats)) (link.ReplyPlace, error)
}
