package desk

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/dedicated"
)

// ReplayConfig configures [Desk.Replay]. Queue is required, and so is Filter or All.
type ReplayConfig struct {
	// Queue is the dead-letter queue or parking queue to replay from.
	Queue string
	// Filter selects the messages. A Filter that selects all messages, such as the zero
	// value, is refused unless All is set.
	Filter Filter
	All    bool
	// ID names the replay, in valid UTF-8 of at most 100 bytes. Default: a generated ID,
	// which the report has.
	//
	// A message that has been in a replay isn't replayed again under the same ID. So to
	// continue a replay that was stopped, call Replay again with its ID: messages that have
	// been dead-lettered again since then stay in the queue.
	ID string
	// By is the person or program that replays, in valid UTF-8 of at most 100 bytes. Each
	// message carries it in the annotation x-opt-hopback-replayed-by. Default: none.
	By string
	// ToExchange publishes each message to the exchange and with the routing key that it was
	// first published with. Every queue that is bound there gets it. Default: a message goes
	// to the queue that it was dead-lettered from, and so does one that records neither
	// exchange nor routing key.
	//
	// The broker's record of the exchange and routing key is lost when StrategyRepublish,
	// Central, or a replay copies the message. Such a message is replayed only if the exchange
	// has a binding to the queue that it was dead-lettered from, and the routing key matches
	// that binding.
	ToExchange bool
	// Address, if it isn't zero, is where all messages go instead. It can't be Queue.
	//
	// Without it, Replay must know where a message came from. Annotations alone never decide
	// that, since a message's sender can write any. They must agree with what the broker
	// recorded when it dead-lettered the message (x-opt-deaths), or with the dead-letter queue
	// that the message is in. Otherwise the message stays in the queue and counts as failed.
	Address address.Address
	// DryRun counts the selected messages and sends nothing.
	DryRun bool
	// Rate is the maximum number of messages per second. Default: 0, as fast as the broker
	// confirms.
	Rate float64
	// Max is the maximum number of messages to try: a message that can't be sent counts, too.
	// Default: 0, no limit.
	Max uint64
	// Copy copies every message, even if the broker could move it: see Replay.
	Copy bool
	// Edit, if not nil, can change each selected message before it is sent. If it returns an
	// error, the message stays in the queue and counts as failed.
	Edit func(*Edit) error
	// Accept lists the warnings that the caller accepts. See [Warning].
	Accept []WarningCode
	// OnProgress, if not nil, is called a few times a second. It must not block.
	OnProgress func(Progress)
}

// ReplayReport is the result of a replay.
type ReplayReport struct {
	// ID is the replay's ID: ReplayConfig.ID or the generated one.
	ID     string `json:"id"`
	DryRun bool   `json:"dry_run,omitempty"`
	// Seen is the number of messages that the last scan read. Messages that an earlier scan
	// replayed are no longer in the queue.
	Seen uint64 `json:"seen"`
	// Matched is the number of selected messages: those replayed, those that a dry run
	// would replay, and those that failed.
	Matched uint64 `json:"matched"`
	// Replayed is the number of messages that were moved, or whose copy is confirmed and
	// whose original is removed from the queue.
	Replayed uint64 `json:"replayed"`
	// Moved is how many of them the broker moved without a copy, or would move in a dry run.
	Moved uint64 `json:"moved,omitempty"`
	// Again is the number of messages that match but have been in this replay before. They
	// were dead-lettered again, and stay in the queue.
	Again uint64 `json:"again,omitempty"`
	// Failed is the number of messages that couldn't be sent and stay in the queue. Failures
	// has the first 20 of them. A dry run counts messages whose destination doesn't exist, and
	// messages that can't be decoded.
	Failed   uint64    `json:"failed"`
	Failures []Failure `json:"failures,omitempty"`
	// Hidden is how many of the failed messages weren't copied since they may have headers that
	// the copy would lack: see [WarningHeaders].
	Hidden uint64 `json:"hidden,omitempty"`
	// Unknown is the number of messages whose outcome is unknown, since the connection was
	// lost too early. A message that was being copied may exist twice. One that was being
	// moved is either in its work queue or still in the dead-letter queue.
	Unknown uint64 `json:"unknown,omitempty"`
	// Groups counts the selected messages by group, the largest first, at most 100. Others
	// counts the messages of all other groups.
	Groups []Group `json:"groups,omitempty"`
	Others uint64  `json:"others,omitempty"`
	// Scans is the number of scans. It is above 1 after a lost connection, after a scan that
	// took longer than 15 minutes, and after a scan that restored the queue's order.
	Scans int `json:"scans"`
	// Complete reports whether the last scan read all messages of the queue. It is false if Unread
	// isn't empty.
	Complete bool `json:"complete"`
	// Warnings are the warnings about reading the queue. Unread says why messages may be
	// missing: when the last scan reached the queue's end, other consumers were there, or
	// messages waited for their delivery time. It is empty if the replay read every message, if it
	// didn't read to the end, and if WarningConsumers and WarningWaiting are accepted.
	Warnings []Warning `json:"warnings,omitempty"`
	Unread   string    `json:"unread,omitempty"`
	// Took is how long the replay took. In JSON it is in nanoseconds.
	Took time.Duration `json:"took"`
}

