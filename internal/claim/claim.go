// Package claim claims parked messages by their tokens, and knows what became of them.
//
// # What RabbitMQ offers
//
// A consumer parks a message: it settles it with modified, a delivery time, and a token. The queue
// holds the message until that time. On any link to the queue, a flow frame with tokens claims the
// messages that are parked under them. The queue delivers those before all others, as far as the
// link's credit reaches. It ignores unknown tokens, and it confirms no settlement. Two answers are
// missing: that nothing is parked under a token, and that a settlement has taken effect.
//
// # How both answers are got
//
// A [Claims] has one link and works in rounds. A round is one flow: settlements are written first,
// then the flow with up to 256 tokens, one more credit than tokens, and drain. RabbitMQ's session passes both on
// to the queue in this order, and the queue answers the drain after it has applied them. On a
// quorum queue, applied means: stored by a majority of the replicas. So the answer to a drain says
//
//   - that every settlement written before it has taken effect, for good;
//   - that all messages parked under the tokens have been delivered, if credit was left or messages
//     of the backlog came: those come after the parked ones. Otherwise another round with more
//     credit follows.
//
// RabbitMQ's client of a quorum queue delays settlements once 32 commands wait for the queue, but not
// flows. So a round writes few settlements, at most maxFrames frames, and the next round begins when
// the drain is answered.
//
// # What comes besides
//
// The credit that is left brings messages of the backlog: one, and one for each token that isn't parked. They
// return to their place at once, and that doesn't count as a failure. A sender can forge the annotation with the token. A
// forged message isn't parked: it is in the backlog. There it can't have a delivery time that is
// still to come, since the queue would hold it until then. So only a message whose delivery time is
// to come is taken for a claimed one, if the broker's clock is known. One that is due within a second
// isn't taken either: it is parked again, and comes at its time.
//
// # When the link is lost
//
// The queue makes claimed messages ready that weren't settled, as failed deliveries: they aren't
// parked any more, and a consumer gets them. Settlements that weren't written have no effect, and
// those that no drain has confirmed may have had one. Claims that weren't answered are made again on
// the next link. If that finds nothing, the message may be among those that became ready, so the
// answer is an error, and not that none was waiting.
package claim

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/Azure/go-amqp"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

const (
	// maxFrames is how many settlements one round writes, not counting those that join others.
	maxFrames = 16
	// maxTokenBytes is how many bytes of tokens one flow has: it must fit into a frame.
	maxTokenBytes = 32 << 10
	// maxHeld is how many unsettled messages rounds gather before their claims are answered, and
	// maxHeldBytes how many bytes.
	maxHeld      = 2048
	maxHeldBytes = link.PrefetchBytes
	// moreCredit is that of each further round for the same tokens, unless so many messages are likely to
	// exceed maxHeldBytes.
	moreCredit = 256
	// near is how close to its time a message isn't taken any more.
	near = time.Second
)

// Errors of a queue that can't be claimed from.
var (
	// ErrNoTokens: the broker or the queue has no parked messages.
	ErrNoTokens = errors.New("the queue gives out no messages by token")
	// ErrSingleActive: another consumer is the single active one.
	ErrSingleActive = errors.New("the queue has a single active consumer, and gives messages to no other one")
)

// Observer hears what becomes of a Claims' link, and knows the time. Its methods return at once. Attempts count
// since the last link that worked.
type Observer interface {
	// Now is the broker's time; false while it isn't known, as after a reconnect.
	Now() (time.Time, bool)
	// Up reports that there is a link. down is how long there was none.
	Up(attempts int, down time.Duration)
	Lost(attempts int, why error)
	Refused(attempt int, why error)
	Ended(attempts int)
}

// Settings are those of a Claims.
type Settings struct {
	Queue    string
	Source   string // the queue's address
	Sessions link.Sessions
	Backoff  backoff.Exponential
	Observer Observer
	Log      *slog.Logger
}

// Claims claims messages of one queue. Its methods are safe for concurrent use.
type Claims struct {
	Settings
	ctx    context.Context // ends when nothing is waited for any more
	cancel context.CancelFunc
	done   chan struct{}
	first  chan error    // gets the result of the first attach
	wake   chan struct{} // has room for one: there is work

	// ahead is how far the broker's clock was ahead of this host's, if that was ever known. The two
	// of them are for the goroutine that makes rounds.
	ahead time.Duration
	known bool

	mu      sync.Mutex
	refused error // of the last attach
	asked   []*ask
	written []*settlement // to be written, of the current link
	open    int           // claims and messages whose end isn't known
	closing bool
	idle    chan struct{} // closed when open falls to 0 while closing
}

// ask is one claim.
type ask struct {
	token string
	done  chan struct{} // closed when the rest is set
	// Guarded by mu.
	withdrawn bool
	lost      bool // the link was lost when the claim may have been carried out
	found     []*Message
	more      bool
	err       error
}

