// Package argument holds the one error type with which every hopback package
// answers bad input.
//
// Bad input is refused before anything is sent to the broker, so whoever
// receives an *Error knows that nothing has changed on the other side.
package argument

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Error says which argument can't be used, what is wrong with it and what to do
// instead. Nothing was sent when it is returned.
//
// Go programs print it as it is. Another front end, such as one that reads files,
// writes Path and Other in its own form, and chooses its own Remedy by Code where
// the remedy is one for Go code. Problem is for all of them.
type Error struct {
	// Path leads to the argument, as the caller wrote it: QuorumQueue("orders").Name.
	Path Path
	// Code is the kind of fault. It is empty for arguments that only Go code passes.
	Code Code
	// Value is the value that was passed, made printable and cut short. It may be
	// empty.
	Value string
	// Problem is what is wrong with it, such as "is empty".
	Problem string
	// Other is an argument that ends the sentence of Problem, such as "is empty, and
	// so is". It may be empty.
	Other Path
	// Remedy is what to do, as an imperative, such as "give the queue a name".
	Remedy string
	// Err is the cause, or nil.
	Err error
}

// Code is a kind of fault.
type Code string

// The codes.
const (
	// Missing: the argument is required. It is empty, nil, or not set.
	CodeMissing Code = "missing"
	// CodeTooLong: it has more bytes or elements, or is nested deeper, than the broker or AMQP
	// allows.
	CodeTooLong Code = "too-long"
	// CodeOutOfRange: the number or the time is too small or too large.
	CodeOutOfRange Code = "out-of-range"
	// CodeNotWhole: the time isn't a whole number of the unit that is counted.
	CodeNotWhole Code = "not-whole"
	// Malformed: it is text of the wrong form, or it isn't valid UTF-8.
	CodeMalformed Code = "malformed"
	// Reserved: the broker keeps the name for itself.
	CodeReserved Code = "reserved"
	// Unknown: it is none of the known values.
	CodeUnknown Code = "unknown"
	// CodeWrongType: the value is of a type that can't be used there.
	CodeWrongType Code = "wrong-type"
	// Conflict: it contradicts another argument, which is Other if that is set, or it has to
	// be set there instead.
	CodeConflict Code = "conflict"
	// Unsupported: the broker can't do it there.
	CodeUnsupported Code = "unsupported"
)

// valueLimit keeps a huge or hostile value from flooding a log line.
const valueLimit = 120

// New returns an *Error for an argument that has a name alone, as Go code writes it:
// "Config.Timeout". value is formatted with %v for numbers and %q for everything
// else, and cut to 120 bytes. A nil value is left out.
func New(name string, value any, problem, remedy string) *Error {
	return At(Root(name), "", value, problem, remedy)
}

// At returns an *Error for the argument that path leads to. value is as in [New].
func At(path Path, code Code, value any, problem, remedy string) *Error {
	return &Error{Path: path, Code: code, Value: printable(value), Problem: problem, Remedy: remedy}
}

// And sets Other and returns e.
func (e *Error) And(other Path) *Error {
	e.Other = other
	return e
}

// Because sets Err, the cause, which errors.Is and errors.As find, and returns e.
func (e *Error) Because(err error) *Error {
	e.Err = err
	return e
}

// Error leaves out of Other what it shares with Path.
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
