package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/grace"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/refusal"
)

// Consume calls h for the messages of a stream, one at a time and in the order of their offsets.
// It starts at the saved position, or at [Config.From] if there is none.
//
// When ctx is canceled, Consume finishes the current message within [Config.Grace], saves the
// position, and returns nil. If the connection is lost or the stream's leader moves, it
// reconnects, with unlimited backoff, and continues after the last handled message.
//
// During a memory or disk alarm Consume starts as soon as the messages show that it is a stream. An empty
// stream waits for the end of the alarm.
//
// The handler's result decides:
//
//	nil, a Discard                handled: the position advances
//	a client.Forward              the copy is published; handled once it is confirmed, however
//	                              long that takes. Its Else applies if it can never be sent
//	a client.DeadLetter, a Modify with DeadLetter, a Permanent, a panic, a runtime.Goexit
//	                              not retried: see Config.Failed
//	a Snooze, a client.Requeue or Modify that hasn't failed
//	                              handled again after a pause, and not counted
//	any other error               handled again, after the pause of an After or else of
//	                              Config.Backoff, up to Config.Attempts times, unless one of
//	                              Config.Rules or Config.GiveUpAfter decides otherwise
//
// So a handler's result means the same as with retry.With, with two differences. The annotations
// of a Modify without DeadLetter are lost, because a stream's messages can't be changed. A result
// that the handler returns after its ctx was canceled at the end of Config.Grace isn't carried
// out: the next consumer handles the message again.
//
// Errors; those marked with * are returned only at the start:
//
//	*argument.Error*     conn, stream, h, or cfg is invalid; for example h is a handler of
//	                     package batch, or stream isn't a stream
//	the error of h's Prepare*: retry.With refuses a stream with a *retry.GuardError
//	*FilterError         the broker doesn't apply a filter
//	*PositionError       the position is beyond the end of the stream, or in another stream of
//	                     its name
//	*HandlerError        a message isn't retried any more, and Config.Failed is FailedStop
//	*SaveError           the position can't be read*, or can't be saved at the start* or
//	                     at the end
//	client.ErrNotFound   the stream is missing, or at the start Config.FailedQueue is
//	client.ErrUnauthorized*, client.ErrRefused*
//	client.ErrClosed     conn was closed
//
// After a crash, messages that were handled but whose position wasn't saved are handled again:
// see [Config.SaveEvery]. None is skipped.
func Consume(ctx context.Context, conn *client.Conn, stream string, h client.Handler, cfg Config) error {
	source, cfg, err := check(conn, stream, h, cfg)
	if err != nil {
		return err
	}
	ctx, end := refusal.Context(ctx)
	lines := loglines.NewRepeats(cfg.Logger.Handler())
	defer lines.Flush()
	cfg.Logger = slog.New(lines)
	k := &consumer{conn: conn, owner: inside.Of(conn), stream: stream, source: source, handler: h, cfg: cfg, log: cfg.Logger.With("stream", stream)}
	return end(k.consume(ctx))
}

func check(conn *client.Conn, stream string, h client.Handler, cfg Config) (string, Config, error) {
	if conn == nil {
		return "", cfg, argument.At(argument.Root("conn"), argument.CodeMissing, nil, "is nil", "use a connection from client.Connect")
	}
	if f, ok := h.(client.HandlerFunc); h == nil || ok && f == nil {
		return "", cfg, argument.At(argument.Root("handler"), argument.CodeMissing, nil, "is nil", "pass a handler, such as client.JSON(func(ctx, order) error {...})")
	}
	source, err := address.Queue(stream).Build()
	if err != nil {
		return "", cfg, err
	}
	cfg, err = cfg.withDefaults()
	return source, cfg, err
}

