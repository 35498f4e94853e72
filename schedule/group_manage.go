package schedule

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/inside"
)

// PauseConfig configures [Group.Pause]. The zero value pauses the whole group until it is resumed.
type PauseConfig struct {
	// Names are the messages to pause. Default: all of the group, including those that are added later.
	Names []string
	// For is how long. Default: until Resume.
	For time.Duration
	// By is the person who pauses, and Why the reason, for other people: up to 200 bytes each. Default: none.
	By, Why string
}

const maxWhy = 200

// GroupState is the state of a [Group].
type GroupState struct {
	Name string `json:"name"`
	// Version is RunConfig.Version of the workers that publish, and Worker the one that published last; it is
	// empty if that one has stopped.
	Version int64  `json:"version"`
	Worker  string `json:"worker,omitempty"`
	// LastActive is when a worker last published something, or changed the messages. Done is up to when all
	// messages are published; it is earlier than LastActive if the broker refuses some.
	LastActive time.Time `json:"last_active"`
	Done       time.Time `json:"done"`
	// Paused is set if the whole group is paused.
	Paused *PauseState `json:"paused,omitempty"`
	// Recurring are the messages, by name.
	Recurring []RecurringState `json:"recurring"`
}

// RecurringState is the state of a recurring message.
type RecurringState struct {
	Name   string `json:"name"`
	Spec   string `json:"spec"`
	To     string `json:"to"`
	Missed Missed `json:"missed"`
	// Next is the next time. It is the zero time if there is none, or if only the program knows: see
	// ListConfig.Times.
	Next time.Time `json:"next,omitzero"`
	// Last is its last time until GroupState.Done, whether or not it was in a pause, or missed. It is the zero time if
	// there is none yet, or if ListConfig.Times doesn't know.
	Last   time.Time   `json:"last,omitzero"`
	Paused *PauseState `json:"paused,omitempty"`
	// Removed is set after Group.Remove.
	Removed bool `json:"removed,omitempty"`
}

// PauseState is a pause of a message, or of a group.
type PauseState struct {
	Since time.Time `json:"since"`
	Until time.Time `json:"until,omitzero"` // zero: until Resume
	By    string    `json:"by,omitempty"`
	Why   string    `json:"why,omitempty"`
}

// ListConfig configures [Group.List]. The zero value is ready to use.
type ListConfig struct {
	// Times returns the times of a Recurring.Spec, or nil if it doesn't know. Workers write down the next times
	// of all messages once an hour; later ones follow from Times. Default: nil.
	Times func(spec string) Times
	// Select, if not nil, reports whether to return a message, whose Next and Last aren't set yet. It is called by name.
	// Default: all.
	Select func(RecurringState) bool
}

// lastSteps is how often a call of List calls Next for RecurringState.Last: anybody may have forged the catalog.
const lastSteps = 100_000

// List returns the group's messages and their state. It works whether or not workers run. As for the methods below,
// client.ErrNotFound means that the group isn't declared, or that no program has run it yet, and client.ErrNotSent that a
// worker has held its token for 30 s, as in an alarm; the other errors are those of client.Conn.Consume.
func (g Group) List(ctx context.Context, cfg ListConfig) (GroupState, error) {
	if err := g.check(); err != nil {
		return GroupState{}, err
	}
	h, err := g.takeKnown(ctx)
	if err != nil {
		return GroupState{}, err
	}
	defer h.close(ctx)
	all, err := unpack(h.body)
	if err != nil {
		return GroupState{}, fmt.Errorf("schedule: reading the messages of the group %q: %w", g.Name, err)
	}
	s := h.state
	now, err := g.now(ctx)
	if err != nil {
		return GroupState{}, err
	}
	st := GroupState{Name: g.Name, Version: s.Version, Worker: s.By, LastActive: time.Unix(0, s.Head).UTC(), Done: time.Unix(0, s.Done).UTC(), Recurring: []RecurringState{}}
	st.Paused, _ = s.paused("", now)
	slices.SortFunc(all, func(a, b entry) int { return cmp.Compare(a.Name, b.Name) })
	steps := lastSteps
	for _, e := range all {
		r := RecurringState{Name: e.Name, Spec: e.Spec, To: e.To, Missed: cmp.Or(e.Missed, MissedOne)}
		r.Paused, r.Removed = s.paused(e.Name, now)
		if cfg.Select != nil && !cfg.Select(r) {
			continue
		}
		if cfg.Times != nil {
			r.Last, r.Next = e.around(cfg.Times(e.Spec), st.Done, &steps)
		}
		if e.Next > s.Done {
			r.Next = time.Unix(0, e.Next).UTC()
		}
		st.Recurring = append(st.Recurring, r)
	}
	return st, nil
}