// Message is a claimed message. It must be settled.
type Message struct {
	*amqp.Message
	of *round
	id uint32
}

// settlement waits to be written, and then to be confirmed.
type settlement struct {
	id    uint32
	d     link.Disposition
	ended func(error) // nil: nobody waits
}

// New returns a Claims that keeps a link open until Close.
func New(s Settings) *Claims {
	c := &Claims{Settings: s, done: make(chan struct{}), first: make(chan error, 1), wake: make(chan struct{}, 1), idle: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	go c.run()
	return c
}

// Await waits for the result of the first attach.
func (c *Claims) Await(ctx context.Context) error {
	select {
	case err := <-c.first:
		return err
	case <-c.done:
		return &failure.Error{Op: "claim", Target: c.Queue, Kind: failure.ErrClosed}
	case <-ctx.Done():
		return failure.Ended("claim", c.Queue, failure.ErrNotSent, ctx)
	}
}

// Claim claims what is parked under token. more says that there may be more messages than are
// returned. If ctx ends first, nothing has changed: what was claimed is parked again.
func (c *Claims) Claim(ctx context.Context, token string) (found []*Message, more bool, err error) {
	a := &ask{token: token, done: make(chan struct{})}
	c.mu.Lock()
	switch {
	case c.closing:
		c.mu.Unlock()
		return nil, false, &failure.Error{Op: "claim", Target: c.Queue, Kind: failure.ErrClosed}
	case c.refused != nil:
		err := c.refused
		c.mu.Unlock()
		return nil, false, err
	}
	c.open++
	c.asked = append(c.asked, a)
	c.mu.Unlock()
	c.nudge()
	select {
	case <-a.done:
	case <-ctx.Done():
		c.mu.Lock()
		if !failure.IsClosed(a.done) {
			a.withdrawn = true
			c.mu.Unlock()
			return nil, false, failure.Ended("claim", c.Queue, failure.ErrNotSent, ctx)
		}
		c.mu.Unlock()
	}
	return a.found, a.more, a.err
}

// Settle settles the message, and waits until that has taken effect for good. The errors:
//
//   - failure.ErrConnectionLost: it had no effect, since the link was lost before, or the broker
//     had taken the message back. The message is ready in its queue.
//   - failure.ErrOutcomeUnknown: it may have had one.
func (m *Message) Settle(ctx context.Context, d link.Disposition) error {
	result := make(chan error, 1)
	c := m.of.c
	m.of.put(&settlement{id: m.id, d: d, ended: func(err error) { result <- err; c.ended(1) }})
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return failure.Ended("claim", c.Queue, failure.ErrOutcomeUnknown, ctx)
	}
}

// Close waits until all claimed messages are settled, or until ctx ends, and closes the link. The
// queue gets back what isn't settled then.
func (c *Claims) Close(ctx context.Context) error {
	c.mu.Lock()
	if !c.closing {
		c.closing = true
		if c.open == 0 {
			close(c.idle)
		}
	}
	c.mu.Unlock()
	var err error
	select {
	case <-c.idle:
	case <-c.done:
	case <-ctx.Done():
		err = failure.Ended("claim", c.Queue, failure.ErrOutcomeUnknown, ctx)
	}
	c.cancel()
	<-c.done
	return err
}

func (c *Claims) ended(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open -= n; c.open == 0 && c.closing && !failure.IsClosed(c.idle) {
		close(c.idle)
	}
}

func (c *Claims) nudge() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// run keeps a link.
func (c *Claims) run() {
	defer close(c.done)
	defer c.fail(&failure.Error{Op: "claim", Target: c.Queue, Kind: failure.ErrClosed})
	var try *backoff.Try
	defer func() { c.Observer.Ended(try.Attempt()) }()
	known, lost := false, time.Now()
	for try = range backoff.Tries(c.ctx, c.Backoff.Pause) {
		r, err := c.attach()
		if c.ctx.Err() != nil {
			if err == nil {
				r.close()
			}
			return
		}
		if !known && !errors.Is(err, failure.ErrConnectionLost) {
			known = true
			c.first <- err
		}
		if err != nil {
			if !errors.Is(err, failure.ErrConnectionLost) {
				c.Observer.Refused(try.Attempt(), err)
				c.refuse(err)
			}
			continue
		}
		try.Up()
		c.refuse(nil)
		c.Observer.Up(try.Attempt(), time.Since(lost))
		why := r.work()
		r.over()
		r.close()
		if why == nil { // the session was worn out
			try.Worked()
			continue
		}
		lost = time.Now()
		if c.ctx.Err() == nil {
			c.Observer.Lost(try.Attempt(), failure.NewError("claim", c.Queue, failure.ErrConnectionLost, why))
		}
	}
}