// consumer is one call of Consume.
type consumer struct {
	conn    *client.Conn
	owner   inside.Conn[*client.Delivery]
	stream  string
	source  string // its address
	handler client.Handler
	cfg     Config
	log     *slog.Logger

	broker client.Broker
	saver  *saver
	counts numbers
	began  time.Time
	// behind is the index of the endpoint to connect to, after the Conn's. A node can be up and
	// not serve the stream for a long time.
	behind int
	// beyondSince is since when k.at is beyond the end of each replica that was asked; zero: it isn't.
	beyondSince time.Time
	// silence is how long it receives nothing before it looks whether messages are ready; 0: the
	// shortest time.
	silence time.Duration

	// The worker's.
	at               Offset   // where to start or continue
	exited           *failure // whose handler has terminated the worker's goroutine
	saved            bool     // at was saved, or isn't ahead of the handled messages
	mark             mark     // of a message before at
	gaps             gaps
	failed, forwards *client.Publisher[*client.Message] // nil: none yet
}

func (k *consumer) consume(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	closing := make(chan struct{})
	defer close(closing)
	go func() {
		select {
		case <-k.owner.Closed():
			cancel(client.ErrClosed)
		case <-closing:
		}
	}()
	k.counts.stream, k.counts.prefetch, k.counts.since = k.stream, k.cfg.Prefetch, time.Now()
	defer k.owner.Join(k.counts.count)()
	if err := k.start(ctx); err != nil || ctx.Err() != nil {
		return k.result(ctx, err)
	}
	k.saver = newSaver(k.stream, k.cfg)
	handlerCtx, hard := context.WithCancelCause(context.WithoutCancel(ctx))
	defer hard(context.Canceled)
	ended := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() { ended <- time.Now() })

	slots := make(chan struct{}, 1) // the worker holds it
	slots <- struct{}{}
	result := make(chan error, 1)
	go func() {
		err := k.workOn(ctx, handlerCtx)
		k.gaps.end()
		result <- err
		cancel(nil)
		<-slots
	}()
	grace.Await(slots, nil, <-ended, k.cfg.Grace, hard)
	var err error
	select {
	case err = <-result:
		k.closePublishers()
	default:
		k.log.Warn("hopback: the handler of a stream consumer ignores that its ctx is canceled; the next consumer handles its message again. Make the handler return when its ctx is done")
	}
	return k.result(ctx, errors.Join(err, k.saver.close()))
}

// result is what Consume returns.
func (k *consumer) result(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), client.ErrClosed) && (err == nil || ctx.Err() != nil && errors.Is(err, context.Canceled)) {
		return &client.Error{Op: "consume", Target: k.stream, Kind: client.ErrClosed}
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok && len(joined.Unwrap()) == 1 {
		return joined.Unwrap()[0]
	}
	return err
}

// closePublishers is called when the worker has stopped. Everything important was confirmed.
func (k *consumer) closePublishers() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	for _, p := range []*client.Publisher[*client.Message]{k.failed, k.forwards} {
		if p != nil {
			_ = p.Close(ctx)
		}
	}
}

const closeTimeout = 5 * time.Second

