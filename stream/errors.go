package stream

import (
	"fmt"

	"github.com/hopback/hopback/client"
)

// FilterError says that the broker doesn't apply a filter. It would deliver messages that
// weren't asked for, so nothing was consumed.
type FilterError struct {
	// Filter is the field of Filter, or "From".
	Filter string
	// Since is the first version of RabbitMQ that has the filter. It is empty if this one
	// has it, and has refused its value: SQL that it can't parse, for instance.
	Since string
	// Broker is the broker.
	Broker client.Broker
}

func (e *FilterError) Error() string {
	if e.Since != "" {
		return fmt.Sprintf("hopback: the filter %s needs RabbitMQ %s or later; this is %s: filter in the handler, or upgrade", e.Filter, e.Since, e.Broker.Version)
	}
	return fmt.Sprintf("hopback: RabbitMQ %s doesn't apply the filter %s: its value isn't valid", e.Broker.Version, e.Filter)
}

// PositionError says that a consumer's position is behind the end of its stream. The
// stream was deleted and declared again, or its end was lost. The broker would deliver
// nothing until it has got that far.
type PositionError struct {
	Stream, Consumer string
	// Position is the offset that the consumer has got to. End is the stream's next one.
	Position, End uint64
}

func (e *PositionError) Error() string {
	return fmt.Sprintf("hopback: stream %q ends before offset %d, and consumer %q is at offset %d already: the stream was declared anew, or lost its end; delete the saved position, or use another name", e.Stream, e.End, e.Consumer, e.Position)
}

// HandlerError says that a message failed to the end, and that Config.Failed is
// FailedStop. The saved position is this message's offset, so the next Consume begins
// with it.
type HandlerError struct {
	Stream string
	Offset uint64
	// Attempts is how often the handler was called.
	Attempts int
	// Reason is why it isn't tried again, such as retry.ReasonExhausted.
	Reason client.Reason
	// Err is the last error.
	Err error
}

func (e *HandlerError) Error() string {
	return fmt.Sprintf("hopback: stream %q, offset %d: failed after %d attempts (%s): %s", e.Stream, e.Offset, e.Attempts, e.Reason, client.ErrorText(e.Err))
}

// Unwrap returns Err.
func (e *HandlerError) Unwrap() error { return e.Err }

// SaveError says that the store couldn't read or save the position when the consumer
// started, or save it when the consumer ended. Messages up to Config.SaveEvery's bound are
// handled again.
type SaveError struct {
	Stream, Consumer string
	Err              error
}

func (e *SaveError) Error() string {
	return fmt.Sprintf("hopback: the position of consumer %q in stream %q: %v", e.Consumer, e.Stream, e.Err)
}

// Unwrap returns Err.
func (e *SaveError) Unwrap() error { return e.Err }
