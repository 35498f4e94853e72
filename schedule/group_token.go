package schedule

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
)

// The token is the one message of a group's queue. It lies there, ready. A process that reads or changes the
// state takes it, and returns it within moments: the broker gives it to one at a time. It changes in place, by the
// annotation that returning it writes, so a crash can't double it. Its body, the catalog, changes rarely, by a copy
// that is confirmed before the original is accepted; then, or after somebody has forged one, there are two, and
// a process that sees both keeps the one with the higher serial, with the last pauses of both. It accepts the
// other one only after it has returned that, so that no crash in between loses a pause.
//
// A maximum length of 1 wouldn't make it unique: RabbitMQ doesn't count a message that a consumer holds
// (TestAQueueForOneMessageTakesAnother).

// state is the token's annotation. Times are nanoseconds since 1970, by the broker's clock.
type state struct {
	Serial  int64  `json:"serial"`            // grows with each change
	Version int64  `json:"version,omitempty"` // RunConfig.Version of those who publish
	Sum     string `json:"sum"`               // of their messages
	Catalog string `json:"catalog,omitempty"` // identifies the body
	Done    int64  `json:"done"`              // every message is published for all of its times up to then
	Head    int64  `json:"head"`              // up to then somebody has tried
	Next    int64  `json:"next,omitempty"`    // when that one tries again; 0: it has nothing to do
	By      string `json:"by,omitempty"`      // who; empty: it has stopped
	Holds   []hold `json:"holds,omitempty"`
	// Edits identify the last changes by Pause and others, which so learn that the broker has stored them.
	Edits []string `json:"edits,omitempty"`
}

const maxEdits = 8

// merge takes from another state of the same group what was paused or resumed later there, name by name, and reports
// whether that changed s. So it doesn't matter how many tokens there were for a time, or which one an edit met. What
// doesn't fit, with a forged token, is left out.
func (s *state) merge(other state) (changed bool) {
	before := *s
	defer func() {
		if !changed {
			return
		}
		if _, err := s.text(maxState - stateRoom); err != nil {
			*s, changed = before, false
		}
	}()
	for _, name := range names(other.Holds) {
		if edited(other.Holds, name) <= edited(s.Holds, name) {
			continue
		}
		kept := slices.DeleteFunc(slices.Clone(s.Holds), func(h hold) bool { return h.Name == name })
		for _, h := range other.Holds {
			if h.Name == name {
				kept = append(kept, h)
			}
		}
		s.Holds, changed = kept, true
	}
	if changed {
		for _, e := range other.Edits {
			if !slices.Contains(s.Edits, e) {
				s.Edits = append(slices.Clone(s.Edits), e)
			}
		}
		s.Edits = s.Edits[max(0, len(s.Edits)-maxEdits):]
	}
	return changed
}

// names lists the names that holds are for.
func names(all []hold) (names []string) {
	for _, h := range all {
		if !slices.Contains(names, h.Name) {
			names = append(names, h.Name)
		}
	}
	return names
}

// edited is when a name was last paused or resumed; 0: never, or long ago.
func edited(all []hold, name string) (at int64) {
	for _, h := range all {
		if h.Name == name {
			at = max(at, h.Edited)
		}
	}
	return at
}

// maxEnded is of how many names the state knows that they were resumed, or that their pause is over, for a token or a worker
// that hasn't heard of it.
const maxEnded = 16

// current leaves out pauses that are over, but not the last edit of a name.
func current(all []hold, done int64) (kept []hold) {
	ended := 0
	for _, h := range slices.Backward(all) { // the last ones that ended are the last ones
		switch {
		case h.Until == 0 || h.Until > done:
		case h.Edited < edited(all, h.Name) || ended == maxEnded:
			continue
		default:
			ended++
			h.By, h.Why = "", ""
		}
		kept = append(kept, h)
	}
	slices.Reverse(kept)
	return kept
}