// around returns the message's last time until done, and the first one after it, by the times of its Spec; zero: not known, or
// none. left is how often Next may be called for the last time.
func (e entry) around(t Times, done time.Time, left *int) (last, following time.Time) {
	if t == nil {
		return last, following
	}
	anchor, first := time.Unix(0, e.Anchor).UTC(), time.Time{}
	if e.Next != 0 {
		first = time.Unix(0, e.Next).UTC()
	}
	// The worker may have other times, as in a Recurring.Location.
	if at, err := next(t, anchor); err != nil || !at.Equal(first) {
		return last, following
	}
	if at, err := next(t, done); err == nil && !first.IsZero() {
		following = at.UTC()
	}
	all, _, _, cut, err := timesOf(t, first, done, 1, left)
	switch {
	case cut || err != nil:
	case len(all) > 0:
		last = all[0].UTC()
	case !anchor.After(done): // it may be when the message was added
		if at, err := next(t, anchor.Add(-1)); err == nil && at.Equal(anchor) {
			last = anchor
		}
	}
	return last, following
}

// takeKnown takes the token of a group that a program has run.
func (g Group) takeKnown(ctx context.Context) (*grip, error) {
	h, err := g.take(ctx, nil)
	if err == nil && h.state.Sum == "" {
		h.close(ctx)
		return nil, noToken(h.queue)
	}
	return h, err
}

// paused returns the pause of a message at a time.
func (s state) paused(name string, now time.Time) (*PauseState, bool) {
	for _, h := range s.Holds {
		if h.Name != name || h.Until != 0 && h.Until <= now.UnixNano() {
			continue
		}
		p := &PauseState{Since: time.Unix(0, h.Since).UTC(), By: h.By, Why: h.Why}
		if h.Until != 0 {
			p.Until = time.Unix(0, h.Until).UTC()
		}
		if h.Removed {
			return nil, true
		}
		return p, false
	}
	return nil, false
}

// now is the broker's time, and never ahead of it; if the broker refuses to tell it, it is this host's. An error means that the
// broker may tell it later.
func (g Group) now(ctx context.Context) (time.Time, error) {
	read, err := inside.Of(g.Conn).ReadClock(ctx)
	if err == nil {
		return read.Broker.Add(-read.Late).Round(0), nil
	}
	if _, later := brokerclock.AskAgain(err); later {
		return time.Time{}, err
	}
	return time.Now().Round(0), nil
}

// Pause pauses messages, or all of the group. Times in a pause are skipped, regardless of their Missed. When it returns
// nil, the broker has stored that, and no worker publishes for a later time; one that has taken up a time before may
// still be publishing for it. After a worker has held the group's token for half a minute, as in an alarm, there may be
// two; then a worker that has the other one may publish until they meet. A pause outlasts restarts. Pausing again
// replaces a pause, which then has begun with the first one.
//
// The error is an *argument.Error if a name is unknown.
func (g Group) Pause(ctx context.Context, cfg PauseConfig) error {
	if cfg.For < 0 {
		return argument.New("PauseConfig.For", cfg.For, "is negative", "leave it out to pause until Resume")
	}
	for name, text := range map[string]string{"PauseConfig.By": cfg.By, "PauseConfig.Why": cfg.Why} {
		if len(text) > maxWhy {
			return argument.New(name, text, "has more than 200 bytes", "say it in a sentence")
		}
	}
	names := cfg.Names
	if len(names) == 0 {
		names = []string{""}
	}
	return g.hold(ctx, names, func(now time.Time) hold {
		h := hold{Since: now.UnixNano(), By: cfg.By, Why: cfg.Why}
		if cfg.For > 0 {
			h.Until = now.Add(cfg.For).UnixNano()
		}
		return h
	})
}

// Remove stops messages for good, though programs still have them: they aren't published, until Resume. To be rid of
// a message altogether, remove it from the program.
func (g Group) Remove(ctx context.Context, names ...string) error {
	if len(names) == 0 {
		return argument.New("names", nil, "are empty", "name the messages to remove")
	}
	return g.hold(ctx, names, func(now time.Time) hold { return hold{Since: now.UnixNano(), Removed: true} })
}

// hold adds a pause for each name.
func (g Group) hold(ctx context.Context, names []string, of func(now time.Time) hold) error {
	return g.edit(ctx, names, func(s *state, now time.Time) {
		for _, name := range names {
			h := of(now)
			h.Name, h.Edited = name, s.stamp(name, now)
			s.Holds = slices.DeleteFunc(s.Holds, func(old hold) bool {
				replaced := old.Name == name && (old.Until == 0 || old.Until > h.Since)
				if replaced {
					h.Since = min(h.Since, old.Since) // times that nobody has taken up yet stay skipped
				}
				return replaced
			})
			s.Holds = append(s.Holds, h)
		}
	})
}

