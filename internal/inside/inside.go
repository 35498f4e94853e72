// Package inside has what packages client and retry offer to others of this module, and to
// nobody else: the results of their methods Internal.
package inside

import (
	"context"
	"log/slog"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/replylink"
)

// Conn is the result of client.Conn's method Internal. Delivery is *client.Delivery: package
// client imports this one, so it can't be named here.
type Conn[Delivery any] interface {
	// Dial connects to where the Conn is connected to: see package dedicated.
	dedicated.Dialer
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
	// Log is the Conn's logger.
	Log() *slog.Logger
	// ConsumeGated consumes from a queue with a single active consumer until ctx ends: see Gated. Its
	// errors are those of client.Conn.Consume.
	ConsumeGated(ctx context.Context, queue string, g Gated[Delivery]) error
	// ReserveReplies reserves a session for replies. closed is called when the Conn is being
	// closed, and should return when the session is closed, within ctx. The Conn's Stats
	// call count. The error is an *argument.Error if the Conn is nil.
	ReserveReplies(closed func(ctx context.Context), count func(*instrument.Stats)) (replylink.Place, error)
}