// hold is a pause: times from Since until Until are skipped. Until 0: without an end.
type hold struct {
	Name    string `json:"name,omitempty"` // empty: all messages of the group
	Since   int64  `json:"since"`
	Until   int64  `json:"until,omitempty"`
	By      string `json:"by,omitempty"`
	Why     string `json:"why,omitempty"`
	Removed bool   `json:"removed,omitempty"`
	Edited  int64  `json:"edited"` // when this name was paused or resumed last; grows with each edit
}

// maxSerial and latest keep a forged token from the end of the numbers.
const maxSerial = 1 << 53

var latest = time.Date(maxYear, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano()

// maxState bounds the annotation: it must fit into a frame. Pause and Resume leave two rooms of stateRoom, and a token that
// anybody may have forged one, so that workers can always write what they add: their name and times.
const maxState, stateRoom = 16 << 10, 1 << 10

// holds reports whether a message isn't published for a time.
func (s state) holds(name string, at time.Time) bool {
	t := at.UnixNano()
	return slices.ContainsFunc(s.Holds, func(h hold) bool {
		return (h.Name == "" || h.Name == name) && h.Since <= t && (h.Until == 0 || t <= h.Until)
	})
}

// entry is a message in the catalog.
type entry struct {
	Name   string `json:"name"`
	Spec   string `json:"spec"`
	To     string `json:"to"`
	Missed Missed `json:"missed,omitempty"`
	Sum    string `json:"sum"`
	// Anchor is one of the message's times, or the time at which it was added: later times follow from it.
	Anchor int64 `json:"anchor"`
	Next   int64 `json:"next,omitempty"`
}

const (
	// maxCatalog bounds what is unpacked.
	maxCatalog = 16 << 20
	// tokenWait is how long to wait for a token that another one holds, or nobody.
	tokenWait = 30 * time.Second
	// tokenPause is how often to check whether there is one.
	tokenPause = time.Second
	// tokenCredit is how many messages of the queue are received at once: should it have others, they are removed.
	tokenCredit  = 16
	closeTimeout = 5 * time.Second
)

var errNoToken = errors.New("the queue has no token: no program has run this group, or somebody has emptied the queue")

func noToken(queue string) error {
	return &failure.Error{Op: "take the token", Target: queue, Kind: failure.ErrNotFound, Text: errNoToken.Error(), Err: errNoToken}
}

func heldToken(queue string) error {
	text := fmt.Sprintf("nobody has returned it for %v: a worker holds it while it waits for the broker, as in an alarm, or it was deleted, and a worker is about to create it again; try again", tokenWait)
	return &failure.Error{Op: "take the token", Target: queue, Kind: failure.ErrNotSent, Text: text}
}

// grip is the token in hand.
type grip struct {
	link    link.ReceiverLink
	release func()
	log     *slog.Logger
	queue   string
	held    bool
	merged  bool // state isn't what the token says
	id      uint32
	others  []uint32 // other tokens, which are accepted once this one has what they say
	body    []byte
	state   state
}

// take takes the token, and waits for it. If there is none, it calls create, which publishes one; if that is nil, the
// error is client.ErrNotFound. Call close in the end.
func (g Group) take(ctx context.Context, create func(context.Context) error) (*grip, error) {
	for began := time.Now(); ; {
		h, err := g.attach(ctx)
		if err != nil {
			return nil, err
		}
		err = h.await(ctx, g, create, time.Since(began) > tokenWait)
		if err == nil && h.held {
			return h, nil
		}
		h.close(ctx)
		if err != nil {
			return nil, err
		}
		// Two that wait for a token would each believe that the other one holds it, so they take turns.
		if !backoff.Sleep(ctx, rand.N(tokenPause)) {
			return nil, failure.Ended("take the token", h.queue, failure.ErrNotSent, ctx)
		}
	}
}

// attach opens a link to the token's queue.
func (g Group) attach(ctx context.Context) (*grip, error) {
	queue := g.Names.TokenQueue(g.Name)
	source, err := address.Queue(queue).Build()
	if err != nil {
		return nil, err
	}
	sess, release, err := inside.Of(g.Conn).OpenSession(ctx)
	if err != nil {
		return nil, failure.NewError("take the token", queue, failure.ErrConnectionLost, err)
	}
	l, err := sess.Receiver(ctx, source, link.ReceiverOptions{MaxBytes: link.PrefetchBytes})
	if err != nil {
		release()
		return nil, failure.NewError("take the token", queue, link.AttachKind(err), err)
	}
	return &grip{link: l, release: release, log: inside.Of(g.Conn).Log(), queue: queue}, nil
}

// await receives the token. If it doesn't come, somebody else has it, unless there is none.
func (h *grip) await(ctx context.Context, g Group, create func(context.Context) error, late bool) error {
	lost := func(err error) error {
		return failure.NewError("take the token", h.queue, failure.ErrConnectionLost, err)
	}
	if err := h.link.IssueCredit(tokenCredit); err != nil {
		return lost(err)
	}
	if err := h.link.Drain(ctx); err != nil {
		return lost(err)
	}
	for {
		a, ok := h.link.Prefetched()
		if !ok {
			break
		}
		if err := h.see(a); err != nil {
			return lost(err)
		}
	}
	if h.held {
		return nil
	}
	switch alone := h.alone(ctx, g); {
	case !alone && !late:
	case create != nil:
		if err := create(ctx); err != nil {
			return err
		}
	case alone:
		return noToken(h.queue)
	default:
		return heldToken(h.queue)
	}
	if err := h.wait(ctx); err != nil {
		return lost(err)
	}
	return nil
}

// wait waits for a message, but not for long.
func (h *grip) wait(ctx context.Context) error {
	if err := h.link.IssueCredit(1); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, tokenPause)
	defer cancel()
	a, err := h.link.Receive(waiting)
	switch {
	case err == nil:
		return h.see(a)
	case ctx.Err() == nil && waiting.Err() != nil:
		return nil
	}
	return err
}