// Failure is a message that couldn't be replayed. ID is the ID of its [Summary], Target the
// address it was meant for, and Err the reason.
type Failure struct {
	ID        string `json:"id"`
	MessageID string `json:"message_id,omitempty"`
	Target    string `json:"target,omitempty"`
	Err       string `json:"error"`
}

const (
	maxFailures = 20
	// maxFailed is how many failed messages a replay remembers, to skip them in later scans.
	maxFailed = 100_000
	// fruitless is how many scans in a row may be lost without replaying a message.
	fruitless = 8
	// startLimit is how long a broker that was unreachable may refuse what it can't do yet: a
	// virtual host or a queue may be up later than the listener.
	startLimit = 2 * time.Minute
)

// Replay sends the selected messages of a queue back to where they came from, as new
// messages: the retry count, the first failure, and the delivery time start over. All other
// messages stay in the queue, in order. Use it after the cause of the failures is fixed; a
// dry run counts the messages first.
//
// A copy of a message that was published over AMQP 0-9-1 lacks its headers that hold tables or
// arrays, since RabbitMQ shows them to no AMQP 1.0 client. So a message that may be one isn't
// copied, and counts as failed, unless Accept lists WarningHeaders.
//
// By default, Replay publishes a copy of each message, and acknowledges the original only
// after the broker has confirmed the copy. A crash in between can duplicate a message; it
// can't lose one.
//
// With [retry.Policy.ReplayByMove] in the topology, the broker moves the messages instead, at
// least once. Nothing is published, and a lost connection duplicates nothing. Replay still
// copies a message if any of these is true:
//
//   - It doesn't go to its work queue, or the work queue has a maximum length.
//   - Its delivery-count is above 0, for example since a worker rejected it. RabbitMQ keeps the
//     count. If the message may have headers that a copy would lack, it is moved all the same, up
//     to a count of half of the work queue's delivery limit.
//   - It has an x-retry-count, or is held until a delivery time in the future.
//   - ReplayConfig.Edit or Copy is set.
//
// Replay continues after a lost connection, and waits for an unreachable broker until ctx ends. If the process is killed, the broker requeues
// the held messages in order. If ctx ends, Replay stops and returns ctx's cause: the
// originals of confirmed copies are acknowledged, and all other messages stay in the queue.
// To continue, call Replay again with the same ID.
//
// A replayed message doesn't expire: RabbitMQ removes its sender's expiration when it dead-letters
// the message.
//
// The report is valid even with an error. The errors are those of [Desk.List] except
// [context.DeadlineExceeded]: after 15 minutes a replay requeues its messages and scans
// again.
func (d *Desk) Replay(ctx context.Context, cfg ReplayConfig) (ReplayReport, error) {
	began := time.Now()
	if err := cfg.check(); err != nil {
		return ReplayReport{}, err
	}
	notify := notifier{notify: cfg.OnProgress}
	t, leave, err := d.enter(ctx, cfg.Queue, cfg.Accept, &notify)
	if err != nil {
		return ReplayReport{}, err
	}
	defer leave()
	if t.alarm {
		return ReplayReport{}, blocked("replay", cfg.Queue, "end the alarm first; reading, exporting, and discarding work during it")
	}
	r := &replay{
		d: d, cfg: cfg, match: cfg.Filter.matcher(), of: t.Messages, notify: notify,
		waysBack: map[string]int64{}, failed: map[string]bool{}, refused: map[string]error{}, known: map[string]bool{}, groups: newTally(maxGroups),
		feeding: map[string]*feeding{},
		report:  ReplayReport{ID: cfg.ID, DryRun: cfg.DryRun, Warnings: t.Warnings},
	}
	if info, err := declare.Inspect(ctx, d.conn.Management(), cfg.Queue); err == nil {
		r.wayOut = wayOut(info)
	}
	err = r.run(ctx)
	report := r.report
	report.Groups, report.Others = r.groups.top(100)
	report.Took = time.Since(began)
	return report, err
}

