package declare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/values"
)

// Apply declares t on the broker: exchanges first, then queues, then bindings, those of one kind
// concurrently, on up to eight sessions if there are many. Use it at startup or in a deploy job. It is idempotent, and several processes may
// run it at once.
//
// Errors:
//
//   - Apply validates everything before it sends anything. If t is invalid, the error joins every
//     *[argument.Error], and the Report is empty. The same holds if t needs a later RabbitMQ than
//     the broker is, where the broker would ignore that: see [QuorumQueue.PlacementTag].
//   - If an exchange or a queue exists with other settings, the error is [ErrConflict], since
//     RabbitMQ can't change them. [Error.Differences] lists every argument that differs, and
//     [Error.Remedies] what you can do.
//   - Otherwise the error joins every *[Error] of the broker.
//
// The Report lists what was done. Apply undoes nothing; you can run it again.
//
//   - Apply inspects the queues first. If one exists with other settings, or if a binding's queue
//     neither exists nor is in t, it declares nothing. AMQP doesn't show exchanges, so a refused
//     exchange can leave other exchanges behind. audit.Compare with a snapshot of the HTTP API
//     finds every conflict without changing anything.
//   - After a refusal Apply finishes resources of the same kind, so one run shows all their
//     conflicts, and doesn't start the next kind.
//   - Apply repeats a request without a reply up to five times. It does the same with a quorum
//     queue that a busy broker couldn't start in time. It stops when none of the requests gets a
//     reply, when a permission is missing, and when ctx is done.
func Apply(ctx context.Context, r Requester, t Topology) (Report, error) {
	p := t.plan()
	if err := errors.Join(checkRequester(r), p.err()); err != nil {
		return Report{}, err
	}
	if err := p.tooNew(r); err != nil {
		return Report{}, err
	}
	r, done := spread(r, len(p.exchanges)+len(p.queues)+len(p.bindings))
	defer done()
	if report, err := p.refusals(ctx, r); err != nil {
		return report, err
	}
	var phases [][]step
	for _, declarations := range [][]Declaration{p.exchanges, p.queues, p.bindings} {
		var steps []step
		for _, d := range declarations {
			steps = append(steps, step{
				resource: d.Resource,
				do:       func(ctx context.Context) (string, error) { return d.send(ctx, r) },
				again:    func(ctx context.Context) (string, error) { return d.sendAgain(ctx, r) },
			})
		}
		phases = append(phases, steps)
	}
	return run(ctx, phases)
}

// Many declarations or deletions are sent on several sessions: RabbitMQ carries out those of one session one
// after the other.
const (
	manyDeclarations = 32
	manySessions     = 8
)

// spread returns a Requester for n resources that uses several sessions, if they are many and r can
// do that. done closes them.
func spread(r Requester, n int) (several Requester, done func()) {
	p, ok := r.(interface {
		Parallel(n int) (request func(ctx context.Context, method, path string, body any) (int, any, error), done func())
	})
	if !ok || n < manyDeclarations {
		return r, func() {}
	}
	request, done := p.Parallel(manySessions)
	return requesterFunc(request), done
}

type requesterFunc func(ctx context.Context, method, path string, body any) (int, any, error)

func (f requesterFunc) Request(ctx context.Context, method, path string, body any) (int, any, error) {
	return f(ctx, method, path, body)
}

// tooNew returns what the broker is known to be too old for, and would ignore.
func (p plan) tooNew(r Requester) error {
	v, ok := r.(interface{ BrokerVersion() string })
	if !ok {
		return nil
	}
	var major, minor int
	version := v.BrokerVersion()
	if n, _ := fmt.Sscanf(version, "%d.%d", &major, &minor); n != 2 {
		return nil
	}
	var errs []error
	for _, d := range p.queues {
		args, _ := d.Body["arguments"].(map[string]any)
		for _, key := range values.SortedKeys(args) {
			if a := queuearg.Known[key]; a.Required && major == 4 && minor < a.Since {
				errs = append(errs, argument.At(names.Label("QuorumQueue", d.Resource.Name).Field(typedQueueArguments[queuearg.Quorum][key]), argument.CodeUnsupported, args[key],
					fmt.Sprintf("needs RabbitMQ 4.%d or later, and the broker is %s, which would ignore it", a.Since, version), "leave it out, or upgrade the broker"))
			}
		}
	}
	return errors.Join(errs...)
}

