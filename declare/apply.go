package declare

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/argument"
)

// maxInFlight bounds the requests that are under way at once. RabbitMQ gives a
// management link a credit of 8, so more than twice that only waits elsewhere.
const maxInFlight = 16

// maxAttempts is how often a step is tried that gets no reply, see runPhase; the
// pause before an attempt is random, up to attemptPause times the attempt.
const (
	maxAttempts  = 5
	attemptPause = 20 * time.Millisecond
)

// Apply makes the broker have t: exchanges first, then queues, then bindings,
// those of one kind at the same time. It is idempotent, and safe to run from
// several processes at once.
//
// Everything is validated before anything is sent; the error is then every
// *[argument.Error] joined, and the Report is empty.
//
// What is there in another way can't be changed in place, and is refused with
// [ErrConflict]: Error.Differences has every argument that differs, also those
// that the broker itself doesn't compare, and Error.WaysOut what can be done. See
// [Plan] for finding it out before.
//
// After validation, an error is every *[Error] joined. A refusal lets the rest of its kind finish, so that one run shows all
// conflicts of a kind, but keeps Apply from the kinds after it. A request of
// which no reply came is repeated, see [Requester]; when it gets none time
// after time, or for want of a permission, Apply stops, and its error names that one. It stops at once when
// ctx ends. The Report says in either case what was done and what wasn't;
// nothing is undone, and Apply can be run again.
func Apply(ctx context.Context, r Requester, t Topology) (Report, error) {
	p := t.plan()
	if err := errors.Join(checkRequester(r), p.err()); err != nil {
		return Report{}, err
	}
	var phases [][]step
	for _, declarations := range [][]declaration{p.exchanges, p.queues, p.bindings} {
		var steps []step
		for _, d := range declarations {
			steps = append(steps, step{
				thing: d.thing,
				do:    func(ctx context.Context) (Outcome, error) { return d.send(ctx, r) },
				again: func(ctx context.Context) (Outcome, error) { return d.sendAgain(ctx, r) },
			})
		}
		phases = append(phases, steps)
	}
	return run(ctx, phases)
}

func (d declaration) send(ctx context.Context, r Requester) (Outcome, error) {
	status, reply, err := request(ctx, r, opDeclare, d.thing, d.method, d.path, d.body)
	switch {
	case err != nil:
		conflictDetails(ctx, r, d, asError(err))
		return outcomeOf(err), err
	case d.thing.Kind != KindQueue:
		return Declared, nil
	case status == 201:
		return Created, nil
	}
	if err := d.unlike(status, reply); err != nil {
		return Refused, err
	}
	return Existed, nil
}

// sendAgain is send after a request that got no reply. It looks first: somebody
// else may just be creating the queue, which on 4.0 ends the session of whoever
// declares it at the same time.
func (d declaration) sendAgain(ctx context.Context, r Requester) (Outcome, error) {
	if d.thing.Kind == KindQueue {
		if info, err := Inspect(ctx, r, d.thing.Name); err == nil && len(conflicts(d.body, queueBody(info))) == 0 {
			return Existed, nil
		}
	}
	return d.send(ctx, r)
}

// request sends one request and turns everything but a success into an *Error.
func request(ctx context.Context, r Requester, op string, thing Thing, method, path string, body map[string]any) (int, any, error) {
	var payload any // a nil map in an interface wouldn't be nil
	if body != nil {
		payload = body
	}
	status, reply, err := r.Request(ctx, method, path, payload)
	switch {
	case err != nil:
		return 0, nil, &Error{Op: op, Thing: thing, Method: method, Path: path, Reason: ErrNoReply, Err: err}
	case status >= 200 && status < 300:
		return status, reply, nil
	}
	return status, nil, refused(op, thing, method, path, status, reply)
}

func outcomeOf(err error) Outcome {
	if errors.Is(err, ErrNoReply) || errors.Is(err, ErrBadReply) {
		return Unknown
	}
	return Refused
}

// step is one thing to do. It is safe to repeat.
type step struct {
	thing Thing
	do    func(context.Context) (Outcome, error)
	// again is for when do got no reply; nil is do.
	again func(context.Context) (Outcome, error)
}