func (c *ReplayConfig) check() error {
	at := argument.Root("ReplayConfig")
	switch {
	case c.Filter.everything() && !c.All:
		return argument.At(at.Field("Filter"), argument.CodeMissing, nil, "selects all messages", "set All if you mean that, or narrow the Filter")
	case len(c.ID) > maxWord || !utf8.ValidString(c.ID):
		return argument.At(at.Field("ID"), argument.CodeTooLong, c.ID, "is over 100 bytes or not valid UTF-8", "use a short name")
	case len(c.By) > maxWord || !utf8.ValidString(c.By):
		return argument.At(at.Field("By"), argument.CodeTooLong, c.By, "is over 100 bytes or not valid UTF-8", "use a short name")
	case !(c.Rate >= 0) || c.Rate > 1e9:
		return argument.At(at.Field("Rate"), argument.CodeOutOfRange, fmt.Sprint(c.Rate), "is out of range", "use the number of messages per second, or 0 for no limit")
	}
	if !c.Address.IsZero() {
		if err := c.Address.Validate(); err != nil {
			return err
		}
		if c.Address == address.Queue(c.Queue) {
			return argument.At(at.Field("Address"), argument.CodeConflict, c.Queue, "is the queue that you replay from", "use another address")
		}
	}
	if c.ID == "" {
		c.ID = "replay-" + time.Now().UTC().Format("20060102-150405-") + strings.ToLower(rand.Text()[:6])
	}
	return c.Filter.check()
}

// replay is a Replay that is running.
type replay struct {
	d      *Desk
	cfg    ReplayConfig
	match  *matcher
	of     uint64
	notify notifier
	next   time.Time // when the rate allows another message
	turns  int       // scans that stopped to restore the queue's order

	refused map[string]error    // addresses that the broker refuses, and why
	known   map[string]bool     // addresses that a sender has attached to
	feeding map[string]*feeding // by the names of an exchange and a queue

	wayOut   string           // the exchange that moves messages, or ""
	waysBack map[string]int64 // queues that it moves them to, and the largest delivery count

	mu       sync.Mutex
	report   ReplayReport
	failed   map[string]bool // by ID
	groups   *tally
	sent     uint64 // messages that are replayed or in flight
	lost     uint64 // copies without an answer on a lost connection
	accepted uint64 // originals accepted since the broker last showed that it had read everything
	moving   uint64 // messages moved since then
}