// Resume ends the pause of messages, and brings back removed ones. Without names it ends the pause of the whole group;
// messages that were paused by their names stay paused.
func (g Group) Resume(ctx context.Context, names ...string) error {
	if len(names) == 0 {
		names = []string{""}
	}
	return g.edit(ctx, names, func(s *state, now time.Time) {
		for _, name := range names {
			at := s.stamp(name, now)
			for n, h := range s.Holds {
				if h.Name == name && (h.Until == 0 || h.Until > now.UnixNano()) {
					s.Holds[n].Until, s.Holds[n].Edited = max(now.UnixNano(), h.Since), at
				}
			}
		}
	})
}

// stamp dates an edit of a name: after those before it, though the broker's clock may have been set back.
func (s *state) stamp(name string, now time.Time) int64 {
	return max(now.UnixNano(), min(edited(s.Holds, name), latest)+1)
}

// edit changes the state, and returns once the broker has stored that. RabbitMQ confirms no settlement, so the token is
// taken once more: if the change isn't there, it was lost, and is made again.
func (g Group) edit(ctx context.Context, names []string, change func(s *state, now time.Time)) error {
	if err := g.check(); err != nil {
		return err
	}
	const tries = 5
	edit := rand.Text()[:12]
	now, err := g.now(ctx)
	if err != nil {
		return err
	}
	for range tries {
		h, err := g.takeKnown(ctx)
		if err != nil {
			return err
		}
		if slices.Contains(h.state.Edits, edit) {
			h.close(ctx)
			return nil
		}
		err = known(h.body, names)
		if err == nil {
			s := h.state
			s.Holds = slices.Clone(s.Holds)
			change(&s, now)
			s.Serial++
			s.Edits = append(slices.Clone(s.Edits[max(0, len(s.Edits)-maxEdits+1):]), edit)
			if _, err = s.text(maxState - 2*stateRoom); err == nil {
				err = h.change(s)
			}
		}
		h.close(ctx)
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("schedule: the state of the group %q can't be changed: %w", g.Name, client.ErrOutcomeUnknown)
}

// known refuses names that aren't in a catalog.
func known(catalog []byte, names []string) error {
	all, err := unpack(catalog)
	if err != nil {
		return fmt.Errorf("schedule: reading the group's messages: %w", err)
	}
	for _, name := range names {
		if name != "" && !slices.ContainsFunc(all, func(e entry) bool { return e.Name == name }) {
			return argument.New("name", name, "isn't one of the group's messages", "list them with Group.List")
		}
	}
	return nil
}

// RunNow has a worker publish a message once, now, even while it is paused, and returns its message-id. It returns nil
// once the broker has stored the request. If no worker runs, the next one does it, within an hour.
func (g Group) RunNow(ctx context.Context, name string) (id string, err error) {
	if err := g.check(); err != nil {
		return "", err
	}
	h, err := g.takeKnown(ctx)
	if err != nil {
		return "", err
	}
	err = known(h.body, []string{name})
	h.close(ctx)
	if err != nil {
		return "", err
	}
	now, err := g.now(ctx)
	if err != nil {
		return "", err
	}
	at := now.Truncate(time.Millisecond)
	if at.Nanosecond() == 0 { // which may be a time of the message itself
		at = at.Add(time.Millisecond)
	}
	id = MessageID(name, at)
	p, err := client.NewPublisher[*client.Message](ctx, g.Conn, address.Queue(g.Names.RunQueue(g.Name)), client.PublisherConfig{})
	if err != nil {
		return "", err
	}
	m := client.NewMessage([]byte{})
	m.Properties = &client.Properties{MessageID: id}
	return id, errors.Join(p.Publish(ctx, m), p.Close(ctx))
}

// requestFor is how long a request of RunNow is good for.
const requestFor = time.Hour

// runNow handles a request of RunNow, which anybody may have forged.
func (r *runner) runNow(ctx context.Context, d *client.Delivery) error {
	refuse := func(err error) error {
		return client.DeadLetter{Reason: client.ReasonUndeliverable, Err: err}
	}
	again := func(err error) error { // another worker may be able to
		backoff.Sleep(ctx, time.Second)
		return client.Requeue{Err: err}
	}
	id := ""
	if p := d.Message().Properties; p != nil {
		id, _ = p.MessageID.(string)
	}
	name, at, ok := ParseMessageID(id)
	if !ok {
		return refuse(errors.New("it isn't a request of schedule.Group.RunNow"))
	}
	now, err := r.g.now(ctx)
	if err != nil {
		return again(err)
	}
	if now.Sub(at) > requestFor {
		return refuse(errors.New("no worker has published the message for an hour"))
	}
	of, ok := r.byName[name]
	if !ok || r.aside.Load() {
		return again(errors.New("this worker isn't the one that publishes the message"))
	}
	m, err := of.message(id, at)
	if err != nil {
		return refuse(err)
	}
	publishing, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	if err := r.p.Publish(publishing, m); err != nil {
		return again(err)
	}
	return nil
}