// alone reports whether surely nobody else holds the token, and the queue has none.
func (h *grip) alone(ctx context.Context, g Group) bool {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	info, err := declare.Inspect(ctx, g.Conn.Management(), h.queue)
	return err == nil && info.Messages == 0 && info.Consumers <= 1
}

// see decides about a message of the queue.
func (h *grip) see(a link.Arrival) error {
	h.link.Release(a.Kept)
	s, err := stateOf(a)
	if err != nil {
		h.log.Warn("hopback: a message in the queue of a group of recurring messages isn't its token; it is dead-lettered", "queue", h.queue, "error", err)
		return h.link.Settle(a.ID, link.Disposition{Kind: link.DispositionModified, Dead: true, Annotations: map[any]any{
			annotation.Reason: string(client.ReasonUndeliverable), annotation.Error: err.Error(),
		}})
	}
	switch {
	case !h.held:
		h.held, h.id, h.state, h.body = true, a.ID, s, a.Msg.GetData()
		return nil
	case s.Serial > h.state.Serial:
		h.merged = s.merge(h.state)
		h.others = append(h.others, h.id)
		h.id, h.state, h.body = a.ID, s, a.Msg.GetData()
	default:
		h.merged = h.state.merge(s) || h.merged
		h.others = append(h.others, a.ID)
	}
	h.log.Info("hopback: a group of recurring messages has two tokens; the older one is removed", "queue", h.queue)
	return nil
}

// settle settles the token, then accepts the others.
func (h *grip) settle(d link.Disposition) error {
	h.held = false
	others := link.Disposition{Kind: link.DispositionAccepted}
	if h.merged && d.Kind == link.DispositionReleased {
		others = d // their state couldn't be written
	}
	err := h.link.Settle(h.id, d)
	for _, id := range h.others {
		err = cmp.Or(err, h.link.Settle(id, others))
	}
	h.others = nil
	return err
}