// run scans the queue until one scan completes.
func (r *replay) run(ctx context.Context) error {
	lost := 0             // scans in a row that were lost without replaying a message
	var outside time.Time // when the broker was last unreachable
	for try := range backoff.Tries(ctx, pauses.Pause) {
		before := r.report.Replayed
		r.report.Scans++
		again, err := r.pass(ctx)
		if ctx.Err() != nil && (again || err != nil) {
			break
		}
		if err == nil && !again {
			return nil
		}
		if r.report.Replayed > before || err == nil {
			try.Worked()
			lost = 0
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, client.ErrUnreachable):
			// It restarts, or the network is down. That is no scan's fault, and takes as long
			// as it takes.
			lost, outside = 0, time.Now()
		case errors.Is(err, client.ErrConnectionLost), errors.As(err, new(*client.Error)) && !outside.IsZero() && time.Since(outside) < startLimit:
			if lost++; lost > fruitless {
				return err
			}
		default:
			return err
		}
		r.d.log.Warn("hopback: the connection was lost during a replay; reconnecting to continue", "queue", r.cfg.Queue, "replay", r.cfg.ID, "replayed", r.report.Replayed, "error", err)
	}
	return context.Cause(ctx)
}

// errHeld stops a scan that has held its messages for maxHold.
var errHeld = errors.New("messages were held for the maximum time")

// pass scans the queue once. again reports whether another scan is needed.
func (r *replay) pass(ctx context.Context) (again bool, err error) {
	r.report.Seen, r.report.Again = 0, 0
	if r.cfg.DryRun {
		r.report.Matched, r.report.Moved, r.report.Failed, r.report.Hidden, r.report.Failures = 0, 0, 0, 0, nil
		clear(r.failed)
		r.groups = newTally(maxGroups)
	}
	w, err := r.d.begin(ctx, r.cfg.Queue)
	if err != nil {
		return false, err
	}
	w.passed, w.accept = r.progressOf, r.cfg.Accept
	out := newOutbox(r.d)
	defer out.close()
	for more := true; more && err == nil; {
		n := batch
		if r.cfg.Rate > 0 { // all requested messages are held until they are read
			n = int(max(min(r.cfg.Rate, batch), 10))
		}
		more, err = w.next(ctx, n, func(v dedicated.Delivery, l *deadLetter) error { return r.visit(ctx, w, out, v, l) })
		if errors.Is(err, errTurned) && r.turns >= maxTurns {
			err = nil
		}
		if err == nil {
			r.mu.Lock()
			r.certain() // the broker has read everything that was written before its answer
			r.mu.Unlock()
			if !more {
				more = r.d.again(ctx, w)
			}
		}
	}
	// Messages are held for maxHold at most.
	out.wait(ctx, max(time.Until(w.began.Add(maxHold)), answerLimit), r.progress)
	back := w.end()
	r.mu.Lock()
	defer r.mu.Unlock()
	if back != nil {
		r.report.Unknown += r.accepted + r.moving
		r.sent -= r.moving
		r.moving = 0
		err = errors.Join(err, scanError(r.cfg.Queue, back))
	}
	r.certain()
	unanswered := r.lost
	r.lost = 0
	r.report.Unknown += unanswered
	switch {
	case errors.Is(err, errStop) && back == nil && unanswered == 0:
		return false, nil
	case errors.Is(err, errTurned) && back == nil:
		r.turns++
		return true, nil
	case errors.Is(err, errHeld):
		return true, nil
	case err != nil && !errors.Is(err, errStop), back != nil:
		return false, scanError(r.cfg.Queue, err)
	case unanswered > 0:
		return false, scanError(r.cfg.Queue, errUnanswered)
	}
	r.report.Unread, r.report.Complete = w.unread, w.unread == ""
	return false, nil
}

// certain counts what the broker has certainly read. It is called with mu held.
func (r *replay) certain() {
	r.report.Replayed += r.moving
	r.report.Moved += r.moving
	r.accepted, r.moving = 0, 0
}

var errUnanswered = errors.New("the broker didn't confirm all copies")

