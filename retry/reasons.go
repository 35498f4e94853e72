package retry

import "github.com/hopback/hopback/client"

// The reasons for which messages are dead-lettered, all in one place, for a program that decides by
// [DeadLetter].Reason. A handler can add others: see [client.DeadLetter].
//
//	constant             text              who dead-letters it, and why
//	ReasonExhausted      exhausted         retry.With: retries or time are used up
//	ReasonPermanent      permanent         retry.With: the error is Permanent, or isn't retried
//	ReasonRejected       rejected          a handler or another client, without a reason
//	ReasonPanicked       panicked          the consumer: the handler panicked
//	ReasonUndecodable    undecodable       the consumer: the codec can't decode the body
//	ReasonTooLarge       too-large         the consumer: larger than client.Config.MaxMessageSize
//	ReasonUnforwardable  unforwardable     the consumer: a Forward that can never be sent
//	ReasonUnparkable     unparkable        the consumer: a Park that the broker can't hold
//	ReasonDeliveryLimit  delivery-limit    the broker: often a handler that crashes its process
//	ReasonExpired        expired           the broker: its time to live ended in the work queue
//	ReasonMaxLength      max-length        the broker: the work queue was full
//	ReasonNoDelayQueue   no-delay-queue    the broker: no delay queue accepted it
//	ReasonUnroutable     unroutable        the broker: it couldn't return after its delay; it is in
//	                                       the parking queue
//	ReasonUnknownQueue   unknown-queue     Central: it isn't configured for the message's queue
//	ReasonUnknownType    unknown-type      middleware/typemux: the type has no handler
//	ReasonUnsendable     unsendable-reply  rpc: the reply can't be sent
//	ReasonUndeliverable  undeliverable     schedule: the broker doesn't accept it when it is due
//	ReasonFailureLimit   failure-limit     adapter/officialclient: more failures than
//	                                       Config.FailureLimit
const (
	// ReasonExhausted means that the message has used up the policy's retries or its time.
	ReasonExhausted client.Reason = "exhausted"
	// ReasonPermanent means that the error is marked [Permanent], or that the policy doesn't
	// retry it.
	ReasonPermanent client.Reason = "permanent"
	// ReasonRejected means that a handler or another client rejected the message without giving a
	// reason.
	ReasonRejected client.Reason = "rejected"

	// ReasonDeliveryLimit means that the message reached its queue's delivery limit. The usual
	// cause is a handler that crashes its process each time. [DeadLetterOf] derives this reason and
	// the next four from what the broker wrote.
	ReasonDeliveryLimit client.Reason = "delivery-limit"
	// ReasonExpired means that the message reached its time to live in the work queue.
	ReasonExpired client.Reason = "expired"
	// ReasonMaxLength means that the work queue was full.
	ReasonMaxLength client.Reason = "max-length"
	// ReasonNoDelayQueue means that StrategyDeadLetter retried the message and no delay queue
	// accepted it, because the queue or its binding was gone. Replay the message once the
	// topology is fixed.
	ReasonNoDelayQueue client.Reason = "no-delay-queue"
	// ReasonUnroutable means that the message couldn't return after its delay, because its work
	// queue or a binding was gone. The parking queue holds such messages.
	ReasonUnroutable client.Reason = "unroutable"

	// ReasonUnknownQueue means that [Central] can't return the message: it doesn't say which work
	// queue it failed in, or it failed in a queue that Central isn't configured for.
	ReasonUnknownQueue client.Reason = "unknown-queue"

	// The reasons of packages that this one can't import, or that don't import it. Package client
	// explains them.

	ReasonPanicked      = client.ReasonPanicked
	ReasonUndecodable   = client.ReasonUndecodable
	ReasonTooLarge      = client.ReasonTooLarge
	ReasonUnforwardable = client.ReasonUnforwardable
	ReasonUnparkable    = client.ReasonUnparkable
	ReasonUnknownType   = client.ReasonUnknownType
	ReasonUnsendable    = client.ReasonUnsendable
	ReasonUndeliverable = client.ReasonUndeliverable
	ReasonFailureLimit  = client.ReasonFailureLimit
)

// ReasonReplayed isn't a reason for dead-lettering. Package desk writes it to
// client.AnnotationReason when it moves a message from its dead-letter queue back to its work
// queue. [DeadLetterOf] then returns no Reason, until the message is dead-lettered again.
const ReasonReplayed client.Reason = "replayed"
