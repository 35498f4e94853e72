package failure

import "github.com/Azure/go-amqp"

// WorthRetrying reports whether the operation can succeed later, although nobody changes the
// program, its configuration, the message, or the broker's settings.
func (e *Error) WorthRetrying() bool {
	switch {
	case e.lasting:
		return false
	case e.passing:
		return true
	}
	switch e.Kind {
	case ErrRefused:
		// A full queue on RabbitMQ 4.0, which gives no reason, or on a later one; or another
		// consumer's exclusive queue.
		return e.Condition == "" || e.Condition == string(amqp.ErrCondResourceLimitExceeded) || e.Condition == string(amqp.ErrCondResourceLocked)
	case ErrNotSent, ErrOutcomeUnknown:
		worth, known := verdict(e.Err)
		return worth || !known // without a cause, the time was too short
	}
	return lets(e.Kind)
}

// lets reports whether what failed with a kind may succeed later.
func lets(kind error) bool {
	switch kind {
	case ErrUnreachable, ErrConnectionLost, ErrSessionLimit, ErrNotSent, ErrOutcomeUnknown, ErrRefused, ErrBlocked:
		return true
	}
	return false
}

// WorthRetrying is the method of err, or of the first error in it that has one. If several errors are
// joined, one is enough. It returns false for nil, and for errors of other packages.
func WorthRetrying(err error) bool {
	worth, _ := verdict(err)
	return worth
}

// verdict also reports whether err says something about it.
func verdict(err error) (worth, known bool) {
	switch err {
	case ErrUnreachable, ErrConnectionLost, ErrSessionLimit, ErrNotSent, ErrOutcomeUnknown, ErrRefused, ErrBlocked,
		ErrAuthentication, ErrVirtualHost, ErrTLS, ErrUnauthorized, ErrNotFound, ErrUnroutable, ErrUserID, ErrTooLarge, ErrClosed:
		return lets(err), true
	}
	switch e := err.(type) {
	case interface{ WorthRetrying() bool }:
		return e.WorthRetrying(), true
	case interface{ Unwrap() error }:
		return verdict(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			w, k := verdict(inner)
			worth, known = worth || w, known || k
		}
	}
	return worth, known
}

// MarkPassing marks e as worth retrying, for any Kind.
func MarkPassing(e *Error) *Error {
	e.passing = true
	return e
}

// MarkLasting marks e as not worth retrying, for any Kind.
func MarkLasting(e *Error) *Error {
	e.lasting = true
	return e
}