// visit reads one message, and sends it if it is selected.
func (r *replay) visit(ctx context.Context, w *scan, out *outbox, v dedicated.Delivery, l *deadLetter) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if r.cfg.Max > 0 && r.sending() >= r.cfg.Max {
		return errStop
	}
	if time.Since(w.began) > maxHold {
		return errHeld
	}
	position := int(r.report.Seen)
	r.report.Seen++
	if !r.match.matches(l) {
		r.progress()
		return nil
	}
	if mark := l.replay(); mark != nil && mark.ID == r.cfg.ID {
		r.report.Again++
		return nil
	}
	id := l.id()
	r.mu.Lock()
	failed := r.failed[id]
	r.mu.Unlock()
	if failed {
		return nil
	}
	if r.cfg.DryRun {
		r.selected(l, id)
		to, err := r.target(ctx, l)
		if err == nil {
			err = r.sendable(ctx, to, l)
		}
		var bad *unsendable
		switch {
		case errors.As(err, &bad):
			r.fail(id, l.messageID(), "", bad)
		case err != nil:
		case r.moves(ctx, l, to):
			r.report.Moved++
		default:
			if err := r.copyable(l); err != nil {
				r.fail(id, l.messageID(), "", err)
			}
		}
		r.progress()
		return nil
	}
	err := r.send(ctx, w, out, v, l, id, position)
	var bad *unsendable
	if errors.As(err, &bad) {
		r.selected(l, id)
		r.fail(id, l.messageID(), "", bad)
		return nil
	}
	r.progress()
	return err
}

// sending is how many messages are replayed, in flight, or failed.
func (r *replay) sending() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cfg.DryRun {
		return r.report.Matched
	}
	return r.sent + r.report.Failed
}

func (r *replay) selected(l *deadLetter, id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Matched++
	r.groups.add(l, id)
}

func (r *replay) fail(id, messageID, target string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failedNow(id, messageID, target, err)
}

// failedNow counts a failure. It is called with mu held.
func (r *replay) failedNow(id, messageID, target string, err error) {
	r.report.Failed++
	if errors.Is(err, errHeaders) {
		r.report.Hidden++
	}
	if len(r.failed) < maxFailed {
		r.failed[id] = true
	}
	if len(r.report.Failures) < maxFailures {
		r.report.Failures = append(r.report.Failures, Failure{ID: id, MessageID: cut(messageID, maxPropertyText), Target: target, Err: cut(err.Error(), 500)})
	}
}

func (r *replay) progress() { r.progressOf(r.report.Seen) }

func (r *replay) progressOf(seen uint64) {
	r.mu.Lock()
	p := Progress{Seen: seen, Matched: r.report.Matched, Done: r.report.Replayed + r.moving, Of: r.of}
	r.mu.Unlock()
	r.notify.now(p)
}

// send sends a copy. Its answer settles the original.
func (r *replay) send(ctx context.Context, w *scan, out *outbox, v dedicated.Delivery, l *deadLetter, id string, position int) error {
	to, err := r.target(ctx, l)
	if err != nil {
		return err
	}
	if to == address.Queue(r.cfg.Queue) {
		return &unsendable{errBack}
	}
	target := to.String()
	if err := r.refused[target]; err != nil {
		return &unsendable{err}
	}
	if r.moves(ctx, l, to) {
		return r.move(ctx, w, out, v, l, id, to.QueueName())
	}
	if err := r.there(ctx, to); err != nil {
		return err
	}
	if err := r.copyable(l); err != nil {
		return err
	}
	payload, err := r.copyOf(l, position)
	if err != nil {
		return err
	}
	// If the broker refuses an attach, it may close the session, and confirmations in flight
	// are lost. So nothing is in flight during the first attach to an address.
	if err := r.room(ctx, w, out, len(payload), !r.known[target]); err != nil {
		return err
	}
	if len(r.known) < 10_000 {
		r.known[target] = true
	}
	r.mu.Lock()
	r.sent++
	r.mu.Unlock()
	sendCtx, cancel := context.WithDeadlineCause(ctx, w.began.Add(maxHold), errHeld)
	defer cancel()
	if err := out.send(sendCtx, target, payload, r.answered(w, v.ID, id, l.messageID(), target)); err != nil {
		r.mu.Lock()
		r.sent--
		r.mu.Unlock()
		var no *dedicated.RefusedError
		if errors.As(err, &no) && no.Condition == dedicated.TooLarge {
			return &unsendable{no}
		}
		if errors.As(err, &no) && refuses(no) && len(r.refused) < 1000 {
			r.refused[target] = fmt.Errorf("the broker refuses %s: %w", target, no)
			return &unsendable{r.refused[target]}
		}
		return err
	}
	r.selected(l, id)
	return nil
}

