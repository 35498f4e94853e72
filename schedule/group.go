package schedule

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/brokername"
)

// Group is a set of recurring messages that the workers of one service publish together: each message
// once per time, however many workers there are. Its state is in RabbitMQ: see "Recurring messages" in
// the package documentation. A Group is a value without a state; its methods are safe for concurrent use.
//
//	group := schedule.Group{Conn: conn, Name: "billing"}
//	err := group.Run(ctx, schedule.RunConfig{Recurring: []schedule.Recurring{
//		{Name: "report", Times: schedule.Every(time.Hour), To: address.Queue("reports")},
//	}})
type Group struct {
	// Conn is the connection. Required.
	Conn *client.Conn
	// Name is the group's name: 1 to 100 bytes. Required. Services with different names don't know of each
	// other.
	Name string
	// Names start the names of the group's queues. Default: no prefix.
	Names Names
}

const (
	maxGroup = 100
	maxName  = 200
)

// check checks g for its methods.
func (g Group) check() error {
	if g.Conn == nil {
		return argument.New("Group.Conn", nil, "is nil", "set the result of client.Connect")
	}
	return checkGroup(g.Names, g.Name)
}

func checkGroup(n Names, group string) error {
	at := argument.Root("Group").Field("Name")
	switch {
	case len(group) > maxGroup:
		return argument.At(at, argument.CodeTooLong, group, "has more than 100 bytes", "use a short name, such as the service's")
	case group == "":
		return argument.At(at, argument.CodeMissing, nil, "is empty", "name the group after its service")
	}
	if err := brokername.Check(at, group); err != nil {
		return err
	}
	return n.check(argument.Root("Group").Field("Names"))
}

// TokenQueue returns the name of the queue that has the state of a group of recurring messages.
func (n Names) TokenQueue(group string) string { return n.Prefix + "schedule_recurring_" + group }

// RunQueue returns the name of the queue for the requests of [Group.RunNow].
func (n Names) RunQueue(group string) string { return n.Prefix + "schedule_run_" + group }

const (
	// tokenDeliveries is never reached: RabbitMQ below 4.3 counts each visit to the token as a failed delivery.
	tokenDeliveries = 2_000_000_000
	// requestDeliveries is more than the workers that can't publish a message hand around within requestFor.
	requestDeliveries = 20_000
)

// GroupTopology returns the two queues of a [Group], and the one for what doesn't belong in them. It works
// on each RabbitMQ 4. The error is an *argument.Error if a name is invalid.
//
//	schedule_recurring_<group>  queue          has one message, the group's state
//	schedule_run_<group>        queue          requests of Group.RunNow
//	schedule_undeliverable      fanout, queue  what isn't such a message
func GroupTopology(n Names, group string) (declare.Topology, error) {
	if err := checkGroup(n, group); err != nil {
		return declare.Topology{}, err
	}
	lost := n.UndeliverableQueue()
	dead := declare.DeadLetterTarget{Exchange: lost}
	t := declare.Topology{
		Exchanges: []declare.Exchange{{Name: lost, Type: declare.ExchangeFanout}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: lost, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: n.TokenQueue(group), DeliveryLimit: tokenDeliveries, DeadLetter: dead},
			declare.QuorumQueue{Name: n.RunQueue(group), DeliveryLimit: requestDeliveries, DeadLetter: dead},
		},
		Bindings: []declare.Binding{{Source: lost, Queue: lost}},
	}
	return t, t.Validate()
}

// Missed is what becomes of times at which no worker published: none ran, or the broker was down, or it
// refused the message. A time counts as missed once it is over for a minute.
type Missed string

const (
	// MissedOne publishes for the last one of the missed times, unless the message has just been published
	// for a later time. It is the default: "" means the same.
	MissedOne Missed = "one"
	// MissedSkip publishes for none of them.
	MissedSkip Missed = "skip"
	// MissedAll publishes for each of them, but for no more than the last 1,000.
	MissedAll Missed = "all"
)

const (
	// onTime is how late a time isn't a missed one yet.
	onTime = time.Minute
	// mostAtOnce is how many times one message is published for at once.
	mostAtOnce = 1000
)