// run does the phases one after the other, and the steps of a phase at the same
// time, at most maxInFlight of them. It returns when nothing is under way any
// more.
func run(ctx context.Context, phases [][]step) (Report, error) {
	var report Report
	for _, steps := range phases {
		for _, s := range steps {
			report.Steps = append(report.Steps, Step{Thing: s.thing})
		}
	}
	at := 0
	for _, steps := range phases {
		results := report.Steps[at : at+len(steps)]
		at += len(steps)
		blamed := runPhase(ctx, steps, results)
		if errs := failures(results, blamed); len(errs) > 0 {
			return report, errors.Join(errs...)
		}
		if err := ctx.Err(); err != nil && report.Count(NotTried) > 0 {
			return report, stopped(ctx)
		}
	}
	return report, nil
}

// runPhase does the steps at the same time, and then once more, one at a time,
// those that got no reply.
//
// One request can end the session for all that are under way: one that isn't
// permitted does, on every version, and on 4.0 so does declaring a queue while
// another session is creating the same one. Every step is safe to repeat, so
// the innocent ones are, and one at a time shows which one is to blame: its
// index is returned, or -1.
func runPhase(ctx context.Context, steps []step, results []Step) (blamed int) {
	if runParallel(ctx, steps, results) {
		return -1
	}
	for i := range steps {
		if o := results[i].Outcome; o != Unknown && o != NotTried {
			continue
		}
		for attempt := range maxAttempts {
			if attempt > 0 {
				pause(ctx, attempt)
			}
			if ctx.Err() != nil {
				return -1
			}
			do := steps[i].do
			if results[i].Outcome == Unknown && steps[i].again != nil {
				do = steps[i].again
			}
			results[i].Outcome, results[i].Err = do(ctx)
			if results[i].Outcome != Unknown || notPermitted(results[i].Err) {
				break
			}
		}
		if results[i].Outcome == Unknown {
			return i
		}
	}
	return -1
}

// pause waits a random while, so that those who got into each other's way don't
// again.
func pause(ctx context.Context, attempt int) {
	timer := time.NewTimer(rand.N(attemptPause * time.Duration(attempt)))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// notPermitted tells by the broker's words that asking again is of no use: a
// missing permission has no status of its own, but ends the session.
func notPermitted(err error) bool {
	return err != nil && strings.Contains(err.Error(), "refused for user")
}

// runParallel reports whether every step that was tried got a reply; it stops
// starting new ones at the first that didn't. Each worker writes to slots of
// its own, so they need no lock.
func runParallel(ctx context.Context, steps []step, results []Step) bool {
	var next atomic.Int64
	var lost atomic.Bool
	var wg sync.WaitGroup
	for range min(maxInFlight, len(steps)) {
		wg.Go(func() {
			for !lost.Load() && ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(steps) {
					return
				}
				results[i].Outcome, results[i].Err = steps[i].do(ctx)
				if results[i].Outcome == Unknown {
					lost.Store(true)
				}
			}
		})
	}
	wg.Wait()
	return !lost.Load()
}

// failures are the errors of steps. When one step is to blame for lost sessions,
// the others that have no reply are left to the Report.
func failures(steps []Step, blamed int) []error {
	var errs []error
	for i, s := range steps {
		if s.Err != nil && (blamed < 0 || i == blamed || s.Outcome != Unknown) {
			errs = append(errs, s.Err)
		}
	}
	return errs
}

// stopped is the error of a run that ended between two requests.
func stopped(ctx context.Context) error {
	return errors.Join(errStopped, ctx.Err(), cause(ctx))
}

var errStopped = errors.New("hopback: stopped before everything was sent")

// cause is the context's cause where it says more than ctx.Err.
func cause(ctx context.Context) error {
	if c := context.Cause(ctx); !errors.Is(c, ctx.Err()) {
		return c
	}
	return nil
}

func checkRequester(r Requester) error {
	if r == nil {
		return argument.New("Requester", nil, "is nil", "give the management of a connection")
	}
	return nil
}