// copyable refuses a message whose copy could lack headers.
func (r *replay) copyable(l *deadLetter) error {
	if slices.Contains(r.cfg.Accept, WarningHeaders) || !l.mayHideHeaders() {
		return nil
	}
	return &unsendable{errHeaders}
}

// copyOf is the copy of l to send, with the edits that the replay makes.
func (r *replay) copyOf(l *deadLetter, position int) ([]byte, error) {
	var edited *Edit
	if r.cfg.Edit != nil {
		edited = l.edited(position)
		if err := r.cfg.Edit(edited); err != nil {
			return nil, &unsendable{err}
		}
		if err := edited.Validate(); err != nil {
			return nil, &unsendable{err}
		}
	}
	return l.renewed(ReplayMark{ID: r.cfg.ID, By: r.cfg.By, At: time.Now()}, edited)
}

// answered returns what the answer to a copy does.
func (r *replay) answered(w *scan, delivery uint32, id, messageID, target string) func(error) {
	return func(err error) {
		var lost *dedicated.LostError
		refused := err != nil && !errors.As(err, &lost)
		if err == nil {
			// If this can't be written, the scan's connection is lost, and the message comes
			// again.
			err = w.r.Accept(delivery, delivery)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		switch {
		case err == nil:
			r.report.Replayed++
			r.accepted++
			return
		case refused:
			r.failedNow(id, messageID, target, err)
		default:
			r.lost++
		}
		r.sent--
	}
}

// refuses reports whether the broker refuses an address, and would refuse it again.
func refuses(no *dedicated.RefusedError) bool {
	switch condition.OfLink(no.Condition, no.Text) {
	case client.ErrNotFound, client.ErrUnauthorized, client.ErrRefused:
		return true
	}
	return false
}

// sendable is why a dry run counts a message as failed, or nil.
func (r *replay) sendable(ctx context.Context, to address.Address, l *deadLetter) error {
	switch {
	case to == address.Queue(r.cfg.Queue):
		return &unsendable{errBack}
	case l.bad != nil:
		return &unsendable{l.bad}
	case r.refused[to.String()] != nil:
		return &unsendable{r.refused[to.String()]}
	}
	err := r.there(ctx, to)
	if err == nil && len(r.known) < 10_000 {
		r.known[to.String()] = true
	}
	return err
}

var errBack = errors.New("it would go back to the queue that it is in; set another address")

// there checks once whether a queue exists: RabbitMQ 4.0 closes the session after an attach
// to a queue that doesn't.
func (r *replay) there(ctx context.Context, to address.Address) error {
	if !to.IsQueue() || r.known[to.String()] {
		return nil
	}
	_, err := declare.Inspect(ctx, r.d.conn.Management(), to.QueueName())
	if errors.Is(err, declare.ErrNotFound) && len(r.refused) < 1000 {
		r.refused[to.String()] = fmt.Errorf("the queue %q doesn't exist", to.QueueName())
		return &unsendable{r.refused[to.String()]}
	}
	return nil // any other problem shows in the attach
}

// room waits until the rate allows another message and the copies in flight leave room for
// it. With alone, it waits until none is in flight.
func (r *replay) room(ctx context.Context, w *scan, out *outbox, size int, alone bool) error {
	ctx, cancel := context.WithDeadlineCause(ctx, w.began.Add(maxHold), errHeld)
	defer cancel()
	if r.cfg.Rate > 0 {
		now := time.Now()
		if wait := r.next.Sub(now); wait > 0 {
			if !backoff.Sleep(ctx, wait) {
				return context.Cause(ctx)
			}
			now = time.Now()
		}
		if r.next.Before(now.Add(-time.Second)) {
			r.next = now
		}
		r.next = r.next.Add(time.Duration(float64(time.Second) / r.cfg.Rate))
	}
	return out.room(ctx, size, alone, out.done())
}
