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
type Error struct {
	// Name of the argument as the caller wrote it, such as "QuorumQueue.Name".
	Name string
	// Value is the value that was passed, made printable and cut short. It may be
	// empty.
	Value string
	// Problem is what is wrong with it, such as "is empty".
	Problem string
	// Remedy is what to do, as an imperative, such as "give the queue a name".
	Remedy string
	// Err is the cause, or nil.
	Err error
}

// valueLimit keeps a huge or hostile value from flooding a log line.
const valueLimit = 120

// New returns an *Error. value is formatted with %v for numbers and %q for
// everything else, and cut to 120 bytes. A nil value is left out.
func New(name string, value any, problem, remedy string) *Error {
	return &Error{Name: name, Value: printable(value), Problem: problem, Remedy: remedy}
}

// Wrap is New with a cause, which errors.Is and errors.As find.
func Wrap(err error, name string, value any, problem, remedy string) *Error {
	e := New(name, value, problem, remedy)
	e.Err = err
	return e
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("hopback: ")
	b.WriteString(e.Name)
	if e.Value != "" {
		b.WriteString(" = ")
		b.WriteString(e.Value)
	}
	b.WriteString(" ")
	b.WriteString(e.Problem)
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
		s = string(cut(string(v)))
	default:
		s = fmt.Sprintf("%T", v)
	}
	return fmt.Sprintf("%q", cut(s))
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

func cut(s string) string {
	if len(s) <= valueLimit {
		return s
	}
	n := valueLimit
	for n > valueLimit-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
