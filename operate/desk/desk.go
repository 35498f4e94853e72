package desk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/retry"
)

const (
	maxLives      = 8
	maxLivesBytes = 8 << 10
	maxWord       = 100 // bytes of a replay's ID, and of who replays
)

// Config configures a Desk. The zero value works.
type Config struct {
	// HTTP reads the broker's HTTP API, such as a *httpapi.Reader. Without it a Desk doesn't
	// see policies, can't list queues, and doesn't know how many messages consumers hold.
	// Default: nil.
	HTTP check.Reader
	// Names are the names of the retry topology. Set them if the topology was declared with
	// other names. Default: the names of package retry.
	Names retry.Names
	// Logger gets events that no call returns, such as lost connections. Default:
	// slog.Default().
	Logger *slog.Logger
}

// Desk surveys, lists, shows, replays, edits, discards, exports, and imports the messages of
// a virtual host's queues. Create one with [New]. It is safe for concurrent use.
//
// Only one operation reads a queue at a time: a second one, of this Desk or of another
// process, waits for the first. See the package's documentation.
type Desk struct {
	conn *client.Conn
	cfg  Config
	log  *slog.Logger
	// unlockable are queues whose scans can't keep others away, by name.
	unlockable sync.Map
}

// New returns a Desk that inspects queues over conn. It doesn't contact the broker yet. Each
// operation that reads a queue opens another connection to the same broker and closes it
// afterwards. The caller closes conn. If conn is nil, the error is an *argument.Error.
func New(conn *client.Conn, cfg Config) (*Desk, error) {
	if conn == nil {
		return nil, argument.At(argument.Root("conn"), argument.CodeMissing, nil, "is nil", "use the connection that client.Connect returned")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Desk{conn: conn, cfg: cfg, log: cfg.Logger}, nil
}

// Broker returns the name and the version of the broker. See [client.Conn.Broker].
func (d *Desk) Broker() client.Broker { return d.conn.Broker() }

// Conn returns the connection that New got, for what a page shows besides messages: pauses, workers, and recurring
// messages.
func (d *Desk) Conn() *client.Conn { return d.conn }

// Warning is a side effect of reading a queue, or a guarantee that doesn't hold for it.
type Warning struct {
	Code WarningCode `json:"code"`
	// Text explains the warning to people.
	Text string `json:"text"`
	// Refuses reports whether operations return a *SideEffectsError unless their Accept lists
	// Code.
	Refuses bool `json:"refuses"`
}

// WarningCode is the kind of a [Warning]. List it in an operation's Accept to accept the
// warning.
type WarningCode string

// The codes. Those that refuse must be accepted before an operation reads the queue.
const (
	// WarningLimit: each scan uses up one delivery of each message, since RabbitMQ before
	// 4.3 counts every return toward the queue's delivery limit. It refuses.
	WarningLimit WarningCode = "delivery-limit"
	// WarningLoss: if the connection is lost during a scan, each held message gets one
	// failed delivery toward the queue's delivery limit.
	WarningLoss WarningCode = "delivery-limit-on-loss"
	// WarningConsumers: the queue has other consumers. They and the Desk each get some of
	// the messages, and the order isn't kept. Unread in the reports says what wasn't read;
	// accepting this warning leaves Unread empty.
	WarningConsumers WarningCode = "other-consumers"
	// WarningSingleActive: the queue has a single active consumer other than the Desk, so a
	// scan would receive nothing. It refuses.
	WarningSingleActive WarningCode = "single-active-consumer"
	// WarningClassic: the queue is a classic queue. No message is lost, but order and counts
	// aren't guaranteed. It refuses.
	WarningClassic WarningCode = "classic-queue"
	// WarningWaiting: messages wait in the queue for their delivery time, and RabbitMQ shows them
	// to nobody before. From RabbitMQ 4.4 on, dead letters can be among them. The text says how
	// many there are; without the HTTP API that is unknown. Unread in the reports says that they
	// weren't read; accepting this warning leaves Unread empty.
	WarningWaiting WarningCode = "waiting-messages"
	// WarningHeaders: a message may have been published over AMQP 0-9-1. RabbitMQ shows such a
	// message's headers that hold tables or arrays to no AMQP 1.0 client, unless their names begin
	// with "x-". So a copy and a line of a file would lack them, and nothing would show that. It is
	// about single messages: without its acceptance, Replay copies no such message, and Discard
	// removes none that it writes to a file.
	WarningHeaders WarningCode = "hidden-headers"
	// WarningPolicies: without the HTTP API the Desk doesn't know whether a policy sets a
	// delivery limit.
	WarningPolicies WarningCode = "policies-unseen"
	// WarningScan: another operation of this package is reading the queue. By default an
	// operation waits for it. Accepting WarningScan lets the operation start at once and read
	// only messages that the other one doesn't hold.
	WarningScan WarningCode = "another-scan"
)

// SideEffects describes what reading a queue does to its messages.
type SideEffects struct {
	Queue string `json:"queue"`
	// Messages is the number of ready messages.
	Messages uint64    `json:"messages"`
	Warnings []Warning `json:"warnings,omitempty"`

	alarm bool // the broker has one
}

// SideEffectsError means that a queue wasn't read, since a warning that refuses wasn't accepted.
// Nothing was changed. To read the queue anyway, list the warning's Code in Accept.
type SideEffectsError struct{ SideEffects SideEffects }

func (e *SideEffectsError) Error() string {
	var why []string
	for _, c := range e.SideEffects.Warnings {
		if c.Refuses {
			why = append(why, fmt.Sprintf("%s (%s)", c.Text, c.Code))
		}
	}
	return fmt.Sprintf("hopback: the queue %q wasn't read: %s; to read it anyway, accept the code in parentheses", e.SideEffects.Queue, strings.Join(why, "; "))
}

// SideEffects reports what reading a queue would do to its messages. It doesn't read them.
// Call it to show the warnings to a person before you pass their codes to Accept. The
// errors:
//
//   - [declare.ErrNotFound]: the queue doesn't exist.
//   - [*argument.Error]: the queue is a stream.
//   - all other errors of [declare.Inspect] and of Config.HTTP.
func (d *Desk) SideEffects(ctx context.Context, queue string) (SideEffects, error) {
	info, alarm, err := d.inspect(ctx, queue)
	if err != nil {
		return SideEffects{}, err
	}
	if info.Type == "stream" {
		return SideEffects{}, argument.At(argument.Root("queue"), argument.CodeUnsupported, queue, "is a stream, and a Desk reads only queues", "read it with package stream")
	}
	t := SideEffects{Queue: queue, Messages: info.Messages, alarm: alarm}
	add := func(code WarningCode, refuses bool, format string, args ...any) {
		t.Warnings = append(t.Warnings, Warning{code, fmt.Sprintf(format, args...), refuses})
	}
	if info.Type != "quorum" {
		add(WarningClassic, true, "it is a %s queue, which doesn't guarantee order and counts", info.Type)
	}
	limit, limited := deliveryLimit(info)
	var held uint64 // by consumers
	late := d.unseen(info.Type)
	if d.cfg.HTTP == nil {
		if !limited {
			add(WarningPolicies, false, "without the HTTP API it is unknown whether a policy sets a delivery limit")
		}
	} else {
		policy, err := d.policy(ctx, queue)
		if err != nil {
			return SideEffects{}, err
		}
		held, late = policy.unacknowledged, policy.waiting
		// A limit in either place counts; of two, the smaller one.
		if set := policy.Limit; set != nil && *set >= 0 && (!limited || *set < limit) {
			limit, limited = *set, true
		}
	}
	if limited && info.Type == "quorum" {
		if oldbroker.Of(d.conn.Broker().AtLeast).CountsReturns {
			add(WarningLimit, true, countsPeeks, limit)
		} else {
			add(WarningLoss, false, "if the connection is lost during the scan, RabbitMQ counts a failed delivery for each held message, and the queue's delivery limit is %d", limit)
		}
	}
	if text := late.String(); text != "" {
		add(WarningWaiting, false, "%s", text)
	}
	if info.Consumers > 0 {
		active, _ := info.Arguments["x-single-active-consumer"].(bool)
		if active {
			add(WarningSingleActive, true, "it has a single active consumer, and %s already there: the desk would get no messages", many(info.Consumers, "consumer is", "consumers are"))
		} else {
			holding := ""
			if held > 0 {
				holding = ", which held " + many(held, "message", "messages") + " a few seconds ago"
			}
			add(WarningConsumers, false, "it has %s%s: messages that others hold can't be read, and the order isn't kept", many(info.Consumers, "other consumer", "other consumers"), holding)
		}
	}
	return t, nil
}

// many is a number with its noun.
func many(n uint64, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// deliveryLimit is the limit in the queue's arguments. The default is 20.
func deliveryLimit(info declare.QueueInfo) (limit int64, limited bool) {
	switch v := info.Arguments["x-delivery-limit"].(type) {
	case int64:
		return v, v >= 0
	case nil:
		return 20, true
	default: // of a wrong type: 4.0 and 4.3 read it in different ways
		return 20, true
	}
}

// policy is what policies set for a queue.
type policy struct {
	Limit     *int64 `json:"delivery-limit"`
	MaxLength *int64 `json:"max-length"`
	MaxBytes  *int64 `json:"max-length-bytes"`

	unacknowledged uint64 // some seconds ago
	waiting        waiting
}

func (d *Desk) policy(ctx context.Context, queue string) (set policy, err error) {
	reply, err := d.cfg.HTTP.Get(ctx, "/queues/"+address.Escape(d.cfg.HTTP.VHost())+"/"+address.Escape(queue))
	if err != nil {
		return policy{}, err
	}
	var q struct {
		// An empty one is a list, as Erlang writes it.
		Policy         json.RawMessage `json:"effective_policy_definition"`
		Unacknowledged uint64          `json:"messages_unacknowledged"`
		Delayed        uint64          `json:"messages_delayed"`
		// Missing if none wait.
		Next json.RawMessage `json:"next_delayed_at"`
		Last json.RawMessage `json:"last_delayed_at"`
	}
	if err := json.Unmarshal(reply, &q); err != nil {
		return policy{}, fmt.Errorf("hopback: the HTTP API's reply about the queue %q can't be decoded: %w", queue, err)
	}
	if json.Unmarshal(q.Policy, &set) != nil {
		set = policy{}
	}
	set.unacknowledged = q.Unacknowledged
	set.waiting = waiting{messages: q.Delayed, next: whole(q.Next), last: whole(q.Last)}
	return set, nil
}

// sideEffects refuses to read a queue if accept lacks a warning that refuses.
func (d *Desk) sideEffects(ctx context.Context, queue string, accept []WarningCode) (SideEffects, error) {
	t, err := d.SideEffects(ctx, queue)
	if err != nil {
		return t, err
	}
	for _, c := range t.Warnings {
		if c.Refuses && !slices.Contains(accept, c.Code) {
			return t, &SideEffectsError{t}
		}
	}
	return t, nil
}

// Progress is the progress of an operation.
type Progress struct {
	// Seen is the number of messages read so far. Matched is how many of them the filter
	// selected, and Done how many of those are finished.
	Seen, Matched, Done uint64
	// Of is the number of ready messages in the queue when the operation started.
	Of uint64
	// Waiting reports whether the operation is waiting for another one that reads the queue.
	// While it waits, all counts are 0.
	Waiting bool
}

// progressEvery is the shortest time between two calls of a progress function.
const progressEvery = 200 * time.Millisecond

// notifier calls a progress function every progressEvery at most.
type notifier struct {
	notify func(Progress)
	last   time.Time
}

func (t *notifier) now(p Progress) {
	if t.notify == nil {
		return
	}
	if now := time.Now(); now.Sub(t.last) >= progressEvery {
		t.last = now
		t.notify(p)
	}
}

// errStop stops a scan that needs no more messages.
var errStop = errors.New("no more messages are needed")