// refusals inspects the queues before anything is declared, so that a refusal leaves nothing
// behind. Queues that can't be inspected are left to the requests that declare them.
func (p plan) refusals(ctx context.Context, r Requester) (Report, error) {
	all := slices.Concat(p.exchanges, p.queues, p.bindings)
	if len(all) < 2 {
		return Report{}, nil // there is nothing to leave behind
	}
	known := map[string]map[string]any{}
	var names []string
	for _, d := range p.queues {
		known[d.Resource.Name] = nil
		names = append(names, d.Resource.Name)
	}
	ours := len(names)
	for _, d := range p.bindings {
		name, _ := d.Body["destination_queue"].(string)
		if _, ok := known[name]; name != "" && !ok {
			known[name] = nil
			names = append(names, name)
		}
	}
	found := make([]error, len(names))
	bodies := make([]map[string]any, len(names))
	steps := make([]step, len(names))
	for i, name := range names {
		steps[i].do = func(ctx context.Context) (string, error) {
			info, err := Inspect(ctx, r, name)
			if found[i] = err; err == nil {
				bodies[i] = queueBody(info)
			}
			return resultOf(err), err
		}
	}
	runParallel(ctx, steps, make([]Step, len(steps)))
	missing := map[string]bool{}
	for i, name := range names {
		known[name] = bodies[i]
		missing[name] = i >= ours && errors.Is(found[i], ErrNotFound)
	}
	return refusalsOf(ctx, r, all, known, missing)
}

// refusalsOf sends the declarations of queues that exist with other settings: the broker refuses
// each, and explains why.
func refusalsOf(ctx context.Context, r Requester, all []Declaration, known map[string]map[string]any, missing map[string]bool) (Report, error) {
	var report Report
	var errs []error
	for _, d := range all {
		s := Step{Resource: d.Resource, Result: stepNotTried}
		to, _ := d.Body["destination_queue"].(string)
		switch {
		case d.Resource.Kind == kindQueue && known[d.Resource.Name] != nil && len(conflicts(d.Body, known[d.Resource.Name])) > 0:
			if result, err := d.send(ctx, r); result == stepRefused {
				s.Result, s.Err = result, err
			}
		case missing[to]:
			s.Result = stepRefused
			s.Err = &Error{Op: opDeclare, Resource: d.Resource, Method: d.Method, Path: d.Path, Reason: ErrNotFound, Err: fmt.Errorf("queue %q doesn't exist and isn't in the topology", to)}
		}
		if report.Steps = append(report.Steps, s); s.Err != nil {
			errs = append(errs, s.Err)
		}
	}
	return report, errors.Join(errs...)
}

func (d Declaration) send(ctx context.Context, r Requester) (string, error) {
	status, reply, err := request(ctx, r, opDeclare, d.Resource, d.Method, d.Path, d.Body)
	switch {
	case err != nil:
		conflictDetails(ctx, r, d, asError(err))
		return resultOf(err), err
	case d.Resource.Kind != kindQueue:
		return stepDeclared, nil
	case status == 201:
		return stepCreated, nil
	}
	if err := d.unlike(status, reply); err != nil {
		return stepRefused, err
	}
	return stepExisted, nil
}

// sendAgain is send after a request without a reply. It inspects the queue first: another client
// may just be creating it, and on 4.0 that ends the session of every client that declares it at
// the same time. It asks nothing about an exclusive queue: the answer doesn't say whose it is.
func (d Declaration) sendAgain(ctx context.Context, r Requester) (string, error) {
	if d.Resource.Kind == kindQueue && d.Body["exclusive"] != true {
		if info, err := Inspect(ctx, r, d.Resource.Name); err == nil && len(conflicts(d.Body, queueBody(info))) == 0 {
			return stepExisted, nil
		}
	}
	return d.send(ctx, r)
}

// request sends one request and turns everything but a success into an *Error.
func request(ctx context.Context, r Requester, op string, resource Resource, method, path string, body map[string]any) (int, any, error) {
	var payload any // a nil map in an interface wouldn't be nil
	if body != nil {
		payload = body
	}
	status, reply, err := r.Request(ctx, method, path, payload)
	switch {
	case err != nil:
		return 0, nil, &Error{Op: op, Resource: resource, Method: method, Path: path, Reason: ErrNoReply, Err: err}
	case status >= 200 && status < 300:
		return status, reply, nil
	}
	return status, nil, refused(op, resource, method, path, status, reply)
}