// Recurring is a message that is published at recurring times.
type Recurring struct {
	// Name identifies the message in its group: 1 to 200 bytes without "@" and control characters. Required.
	Name string
	// Times are the times to publish at. Required.
	Times Times
	// Spec describes Times in [Group.List], such as a cron expression. Default: their String method, or their type.
	Spec string
	// Location is the time zone of the times that Times gets. Default: UTC.
	Location *time.Location
	// To is where to publish. Required. It never comes from the broker.
	To address.Address
	// Message returns the message for the time at. Its message-id is set afterwards. An error, or a panic,
	// is logged, and Message is called again later. It must be safe for concurrent use. Default: an empty message.
	Message func(at time.Time) (*client.Message, error)
	// Missed is what becomes of missed times. Default: MissedOne.
	Missed Missed
}

// MessageID returns the message-id of a recurring message for a time: "name@" and the time in UTC, as RFC 3339
// has it. A message that is published again after a crash has the same one, so that package
// middleware/dedupe recognizes it.
func MessageID(name string, at time.Time) string {
	return name + "@" + at.UTC().Format(time.RFC3339Nano)
}

// ParseMessageID returns the name and the time of a [MessageID]. A sender can forge it.
func ParseMessageID(id string) (name string, at time.Time, ok bool) {
	name, text, ok := strings.Cut(id, "@")
	if !ok || checkName(argument.Root("id"), name) != nil {
		return "", time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	return name, at.UTC(), err == nil
}

func checkName(at argument.Path, name string) error {
	switch {
	case name == "":
		return argument.At(at, argument.CodeMissing, nil, "is empty", "give each recurring message a name")
	case len(name) > maxName:
		return argument.At(at, argument.CodeTooLong, name, "has more than 200 bytes", "use a shorter name")
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r == '@' || unicode.IsControl(r) }):
		return argument.At(at, argument.CodeMalformed, name, `has an "@" or a control character, or isn't UTF-8`, "use letters, digits, and hyphens")
	}
	return nil
}

// RunConfig configures [Group.Run].
type RunConfig struct {
	// Recurring are the group's messages. All workers of a version of the program have the same ones. Up to
	// 20,000.
	Recurring []Recurring
	// Version orders versions of the program that run at the same time with different messages: workers with
	// the highest one publish. Default: 0 for all; then the version whose worker started last publishes.
	Version int64
	// Worker names this worker in [Group.List], in up to 100 bytes. Default: the host's name.
	Worker string
}

const maxRecurring = 20_000

// spec is what List shows of the times.
func (r Recurring) spec() string {
	if r.Spec != "" {
		return r.Spec
	}
	if s, ok := r.Times.(fmt.Stringer); ok {
		return s.String()
	}
	return fmt.Sprintf("%T", r.Times)
}

func (r Recurring) in(t time.Time) time.Time {
	if r.Location != nil {
		return t.In(r.Location)
	}
	return t.UTC()
}

// sum identifies the times: two versions of a program have the same sum of a message that neither has changed.
func (r Recurring) sum(at argument.Path) (string, error) {
	h := sha256.New()
	_, _ = fmt.Fprintf(h, "%q %q %q %q", r.Name, r.spec(), r.To.String(), r.Missed)
	// Times often have no String.
	t := r.in(sampled)
	for range samples {
		var err error
		if t, err = next(r.Times, t); err != nil {
			return "", argument.At(at.Field("Times"), argument.CodeMalformed, nil, "can't be used", "return a time after the argument, or the zero time").Because(err)
		}
		_, _ = fmt.Fprint(h, " ", t.UnixNano())
		if t.IsZero() {
			break
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:6]), nil
}

var sampled = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

const samples = 4

func (r Recurring) check(at argument.Path) error {
	if err := checkName(at.Field("Name"), r.Name); err != nil {
		return err
	}
	if r.Times == nil {
		return argument.At(at.Field("Times"), argument.CodeMissing, nil, "is nil", "set schedule.Every, or a schedule of a cron library")
	}
	if d, ok := r.Times.(every); ok && time.Duration(d) < time.Second {
		return argument.At(at.Field("Times"), argument.CodeOutOfRange, time.Duration(d), "is shorter than a second", "use Every with a second or more")
	}
	switch r.Missed {
	case "", MissedOne, MissedSkip, MissedAll:
	default:
		return argument.At(at.Field("Missed"), argument.CodeUnknown, string(r.Missed), "isn't one of one, skip, and all", "use schedule.MissedOne, MissedSkip, or MissedAll")
	}
	if r.To.IsZero() {
		return argument.At(at.Field("To"), argument.CodeMissing, nil, "is not set", "set the queue or the exchange to publish to")
	}
	if _, err := r.To.Build(); err != nil {
		return err
	}
	return nil
}
