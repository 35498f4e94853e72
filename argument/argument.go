// Package argument defines [Error], which every hopback package returns for invalid arguments.
//
// Invalid arguments are refused before anything is sent to the broker. So after an *Error,
// nothing has changed there. Use errors.As to tell it from failures of the broker or the
// network:
//
//	var invalid *argument.Error
//	if errors.As(err, &invalid) { ... }
//
// This package is stable: see docs/versions.md#stability.
package argument

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Error says which argument is invalid, what is wrong with it, and what to do instead. Nothing
// was sent when a function returns it.
//
// Go programs print it with its Error method. Other front ends, such as one that reads topology
// files, can write Path and Other in their own form, and choose a remedy by Code if Remedy is
// about Go code. Problem fits all of them.
type Error struct {
	// Path is the argument, as the caller wrote it, such as QuorumQueue("orders").Name.
	Path Path
	// Code is the kind of problem. It is empty for arguments that only Go code can pass.
	Code Code
	// Value is the value that was passed, in printable form and cut to 120 bytes. It may be
	// empty.
	Value string
	// Problem is what is wrong with it, such as "is empty".
	Problem string
	// Other is a second argument that completes Problem, such as the one after "is empty, and so
	// is". It may be empty.
	Other Path
	// Remedy is what to do, as an imperative, such as "give the queue a name".
	Remedy string
	// Err is the cause. It may be nil.
	Err error
}

// Code is a kind of problem with an argument.
type Code string

// The codes.
const (
	// CodeMissing: the argument is required, but empty, nil, or not set.
	CodeMissing Code = "missing"
	// CodeTooLong: it has more bytes or elements, or deeper nesting, than the broker or AMQP
	// allows.
	CodeTooLong Code = "too-long"
	// CodeOutOfRange: the number or duration is too small or too large.
	CodeOutOfRange Code = "out-of-range"
	// CodeNotWhole: the duration isn't a whole number of the required unit.
	CodeNotWhole Code = "not-whole"
	// CodeMalformed: the text has the wrong form, or isn't valid UTF-8.
	CodeMalformed Code = "malformed"
	// CodeReserved: the name is reserved by the broker.
	CodeReserved Code = "reserved"
	// CodeUnknown: it is none of the known values.
	CodeUnknown Code = "unknown"
	// CodeWrongType: a value of this type can't be used here.
	CodeWrongType Code = "wrong-type"
	// CodeConflict: it contradicts another argument, which is Other if that is set, or it must
	// be set there instead.
	CodeConflict Code = "conflict"
	// CodeUnsupported: the broker doesn't support it here.
	CodeUnsupported Code = "unsupported"
)

// valueLimit keeps a huge or hostile value from flooding a log line.
const valueLimit = 120

// New returns an [Error] for an argument that is identified by its name as Go code writes it,
// such as "Config.Timeout". It formats numbers with %v and everything else with %q, and cuts the
// value to 120 bytes. A nil value is omitted.
func New(name string, value any, problem, remedy string) *Error {
	return At(Root(name), "", value, problem, remedy)
}

// At returns an [Error] for the argument at path. value is as in [New].
func At(path Path, code Code, value any, problem, remedy string) *Error {
	return &Error{Path: path, Code: code, Value: printable(value), Problem: problem, Remedy: remedy}
}

// And sets Other, and returns e.
func (e *Error) And(other Path) *Error {
	e.Other = other
	return e
}

// Because sets Err, the cause, which errors.Is and errors.As then find. It returns e.
func (e *Error) Because(err error) *Error {
	e.Err = err
	return e
}

// Error returns the text: the argument, the problem, the cause, and the remedy. It omits what
// Other has in common with Path.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("hopback: ")
	b.WriteString(e.Path.String())
	if e.Value != "" {
		b.WriteString(" = ")
		b.WriteString(e.Value)
	}
	b.WriteString(" ")
	b.WriteString(e.Problem)
	if len(e.Other) > 0 {
		b.WriteString(" ")
		b.WriteString(e.Other.from(e.Path).String())
	}
	if e.Err != nil {
		b.WriteString(" (")
		b.WriteString(e.Err.Error())
		b.WriteString(")")
	}
	if e.Remedy != "" {
		b.WriteString("; ")
		b.WriteString(e.Remedy)
	}
	return b.String()
}

// Unwrap returns the cause, if any.
func (e *Error) Unwrap() error { return e.Err }

// SafeToRetry is always true: nothing was sent.
func (e *Error) SafeToRetry() bool { return true }

// WorthRetrying is always false: the argument stays invalid.
func (e *Error) WorthRetrying() bool { return false }

func printable(value any) string {
	var s string
	switch v := value.(type) {
	case nil:
		return ""
	case bool, int, int8, int16, int32, int64, uint, uint8, uint16, uint32, uint64, float32, float64:
		return fmt.Sprintf("%v", v)
	case fmt.Stringer:
		s = safeString(v)
	case string:
		s = v
	case []byte:
		s = string(v)
	default:
		s = fmt.Sprintf("%T", v)
	}
	return fmt.Sprintf("%q", cut(s, valueLimit))
}

// safeString calls String on a value that may be a typed nil pointer.
func safeString(v fmt.Stringer) (s string) {
	defer func() {
		if recover() != nil {
			s = fmt.Sprintf("%T", v)
		}
	}()
	return v.String()
}

// cut shortens s to at most limit bytes, at the end of a character.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	n := limit
	for n > limit-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