func resultOf(err error) string {
	if errors.Is(err, ErrNoReply) || errors.Is(err, ErrBadReply) {
		return stepUnknown
	}
	return stepRefused
}

// step is one thing to do. It is safe to repeat.
type step struct {
	resource Resource
	do       func(context.Context) (string, error)
	// again is for when do got no reply; nil is do.
	again func(context.Context) (string, error)
}

// run does the phases one after the other, and the steps of a phase at the same time, at most
// backoff.RequestsInFlight of them. It returns when no step is in flight any more.
func run(ctx context.Context, phases [][]step) (Report, error) {
	var report Report
	for _, steps := range phases {
		for _, s := range steps {
			report.Steps = append(report.Steps, Step{Resource: s.resource, Result: stepNotTried})
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
		if err := ctx.Err(); err != nil && report.Count(stepNotTried) > 0 {
			return report, stopped(ctx)
		}
	}
	return report, nil
}

// runPhase does the steps at the same time, and then once more, one at a time, those without a
// reply, and the queues that a busy broker couldn't start.
//
// One request can end the session for all that are in flight: one that isn't permitted does, on
// every version, and on 4.0 so does declaring a queue while another session is creating the same
// one. Every step is safe to repeat, so the innocent ones are repeated, and one at a time shows
// which one is to blame. The index of one that never succeeds is returned, or -1.
func runPhase(ctx context.Context, steps []step, results []Step) (blamed int) {
	open := func(s Step) bool { return s.Result == stepUnknown || isUnformed(s.Err) }
	if runParallel(ctx, steps, results) && !slices.ContainsFunc(results, open) {
		return -1
	}
	forbidden := false
	for i := range steps {
		// After a missing permission, continue only with those whose session it may have ended.
		if !open(results[i]) && (results[i].Result != stepNotTried || forbidden) {
			continue
		}
		for n := range backoff.MaxRequests {
			if n > 0 {
				backoff.PauseRequest(ctx, n)
			}
			if ctx.Err() != nil {
				return -1
			}
			do := steps[i].do
			if results[i].Result == stepUnknown && steps[i].again != nil {
				do = steps[i].again
			}
			results[i].Result, results[i].Err = do(ctx)
			if condition.NotPermitted(results[i].Err) {
				results[i].Result, forbidden = stepRefused, true // alone, it is the one that ended the session
			}
			if !open(results[i]) {
				break
			}
		}
		if open(results[i]) {
			return i
		}
	}
	return -1
}

// runParallel reports whether every step that was tried got a reply; it stops starting new ones
// at the first that didn't. Each worker writes to its own slots, so they need no lock.
func runParallel(ctx context.Context, steps []step, results []Step) bool {
	var next atomic.Int64
	var lost atomic.Bool
	var wg sync.WaitGroup
	for range min(backoff.RequestsInFlight, len(steps)) {
		wg.Go(func() {
			for !lost.Load() && ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(steps) {
					return
				}
				results[i].Result, results[i].Err = steps[i].do(ctx)
				if results[i].Result == stepUnknown {
					lost.Store(true)
				}
			}
		})
	}
	wg.Wait()
	return !lost.Load()
}

// failures are the errors of steps. When one step is to blame for lost sessions, the others
// without a reply are only in the Report.
func failures(steps []Step, blamed int) []error {
	var errs []error
	for i, s := range steps {
		if s.Err != nil && (blamed < 0 || i == blamed || s.Result != stepUnknown) {
			errs = append(errs, s.Err)
		}
	}
	return errs
}

// stopped is the error of a run that stopped between two requests.
func stopped(ctx context.Context) error {
	return errors.Join(errStopped, ctx.Err(), cause(ctx))
}

var errStopped = errors.New("hopback: stopped before every request was sent")

// cause is the context's cause where it says more than ctx.Err.
func cause(ctx context.Context) error {
	if c := context.Cause(ctx); !errors.Is(c, ctx.Err()) {
		return c
	}
	return nil
}

func checkRequester(r Requester) error {
	if r == nil {
		return argument.New("Requester", nil, "is nil", "pass conn.Management()")
	}
	return nil
}
