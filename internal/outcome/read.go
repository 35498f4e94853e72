package outcome

import "errors"

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

// Outage reports whether the error can mean that something is down, rather than that this one
// message failed or that nothing did.
func (v Verdict) Outage() bool {
	return v.Kind == IsPlain || v.Kind == IsAfter && !v.After.Snooze && v.Decided == nil
}

// Find is errors.AsType for errors of users: one whose methods panic is passed over, and one
// that unwraps to itself has an end.
func Find[T error](err error) (T, bool) {
	return find[T](&reader{left: maxParts}, err)
}

func find[T error](r *reader, err error) (none T, ok bool) {
	for err != nil && r.step() {
		if e, ok := as[T](r, err); ok {
			return e, true
		}
		many, one := r.unwrap(err)
		for _, part := range many {
			if e, ok := find[T](r, part); ok {
				return e, true
			}
		}
		err = one
	}
	return none, false
}

// Read looks at err and all that it wraps. An error that is around another counts,
// with these exceptions: Permanent counts inside After, and an outcome of the type O
// inside Permanent and Discard. The inside of an outcome isn't read.
//
// An error that can't be read, such as a nil pointer whose Unwrap method panics, is
// a failure without a mark.
func Read[O error](err error) Verdict {
	r := reader{left: maxParts}
	r.decided = func(err error) (error, bool) {
		if o, ok := as[O](&r, err); ok {
			return o, true
		}
		return nil, false
	}
	v := r.read(err)
	v.Unreadable = r.bad
	return v
}

// maxParts bounds how many errors are looked at: one may unwrap to itself.
const maxParts = 10_000

type reader struct {
	decided func(error) (error, bool)
	left    int
	bad     bool
}

// step is false when too many errors were looked at.
func (r *reader) step() bool {
	r.left--
	r.bad = r.bad || r.left < 0
	return r.left >= 0
}

// as is what errors.As does with a single error. It survives a method that panics.
func as[T error](r *reader, err error) (T, bool) {
	if e, ok := err.(T); ok {
		return e, true
	}
	if a, ok := err.(interface{ As(any) bool }); ok {
		return asked[T](r, a)
	}
	var none T
	return none, false
}

func asked[T error](r *reader, err interface{ As(any) bool }) (e T, ok bool) {
	defer func() {
		if recover() != nil {
			r.bad, ok = true, false
		}
	}()
	ok = err.As(&e)
	return e, ok
}

func (r *reader) read(err error) Verdict {
	if err == nil {
		return Verdict{Kind: IsPlain}
	}
	if !r.step() {
		return Verdict{Kind: IsPlain}
	}
	if o, ok := r.decided(err); ok {
		return Verdict{Kind: IsDecided, Decided: o}
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
