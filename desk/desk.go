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
		return nil, argument.At(argument.Root("conn"), argument.Missing, nil, "is nil", "use the connection that client.Connect has returned")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Desk{conn: conn, cfg: cfg, log: cfg.Logger}, nil
}

// Caveat is a guarantee that a walk of a queue can't give.
type Caveat struct {
	Code CaveatCode `json:"code"`
	Text string     `json:"text"`
	// Refuses reports whether operations return a TermsError unless Accept names Code.
	Refuses bool `json:"refuses"`
}

// CaveatCode is the kind of a Caveat.
type CaveatCode string

// The codes.
const (
	// CaveatLimit: each walk uses up one delivery of each message, because RabbitMQ below
	// 4.3 counts every return toward the delivery limit. It refuses.
	CaveatLimit CaveatCode = "delivery-limit"
	// CaveatLoss: if the connection is lost during a walk, each held message gets one
	// failed delivery toward the queue's delivery limit.
	CaveatLoss CaveatCode = "delivery-limit-on-loss"
	// CaveatConsumers: the queue has other consumers. They and the Desk each see a part of
	// the messages, and the order isn't kept. Reports name in Unread what wasn't read.
	CaveatConsumers CaveatCode = "other-consumers"
	// CaveatSingleActive: the queue has a single active consumer other than the Desk, so a
	// walk would receive nothing. It refuses.
	CaveatSingleActive CaveatCode = "single-active-consumer"
	// CaveatClassic: the queue is a classic queue. No message is lost, but order and counts
	// aren't guaranteed. It refuses.
	CaveatClassic CaveatCode = "classic-queue"
	// CaveatPolicies: without the HTTP API it is unknown whether a policy sets a delivery
	// limit.
	CaveatPolicies CaveatCode = "policies-unseen"
	// CaveatScan: another operation of this package reads the queue. By default an operation
	// waits until that has ended. Accepting CaveatScan lets it go on at once, and see only
	// what the other one doesn't hold.
	CaveatScan CaveatCode = "another-scan"
)

// Terms describes the effects of a walk on a queue's messages.
type Terms struct {
	Queue    string   `json:"queue"`
	Messages uint64   `json:"messages"` // that are ready
	Caveats  []Caveat `json:"caveats,omitempty"`
}

// TermsError says that a queue wasn't read, because a Caveat that refuses wasn't accepted.
// Nothing was changed. To go on, name its Code in Accept.
type TermsError struct{ Terms Terms }

func (e *TermsError) Error() string {
	var why []string
	for _, c := range e.Terms.Caveats {
		if c.Refuses {
			why = append(why, fmt.Sprintf("%s (%s)", c.Text, c.Code))
		}
	}
	return fmt.Sprintf("hopback: the queue %q isn't looked into: %s; accept that by its code to go on", e.Terms.Queue, strings.Join(why, "; "))
}

// Terms returns the effects that a walk would have on a queue's messages. It reads no
// message. A queue that doesn't exist is declare.ErrMissing. A stream is an
// *argument.Error. Other errors are those of declare.Inspect and of Config.HTTP.
func (d *Desk) Terms(ctx context.Context, queue string) (Terms, error) {
	info, err := declare.Inspect(ctx, d.conn.Management(), queue)
	if err != nil {
		return Terms{}, err
	}
	if info.Type == "stream" {
		return Terms{}, argument.At(argument.Root("queue"), argument.Unsupported, queue, "is a stream, whose messages nobody takes out", "read it with a stream consumer")
	}
	t := Terms{Queue: queue, Messages: info.Messages}
	add := func(code CaveatCode, refuses bool, format string, args ...any) {
		t.Caveats = append(t.Caveats, Caveat{code, fmt.Sprintf(format, args...), refuses})
	}
	if info.Type != "quorum" {
		add(CaveatClassic, true, "it is a %s queue, for which order and counts aren't promised", info.Type)
	}
	limit, limited := deliveryLimit(info)
	var held uint64 // by consumers
	if d.cfg.HTTP == nil {
		if !limited {
			add(CaveatPolicies, false, "without the HTTP API it can't be told whether a policy sets a delivery limit")
		}
	} else {
		policy, err := d.policy(ctx, queue)
		if err != nil {
			return Terms{}, err
		}
		held = policy.unacknowledged
		// A limit in either place counts; of two, the smaller one.
		if set := policy.Limit; set != nil && *set >= 0 && (!limited || *set < limit) {
			limit, limited = *set, true
		}
	}
	if limited && info.Type == "quorum" {
		if oldbroker.Of(d.conn.Broker().AtLeast).CountsReturns {
			add(CaveatLimit, true, countsLooks, limit)
		} else {
			add(CaveatLoss, false, "if the connection is lost while messages are held, each counts a failed delivery of the queue's limit of %d", limit)
		}
	}
	if info.Consumers > 0 {
		active, _ := info.Arguments["x-single-active-consumer"].(bool)
		if active {
			add(CaveatSingleActive, true, "it has a single active consumer, and %d are there before the desk: it would see nothing", info.Consumers)
		} else {
			holding := ""
			if held > 0 {
				holding = fmt.Sprintf(" and held %d messages some seconds ago", held)
			}
			add(CaveatConsumers, false, "it has %d other consumers%s: messages that they hold can't be read, and the order isn't kept", info.Consumers, holding)
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

// terms refuses what wasn't accepted.
func (d *Desk) terms(ctx context.Context, queue string, accept []CaveatCode) (Terms, error) {
	t, err := d.Terms(ctx, queue)
	if err != nil {
		return t, err
	}
	for _, c := range t.Caveats {
		if c.Refuses && !slices.Contains(accept, c.Code) {
			return t, &TermsError{t}
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

// teller calls a progress function once in a while.
type teller struct {
	tell func(Progress)
	last time.Time
}

func (t *teller) now(p Progress) {
	if t.tell == nil {
		return
	}
	if now := time.Now(); now.Sub(t.last) >= progressEvery {
		t.last = now
		t.tell(p)
	}
}

// errStop ends a walk that has seen enough.
var errStop = errors.New("enough was seen")
