// Package annotation names the message annotations that hopback writes. docs/messages.md describes them for readers in other languages.
package annotation

// Annotations with a message's history, in addition to client.AnnotationReason and
// client.AnnotationError. Each is bounded, and overwritten at every failure, so a
// message doesn't grow however often it fails or is replayed.
//
// Times are milliseconds since 1970, as an int64. They are the broker's time with
// StrategyNative or Policy.GiveUpAfter, if the worker may ask for it
// (client.Start.BrokerTime). Otherwise they are the worker's.
const (
	// Retries is how often the message was retried, an int64.
	Retries = "x-opt-hopback-retries"
	// Queue is the work queue that the message was handled from, a string. Bindings
	// of ReplayByMove and of Central use it.
	Queue = "x-opt-hopback-queue"
	// Exchange and RoutingKey are where a replayed message was first
	// published to, strings.
	Exchange   = "x-opt-hopback-exchange"
	RoutingKey = "x-opt-hopback-routing-key"
	// Delay is the delay before the retry in milliseconds, an int64. The delay
	// queues of StrategyDeadLetter are bound by it.
	Delay = "x-opt-hopback-delay"
	// History holds the history, with every strategy. It is a string that holds a
	// JSON object. Members without a value are left out:
	//
	//	queue     the work queue that the message was handled from
	//	error     the text of the last error, unless client.AnnotationError has it
	//	type      its Go type
	//	first     the time of the first failure
	//	last      the time of the last failure
	//	delay     the delay before the retry in milliseconds; zero in a dead letter
	//	asked     the delay that the handler asked for, of messages that pass several
	//	          delay queues; see After
	//	left      what is left of it after delay
	//	worker    Policy.Worker
	//	attempts  the failed attempts before the last one, oldest first: arrays of a time, the
	//	          delay after it, and the start of the error's text, which is missing
	//	          if it is that of the next one; see AttemptsOf
	//	exchange  where the message was published to before its first retry
	//	key       and its routing key there
	History = "x-opt-hopback-history"
	// DeliveryTime is RabbitMQ's own annotation, a time: the queue doesn't
	// deliver the message before it. RabbitMQ below 4.3 ignores it.
	DeliveryTime = "x-opt-delivery-time"
	// DeferralToken is RabbitMQ's own annotation, a string: a consumer had the queue hold the
	// message until its DeliveryTime, or until a consumer claims it by this token. RabbitMQ
	// below 4.4 ignores it. The annotation outlasts the wait.
	DeferralToken = "x-opt-deferral-token"
)

// Tenant is the tenant of a message without a group-id that package fair has moved to a lane, a string.
const Tenant = "x-opt-hopback-tenant"

// Parked is when a message comes that client.Park has parked, unless it is claimed: milliseconds
// since 1970 by the broker's clock, an int64. 0 means that it isn't parked any more.
const Parked = "x-opt-hopback-parked"

// Recurring is the state of a group of recurring messages, in the group's token: a string that holds a JSON object. See
// package schedule.
const Recurring = "x-opt-hopback-recurring"

// Annotations that package client exports under names that begin with Annotation.
const (
	// Reason is client.AnnotationReason.
	Reason = "x-opt-hopback-reason"
	// Error is client.AnnotationError.
	Error = "x-opt-hopback-error"
	// KnownCount is client.AnnotationKnownCount.
	KnownCount = "x-opt-hopback-known-count"
)

// Annotations that a replay writes. Each has a bounded size. The next replay overwrites
// them.
const (
	// Replays is how often the message was replayed, an int64.
	Replays = "x-opt-hopback-replays"
	// Replay is the ID of the last replay, a string.
	Replay = "x-opt-hopback-replay"
	// ReplayedBy is ReplayConfig.By of the last replay, a string.
	ReplayedBy = "x-opt-hopback-replayed-by"
	// ReplayedAt is the time of the last replay by the clock of the process that
	// replayed, in milliseconds since 1970, an int64.
	ReplayedAt = "x-opt-hopback-replayed-at"
	// Lives holds the message's last eight lives, oldest first. A replay ends a
	// life and begins the next. The value is a string of at most 8 KiB with a JSON list.
	Lives = "x-opt-hopback-lives"
)

// Annotations of a scheduled message. Messages sent through Dispatch carry fewer annotations:
// only those that say where the message goes.
const (
	// Due holds when the message is due, by the broker's clock, in milliseconds
	// since 1970, an int64.
	Due = "x-opt-hopback-schedule-due"
	// To holds the address of its target, a string.
	To = "x-opt-hopback-schedule-to"
	// TTL holds its ttl in milliseconds, an int64, if it has one. In the ladder it
	// would end the wait.
	TTL = "x-opt-hopback-schedule-ttl"
	// Priority holds its priority, an int64, if that isn't 4. In the ladder it
	// would block messages of other priorities.
	Priority = "x-opt-hopback-schedule-priority"
)

// Annotations of a copy in Config.FailedQueue. It also has client.AnnotationReason and
// client.AnnotationError.
const (
	// Stream is the stream that the message was consumed from, a string.
	Stream = "x-opt-hopback-stream"
	// Offset is its offset there, an int64.
	Offset = "x-opt-hopback-offset"
)

// Older are the annotations in which revisions before v0.1 wrote what is now in
// History. They are still read. Workers of now overwrite them with 0,
// which workers of then ignore.
var Older = struct{ ErrorType, First, Last, Worker, Asked, Left, Attempts string }{
	"x-opt-hopback-error-type", "x-opt-hopback-first-failure", "x-opt-hopback-last-failure", "x-opt-hopback-worker",
	"x-opt-hopback-delay-asked", "x-opt-hopback-delay-left", "x-opt-hopback-attempts",
}

// OlderKeys has them all.
var OlderKeys = []string{Older.ErrorType, Older.First, Older.Last, Older.Worker, Older.Asked, Older.Left, Older.Attempts}
