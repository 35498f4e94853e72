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
	"github.com/hopback/hopback/declare/audit"
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
	// HTTP reads the broker's HTTP API, such as a *httpapi.Reader. Without it a Desk sees
	// no policies, can't list queues, and doesn't count what consumers hold.
	HTTP audit.Reader
	// Names are the names that the retry topology was declared with. Default: those of
	// package retry.
	Names retry.Names
	// Logger receives what no call returns, such as lost connections. Default:
	// slog.Default().
	Logger *slog.Logger
}

// Desk reads dead and waiting messages, and replays, edits, discards, exports and imports
// them. It is safe for concurrent use. One operation at a time reads a queue: another one,
// of this Desk or of any other process, waits until it has ended. See the package's
// documentation.
type Desk struct {
	conn *client.Conn
	cfg  Config
	log  *slog.Logger
	// unlockable are queues whose scans can't keep others away, by name.
	unlockable sync.Map
}

// New returns a Desk. It inspects queues over conn. Each walk opens its own connection to
// the same broker. A nil conn is an *argument.Error. Closing conn is the caller's task.
func New(conn *client.Conn, cfg Config) (*Desk, error) {
	if conn == nil {
		return nil, argument.At(argument.Root("conn"), argument.CodeMissing, nil, "is nil", "use the connection that client.Connect has returned")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Desk{conn: conn, cfg: cfg, log: cfg.Logger}, nil
}

// Warning is a guarantee that a walk of a queue can't give.
type Warning struct {
	Code WarningCode `json:"code"`
	Text string      `json:"text"`
	// Refuses reports whether operations return a SideEffectsError unless Accept names Code.
	Refuses bool `json:"refuses"`
}

// WarningCode is the kind of a Caveat.
type WarningCode string

// The codes.
const (
	// WarningLimit: each walk uses up one delivery of each message, because RabbitMQ below
	// 4.3 counts every return toward the delivery limit. It refuses.
	WarningLimit WarningCode = "delivery-limit"
	// WarningLoss: if the connection is lost during a walk, each held message gets one
	// failed delivery toward the queue's delivery limit.
	WarningLoss WarningCode = "delivery-limit-on-loss"
	// WarningConsumers: the queue has other consumers. They and the Desk each see a part of
	// the messages, and the order isn't kept. Reports name in Unread what wasn't read.
	WarningConsumers WarningCode = "other-consumers"
	// WarningSingleActive: the queue has a single active consumer other than the Desk, so a
	// walk would receive nothing. It refuses.
	WarningSingleActive WarningCode = "single-active-consumer"
	// WarningClassic: the queue is a classic queue. No message is lost, but order and counts
	// aren't guaranteed. It refuses.
	WarningClassic WarningCode = "classic-queue"
	// WarningPolicies: without the HTTP API it is unknown whether a policy sets a delivery
	// limit.
	WarningPolicies WarningCode = "policies-unseen"
	// WarningScan: another operation of this package reads the queue. By default an operation
	// waits until that has ended. Accepting WarningScan lets it go on at once, and see only
	// what the other one doesn't hold.
	WarningScan WarningCode = "another-scan"
)

// SideEffects describes the effects of a walk on a queue's messages.
type SideEffects struct {
	Queue    string    `json:"queue"`
	Messages uint64    `json:"messages"` // that are ready
	Warnings []Warning `json:"caveats,omitempty"`
}

// SideEffectsError says that a queue wasn't read, because a Caveat that refuses wasn't accepted.
// Nothing was changed. To go on, name its Code in Accept.
type SideEffectsError struct{ SideEffects SideEffects }

func (e *SideEffectsError) Error() string {
	var why []string
	for _, c := range e.SideEffects.Warnings {
		if c.Refuses {
			why = append(why, fmt.Sprintf("%s (%s)", c.Text, c.Code))
		}
	}
	return fmt.Sprintf("hopback: the queue %q isn't looked into: %s; accept that by its code to go on", e.SideEffects.Queue, strings.Join(why, "; "))
}

// SideEffects returns the effects that a walk would have on a queue's messages. It reads no
// message. A queue that doesn't exist is declare.ErrNotFound. A stream is an
// *argument.Error. Other errors are those of declare.Inspect and of Config.HTTP.
func (d *Desk) SideEffects(ctx context.Context, queue string) (SideEffects, error) {
	info, err := declare.Inspect(ctx, d.conn.Management(), queue)
	if err != nil {
		return SideEffects{}, err
	}
	if info.Type == "stream" {
		return SideEffects{}, argument.At(argument.Root("queue"), argument.CodeUnsupported, queue, "is a stream, whose messages nobody takes out", "read it with a stream consumer")
	}
	t := SideEffects{Queue: queue, Messages: info.Messages}
	add := func(code WarningCode, refuses bool, format string, args ...any) {
		t.Warnings = append(t.Warnings, Warning{code, fmt.Sprintf(format, args...), refuses})
	}
	if info.Type != "quorum" {
		add(WarningClassic, true, "it is a %s queue, for which order and counts aren't promised", info.Type)
	}
	limit, limited := deliveryLimit(info)
	var held uint64 // by consumers
	if d.cfg.HTTP == nil {
		if !limited {
			add(WarningPolicies, false, "without the HTTP API it can't be told whether a policy sets a delivery limit")
		}
	} else {
		policy, err := d.policy(ctx, queue)
		if err != nil {
			return SideEffects{}, err
		}
		held = policy.unacknowledged
		// A limit in either place counts; of two, the smaller one.
		if set := policy.Limit; set != nil && *set >= 0 && (!limited || *set < limit) {
			limit, limited = *set, true
		}
	}
	if limited && info.Type == "quorum" {
		if oldbroker.Of(d.conn.Broker().AtLeast).CountsReturns {
			add(WarningLimit, true, countsPeeks, limit)
		} else {
			add(WarningLoss, false, "if the connection is lost while messages are held, each counts a failed delivery of the queue's limit of %d", limit)
		}
	}
	if info.Consumers > 0 {
		active, _ := info.Arguments["x-single-active-consumer"].(bool)
		if active {
			add(WarningSingleActive, true, "it has a single active consumer, and %d are there before the desk: it would see nothing", info.Consumers)
		} else {
			holding := ""
			if held > 0 {
				holding = fmt.Sprintf(" and held %d messages some seconds ago", held)
			}
			add(WarningConsumers, false, "it has %d other consumers%s: messages that they hold can't be read, and the order isn't kept", info.Consumers, holding)
		}
	}
	return t, nil
}

// deliveryLimit is the queue's own. The default is 20.
func deliveryLimit(info declare.QueueInfo) (limit int64, limited bool) {
	switch v := info.Arguments["x-delivery-limit"].(type) {
	case int64:
		return v, v >= 0
	case nil:
		return 20, true
	default: // ill-typed: 4.0 and 4.3 read it in different ways
		return 20, true
	}
}

// policy is what policies set for a queue.
type policy struct {
	Limit     *int64 `json:"delivery-limit"`
	MaxLength *int64 `json:"max-length"`
	MaxBytes  *int64 `json:"max-length-bytes"`

	unacknowledged uint64 // some seconds ago
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
	}
	if err := json.Unmarshal(reply, &q); err != nil {
		return policy{}, fmt.Errorf("hopback: the HTTP API's reply about queue %q can't be read: %w", queue, err)
	}
	if json.Unmarshal(q.Policy, &set) != nil {
		set = policy{}
	}
	set.unacknowledged = q.Unacknowledged
	return set, nil
}

// sideEffects refuses what wasn't accepted.
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

// Progress is how far an operation has come.
type Progress struct {
	// Seen is the number of messages read so far. Matched is how many of them the filter
	// selected. Done is how many of those are finished.
	Seen, Matched, Done uint64
	// Of is the number of ready messages in the queue when the operation began.
	Of uint64
	// Waiting reports that the operation waits for another one that reads the queue. The
	// counts are 0 then.
	Waiting bool
}

// progressEvery is how often a Progress is told.
const progressEvery = 200 * time.Millisecond

// notifier calls a progress function once in a while.
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

// errStop ends a walk that has seen enough.
var errStop = errors.New("enough was seen")
