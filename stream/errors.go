package stream

import (
	"fmt"

	"github.com/hopback/hopback/client"
)

// FilterError means that the broker doesn't apply a filter. It would deliver messages that the
// filter excludes, so nothing was consumed.
type FilterError struct {
	// Filter is the name of the field of [Filter], or "From".
	Filter string
	// Since is the first version of RabbitMQ that supports the filter. It is empty if this broker
	// supports it and has refused its value, for example SQL that it can't parse.
	Since string
	// Broker is the broker that the consumer is connected to.
	Broker client.Broker
}

func (e *FilterError) Error() string {
	if e.Since != "" {
		return fmt.Sprintf("hopback: the filter %s needs RabbitMQ %s or later; this broker is %s; filter in the handler, or upgrade", e.Filter, e.Since, e.Broker.Version)
	}
	return fmt.Sprintf("hopback: RabbitMQ %s doesn't apply the filter %s, because its value isn't valid; fix the value", e.Broker.Version, e.Filter)
}

// PositionError means that a consumer's position isn't one in its stream.
//
//   - The position is beyond the end of the stream: the stream was deleted and declared again, or its
//     end was lost. The broker would deliver nothing until the stream reaches the position. On a
//     cluster a replica may only be behind, so Consume tries all nodes for two minutes first.
//   - The position is in another stream of that name: the stream was deleted and declared again, and
//     has grown past the position. The consumer would skip the messages before it. This is known only
//     if the store is a [MarkStore], or if it happens while the consumer runs.
type PositionError struct {
	Stream, Consumer string
	// Position is the saved offset. End is the stream's next offset.
	Position, End uint64
	// Replaced reports that the stream has another message at the offset of one that the consumer
	// has handled.
	Replaced bool
}

func (e *PositionError) Error() string {
	if e.Replaced {
		return fmt.Sprintf("hopback: stream %q isn't the one in which consumer %q is at offset %d: it has other messages than those that were handled, so it was deleted and declared again; delete the saved position, or use another name", e.Stream, e.Consumer, e.Position)
	}
	return fmt.Sprintf("hopback: stream %q ends before offset %d, but consumer %q is at offset %d: the stream was deleted and declared again, or lost its end; delete the saved position, or use another name", e.Stream, e.End, e.Consumer, e.Position)
}

// HandlerError means that a message isn't retried any more, and that [Config.Failed] is
// [FailedStop]. The saved position is this message's offset, so the next Consume starts with it.
type HandlerError struct {
	Stream string
	Offset uint64
	// Attempts is how often the handler was called.
	Attempts int
	// Reason is why the message isn't retried any more, such as retry.ReasonExhausted.
	Reason client.Reason
	// Err is the handler's last error.
	Err error
}

func (e *HandlerError) Error() string {
	return fmt.Sprintf("hopback: stream %q, offset %d: failed after %d attempts (%s): %s", e.Stream, e.Offset, e.Attempts, e.Reason, client.ErrorText(e.Err))
}

// Unwrap returns Err.
func (e *HandlerError) Unwrap() error { return e.Err }

// SaveError means that the store couldn't read or save the position when the consumer started, or
// save it when the consumer stopped. In the latter case, up to 2 × [Config.SaveEvery] messages
// are handled again.
type SaveError struct {
	Stream, Consumer string
	Err              error
}

func (e *SaveError) Error() string {
	return fmt.Sprintf("hopback: the position of consumer %q in stream %q: %v", e.Consumer, e.Stream, e.Err)
}

// Unwrap returns Err.
func (e *SaveError) Unwrap() error { return e.Err }
