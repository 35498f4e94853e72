// Package mark has the errors by which a handler says how its failure is to be
// retried, and reads them. Package retry makes and obeys them; other middleware
// looks at them to tell a bad message from an outage.
package mark

import (
	"errors"
	"fmt"
	"time"
)

// Permanent is retry.Permanent's error.
type Permanent struct{ Err error }

func (e *Permanent) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *Permanent) Unwrap() error { return e.Err }

// After is the error of retry.After, and of retry.Snooze if Snooze is set.
type After struct {
	Delay  time.Duration
	Err    error
	Snooze bool
}

func (e *After) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("retry after %v", e.Delay)
	}
	return e.Err.Error()
}

// Unwrap returns Err.
func (e *After) Unwrap() error { return e.Err }

// Discard is retry.Discard's error.
type Discard struct{ Err error }

func (e *Discard) Error() string {
	if e.Err == nil {
		return "discarded"
	}
	return "discarded: " + e.Err.Error()
}

// Unwrap returns Err.
func (e *Discard) Unwrap() error { return e.Err }

// Kind is what an error asks for.
type Kind int8

// The kinds, by precedence: of errors that are joined the highest counts. So the
// kind that loses the message never wins.
const (
	IsDiscard Kind = iota - 1
	IsPlain        // a failure without a mark
	IsAfter        // also Snooze
	IsPermanent
	IsDecided // an outcome
)

// Verdict is what an error says about its message.
type Verdict struct {
	Kind Kind
	// After is set if Kind is IsAfter.
	After *After
	// Decided is the outcome, if Kind is IsDecided or After is around one.
	Decided error
	// Unreadable says that looking into the error panicked, or found no end.
	Unreadable bool
}

// Plain says whether the error is a failure without any mark.
func (v Verdict) Plain() bool { return v.Kind == IsPlain }

// Outage says whether the error can tell of something that is down, rather than of
// this one message or of nothing that has failed.
func (v Verdict) Outage() bool {
	return v.Kind == IsPlain || v.Kind == IsAfter && !v.After.Snooze && v.Decided == nil
}

// maxParts bounds how many errors are looked at: one may unwrap to itself.
const maxParts = 10_000

// Read looks at err and all that it wraps. An error that is around another counts,
// with these exceptions: Permanent counts inside After, and an outcome of the type O
// inside Permanent and Discard. It isn't looked into.
//
// An error that can't be read, such as a nil pointer whose Unwrap method panics, is
// a failure without a mark.
func Read[O error](err error) Verdict {
	r := reader{decided: is[O], left: maxParts}
	v := r.read(err)
	v.Unreadable = r.bad
	return v
}

func is[O error](err error) bool {
	_, ok := err.(O)
	return ok
}

type reader struct {
	decided func(error) bool
	left    int
	bad     bool
}

func (r *reader) read(err error) Verdict {
	if err == nil {
		return Verdict{Kind: IsPlain}
	}
	if r.left--; r.left < 0 {
		r.bad = true
		return Verdict{Kind: IsPlain}
	}
	if r.decided(err) {
		return Verdict{Kind: IsDecided, Decided: err}
	}
	switch e := err.(type) {
	case *Permanent:
		if v := r.read(e.Err); v.Kind == IsDecided {
			return v
		}
		return Verdict{Kind: IsPermanent}
	case *Discard:
		if v := r.read(e.Err); v.Kind == IsDecided {
			return v
		}
		return Verdict{Kind: IsDiscard}
	case *After:
		v := r.read(e.Err)
		if v.Kind == IsPermanent {
			return v
		}
		return Verdict{Kind: IsAfter, After: e, Decided: v.Decided}
	}
	many, one := r.unwrap(err)
	if one != nil {
		return r.read(one)
	}
	v, first := Verdict{Kind: IsPlain}, true
	for _, e := range many {
		if e == nil {
			continue
		}
		if next := r.read(e); first || next.Kind > v.Kind {
			v, first = next, false
		}
	}
	return v
}

// unwrap survives methods that panic.
func (r *reader) unwrap(err error) (many []error, one error) {
	defer func() {
		if recover() != nil {
			r.bad = true
		}
	}()
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return nil, e.Unwrap()
	case interface{ Unwrap() []error }:
		return e.Unwrap(), nil
	}
	return nil, nil
}

// probe is an error that nothing wraps.
type probe struct{ _ byte }

func (*probe) Error() string { return "probe" }

var nothing = &probe{}

// Answers says whether errors.Is and errors.As can look for something in err
// without a panic. Call it for an error that Read has found to have an end.
func Answers(err error) (ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	_ = errors.Is(err, nothing)
	_, _ = errors.AsType[*probe](err)
	return true
}
