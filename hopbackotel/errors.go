package hopbackotel

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// kinds are the values of error.type for errors that are known.
var kinds = map[error]string{
	client.ErrUnroutable: "unroutable", client.ErrRefused: "refused", client.ErrNotFound: "not_found",
	client.ErrUnauthorized: "unauthorized", client.ErrTooLarge: "too_large", client.ErrSessionLimit: "session_limit",
	client.ErrOutcomeUnknown: "outcome_unknown", client.ErrNotSent: "not_sent", client.ErrConnectionLost: "connection_lost",
	client.ErrConsumerTimeout: "consumer_timeout", client.ErrConsumerTimeoutNear: "consumer_timeout", client.ErrHandlerTimeout: "timeout",
	context.DeadlineExceeded: "timeout", context.Canceled: "canceled",
}

// wrappers are the types of errors that say nothing themselves, and only wrap another one.
var wrappers = func() map[reflect.Type]bool {
	inner := errors.New("inner")
	types := map[reflect.Type]bool{}
	for _, err := range []error{fmt.Errorf("%w", inner), retry.Permanent(inner), retry.After(0, inner), retry.Discard(inner)} {
		types[reflect.TypeOf(err)] = true
	}
	return types
}()

// maxErrors bounds how far an error is unwrapped, since one may unwrap to itself.
const maxErrors = 100

// typeOf is the value of the attribute error.type; "" for nil. It is one of kinds, or the
// Go type of the error without what only wraps it.
func typeOf(err error) (kind string) {
	if err == nil {
		return ""
	}
	defer func() {
		if recover() != nil {
			kind = "unreadable" // its methods panic
		}
	}()
	named, last := "", ""
	for range maxErrors {
		switch e := err.(type) {
		case *client.Error:
			if k := kinds[e.Kind]; k != "" {
				return k
			}
		case *client.PanicError:
			return "panic"
		case *client.BatchError:
			err = e.Failed[0].Err
			continue
		case errReason:
			return string(e)
		}
		t := reflect.TypeOf(err)
		if t.Comparable() {
			if k := kinds[err]; k != "" {
				return k
			}
		}
		if last = t.String(); named == "" && !wrappers[t] {
			named = last
		}
		u, ok := err.(interface{ Unwrap() error })
		if !ok {
			break
		}
		if err = u.Unwrap(); err == nil {
			break
		}
	}
	if named == "" {
		named = last
	}
	return valid(named)
}