// start checks the broker and the stream, and finds the start offset. It returns nil if ctx is
// done.
func (k *consumer) start(ctx context.Context) error {
	if err := k.owner.Start(ctx, k.stream, func() error { return k.peek(ctx) }); err != nil && ctx.Err() == nil {
		return err
	}
	if ctx.Err() != nil {
		return nil
	}
	if name, since := k.cfg.Filter.needs(oldbroker.Of(k.broker.AtLeast)); name != "" {
		return &FilterError{Filter: name, Since: since, Broker: k.broker}
	}
	k.at, k.began = k.cfg.From, time.Now()
	if k.cfg.Offsets != nil {
		n, m, found, err := k.cfg.load(ctx, k.stream)
		if err == nil && found && n > maxOffset {
			err = fmt.Errorf("%d isn't an offset", n)
		}
		if err != nil && ctx.Err() == nil {
			return &SaveError{Stream: k.stream, Consumer: k.cfg.Consumer, Err: err}
		}
		if found {
			k.at, k.mark, k.saved = At(n), m, true
		}
	}
	if k.cfg.Failed == FailedForward {
		if _, err := k.publisherTo(ctx, address.Queue(k.cfg.FailedQueue)); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// oneHandler refuses handlers whose calls wait for each other, such as those of package
// batch: each message would wait for others that can't come.
func oneHandler(n int) error {
	if n > 1 {
		return argument.New("handler", n, "needs several messages at once, and a stream consumer handles them one at a time", "set the batch's Size and Parallel to 1, or copy the messages to a queue for it")
	}
	return nil
}

// work consumes until ctx is done or an error is final.
func (k *consumer) work(ctx, handlerCtx context.Context) error {
	attached := false
	for try := range backoff.Tries(ctx, k.owner.Pause) {
		up, err := k.live(ctx, handlerCtx, try)
		attached = attached || up
		if !up {
			k.behind++
		}
		if ctx.Err() != nil || isFinal(err) {
			if errors.Is(err, errDrained) || ctx.Err() != nil && !isFinal(err) {
				return nil
			}
			return err
		}
		err = k.translate(ctx, err)
		k.counts.attached(false, err)
		if errors.Is(err, client.ErrNotFound) || !attached && (errors.Is(err, client.ErrUnauthorized) || errors.Is(err, client.ErrRefused)) {
			return err
		}
		k.log.Warn("hopback: a stream consumer lost its connection; opening another", "error", err, "from", k.at)
	}
	return nil
}

// errDrained reports that ctx is done.
var errDrained = errors.New("drained")

// isFinal reports whether err stops Consume.
func isFinal(err error) bool {
	for _, is := range []func() bool{
		func() bool { _, ok := errors.AsType[*HandlerError](err); return ok },
		func() bool { _, ok := errors.AsType[*FilterError](err); return ok },
		func() bool { _, ok := errors.AsType[*PositionError](err); return ok },
		func() bool { _, ok := errors.AsType[*SaveError](err); return ok },
		func() bool { return errors.Is(err, client.ErrClosed) || errors.Is(err, errDrained) },
	} {
		if is() {
			return true
		}
	}
	return false
}

// translate makes a *client.Error of a raw link's error.
func (k *consumer) translate(ctx context.Context, err error) error {
	e := &client.Error{Op: "consume", Target: k.stream, Kind: client.ErrConnectionLost, Err: err}
	refused, ok := errors.AsType[*dedicated.RefusedError](err)
	if !ok {
		return e
	}
	e.Condition, e.Text, e.Kind = refused.Condition, refused.Text, condition.OfLink(refused.Condition, refused.Text)
	if e.Kind == client.ErrNotFound {
		// A stream whose leader moves looks deleted, too.
		if _, err := declare.Inspect(ctx, k.conn.Management(), k.stream); !errors.Is(err, declare.ErrNotFound) {
			e.Kind = client.ErrConnectionLost
		}
	}
	return e
}

// live consumes over one connection. up reports whether the link was attached.
func (k *consumer) live(ctx, handlerCtx context.Context, try *backoff.Try) (up bool, err error) {
	raw, err := dedicated.OpenFor(ctx, k.owner, "stream", k.behind)
	if err != nil {
		return false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = raw.Close(ctx)
	}()
	attaching := impatient(ctx)
	defer attaching.stop()
	if err := k.resolve(ctx, attaching, raw); err != nil {
		return false, err
	}
	asked := k.cfg.Filter.set(k.at)
	s, err := raw.Subscribe(attaching, k.source, asked, uint32(k.cfg.Prefetch), int64(k.cfg.PrefetchBytes))
	attaching.stop()
	if err != nil {
		return false, err
	}
	if field := missing(asked, s.Filter()); field != "" {
		return false, &FilterError{Filter: field, Broker: k.broker}
	}
	try.Up()
	k.counts.attached(true, nil)
	k.log.Debug("hopback: a stream consumer is attached", "from", k.at)
	quiet := k.listen(ctx)
	defer func() { quiet.stop() }()
	for {
		batch, err := quiet.next(ctx, s)
		if err != nil {
			if errors.Is(err, errStarving) {
				k.behind++ // this node may not serve the stream
			}
			return true, err
		}
		k.silence = 0
		k.counts.delivered.Store(time.Now().UnixNano())
		for i, got := range batch {
			k.counts.ready.Store(int64(len(batch) - i - 1))
			if ctx.Err() != nil {
				return true, errDrained
			}
			if err := k.take(ctx, handlerCtx, got); err != nil {
				return true, err
			}
		}
	}
}