// refuse notes why there is no link, which fails all claims; nil: there is one.
func (c *Claims) refuse(err error) {
	c.mu.Lock()
	c.refused = err
	c.mu.Unlock()
	if err != nil {
		c.fail(err)
	}
}

// fail ends all claims.
func (c *Claims) fail(err error) {
	c.mu.Lock()
	c.closing = c.closing || c.ctx.Err() != nil
	asked := c.asked
	c.asked = nil
	for _, a := range asked {
		a.err = err
		close(a.done)
	}
	c.mu.Unlock()
	c.ended(len(asked))
}

// attach opens a link. Its error is a *failure.Error.
func (c *Claims) attach() (*round, error) {
	sess, err := c.Sessions.Open(c.ctx)
	if err != nil {
		kind := failure.ErrConnectionLost
		if errors.Is(err, failure.ErrSessionLimit) {
			kind = failure.ErrSessionLimit
		}
		return nil, failure.NewError("claim", c.Queue, kind, err)
	}
	r := &round{c: c, sess: sess, left: map[string]bool{}, held: map[uint32]bool{}, taken: map[uint32]bool{}}
	r.link, err = sess.Receiver(c.ctx, c.Source, link.ReceiverOptions{Events: r, MaxBytes: link.PrefetchBytes})
	if err != nil {
		c.Sessions.Give(sess, link.LinkRefused(err))
		return nil, failure.NewError("claim", c.Queue, link.AttachKind(err), err)
	}
	if !r.link.Claims() {
		r.close()
		return nil, &failure.Error{Op: "claim", Target: c.Queue, Kind: failure.ErrRefused, Text: ErrNoTokens.Error(), Err: ErrNoTokens}
	}
	// The first answer says whether the link is the active one. It has been read by the second.
	for range 2 {
		if err := r.link.Claim(c.ctx, 0, nil, nil); err != nil {
			r.close()
			return nil, failure.NewError("claim", c.Queue, failure.ErrConnectionLost, err)
		}
	}
	if r.inactive.Load() {
		r.close()
		return nil, &failure.Error{Op: "claim", Target: c.Queue, Kind: failure.ErrRefused, Text: ErrSingleActive.Error(), Err: ErrSingleActive}
	}
	return r, nil
}

// now is the broker's time. It is never unknown again, so that a message that wasn't taken since it
// was due soon isn't taken later.
func (c *Claims) now() (now time.Time, known bool) {
	if now, known := c.Observer.Now(); known {
		c.ahead, c.known = time.Until(now), true
	}
	return time.Now().Add(c.ahead), c.known
}

// token is the token that a message was parked under last, and its delivery time.
func token(m *amqp.Message) (token string, at time.Time, ok bool) {
	token, ok = m.Annotations[annotation.DeferralToken].(string)
	ms, timed := m.Annotations[annotation.DeliveryTime].(int64)
	return token, time.UnixMilli(ms), ok && timed
}

// next takes the claims of the next round.
func (c *Claims) next() (all []*ask, tokens []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	bytes, n := 0, 0
	known := map[string]bool{}
	dropped := 0
	for _, a := range c.asked {
		if a.withdrawn {
			dropped++
			n++
			continue
		}
		if !known[a.token] {
			if len(tokens) == engine.MaxClaims || bytes+len(a.token) > maxTokenBytes && len(tokens) > 0 {
				break
			}
			known[a.token] = true
			bytes += len(a.token)
			tokens = append(tokens, a.token)
		}
		all = append(all, a)
		n++
	}
	c.asked = slices.Delete(c.asked, 0, n)
	if c.open -= dropped; c.open == 0 && c.closing && !failure.IsClosed(c.idle) {
		close(c.idle)
	}
	return all, tokens
}

// answer ends claims. The first of several for one token gets the messages.
func (c *Claims) answer(all []*ask, found map[string][]*Message, more bool) (unwanted []*Message) {
	ended := 0
	c.mu.Lock()
	for _, a := range all {
		if !a.withdrawn {
			a.found, a.more = found[a.token], more
			if a.lost && len(a.found) == 0 {
				a.err = &failure.Error{Op: "claim", Target: c.Queue, Kind: failure.ErrConnectionLost, Text: "while the message was claimed; if one was waiting, it is ready in its queue"}
			}
			c.open += len(a.found)
			delete(found, a.token)
			close(a.done)
		}
		ended++
	}
	c.mu.Unlock()
	c.ended(ended)
	for _, ms := range found {
		unwanted = append(unwanted, ms...)
	}
	return unwanted
}

// again has claims be made on the next link. sent says that this link may have carried them out.
func (c *Claims) again(all []*ask, sent bool) {
	c.mu.Lock()
	for _, a := range all {
		a.lost = a.lost || sent
	}
	c.asked = append(all, c.asked...)
	c.mu.Unlock()
}

// byID sorts settlements so that neighbors join.
func byID(a, b *settlement) int { return cmp.Compare(a.id, b.id) }