// stateOf reads a token, which anybody may have forged.
func stateOf(a link.Arrival) (s state, err error) {
	if a.Unreadable {
		return s, errors.New("it can't be decoded")
	}
	text, ok := a.Msg.Annotations[annotation.Recurring].(string)
	if !ok || len(text) > maxState {
		return s, fmt.Errorf("its annotation %s isn't a short string", annotation.Recurring)
	}
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return s, fmt.Errorf("its annotation %s: %w", annotation.Recurring, err)
	}
	if len(s.By) > maxGroup || s.Serial < 0 || s.Serial > maxSerial {
		return s, fmt.Errorf("its annotation %s is out of range", annotation.Recurring)
	}
	for _, t := range []*int64{&s.Done, &s.Head, &s.Next} {
		*t = min(max(*t, 0), latest)
	}
	for n := range s.Holds {
		s.Holds[n].Edited = min(max(s.Holds[n].Edited, 0), latest)
	}
	_, err = s.text(maxState - stateRoom)
	return s, err
}

// text is the annotation, of at most so many bytes.
func (s state) text(most int) (string, error) {
	b, err := json.Marshal(s)
	if err == nil && len(b) > most {
		err = fmt.Errorf("the state of the group has %d bytes, and at most %d are allowed: resume messages, or pause all of them", len(b), most)
	}
	return string(b), err
}

// change returns the token with another state, whose serial is higher.
func (h *grip) change(s state) error {
	text, err := s.text(maxState)
	if err != nil {
		return err
	}
	return h.settle(link.Disposition{Kind: link.DispositionModified, Annotations: map[any]any{annotation.Recurring: text}})
}

// replaced accepts the token after another one was published.
func (h *grip) replaced() error {
	return h.settle(link.Disposition{Kind: link.DispositionAccepted})
}

// close returns the token unless that is done, and ends the link.
func (h *grip) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if h.held && h.merged {
		h.state.Serial++
		_ = h.change(h.state)
	}
	if h.held {
		_ = h.settle(link.Disposition{Kind: link.DispositionReleased})
	}
	_ = h.link.Close(ctx)
	h.release()
}

// newToken makes a token.
func newToken(s state, catalog []entry) (*client.Message, error) {
	text, err := s.text(maxState)
	if err != nil {
		return nil, err
	}
	b, err := pack(catalog)
	if err != nil {
		return nil, err
	}
	m := client.NewMessage(b)
	m.Properties = &client.Properties{ContentType: new("application/json"), ContentEncoding: new("gzip")}
	m.Annotations = map[any]any{annotation.Recurring: text}
	return m, nil
}

func pack(catalog []entry) ([]byte, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if err := errors.Join(json.NewEncoder(z).Encode(catalog), z.Close()); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// full fills what it reads into. A json.Decoder looks through all that it has for each piece that it gets, so 16 MB of
// spaces in pieces of 32 kB, as gzip has them, would take six seconds.
type full struct{ r io.Reader }

func (f full) Read(p []byte) (int, error) {
	n, err := io.ReadFull(f.r, p)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return n, err
}

// unpack reads a catalog, which anybody may have forged.
func unpack(body []byte) (all []entry, err error) {
	z, err := gzip.NewReader(bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	// One after the other: empty entries take fifty times their bytes.
	in := json.NewDecoder(full{io.LimitReader(z, maxCatalog)})
	switch start, err := in.Token(); {
	case err != nil:
		return nil, err
	case start == nil:
		return nil, nil // no program has run the group
	case start != json.Delim('['):
		return nil, errors.New("the catalog isn't a list")
	}
	for in.More() {
		if len(all) == maxRecurring {
			return nil, errors.New("the catalog has too many messages")
		}
		var e entry
		if err := in.Decode(&e); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	_, err = in.Token()
	return all, err
}
