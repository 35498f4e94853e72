// Package config has what the configurations of all middleware share.
package config

import (
	"context"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Refused returns a handler that refuses to start if a middleware can't wrap h, because
// its Config is bad or h is nil. It returns nil if nothing is wrong. of names the
// middleware.
func Refused(of string, h client.Handler, err error) client.Handler {
	if err == nil && h == nil {
		err = argument.New("handler", nil, "is nil", "pass a Handler to "+of+"'s Middleware")
	}
	if err == nil {
		return nil
	}
	return refused{err}
}

type refused struct{ err error }

func (r refused) Prepare(context.Context, client.Start) error { return r.err }

// Handle gives the message back: a test, or another consumer, may not have called
// Prepare.
func (r refused) Handle(context.Context, *client.Delivery) error {
	return client.Requeue{Failed: true, Err: r.err}
}

// Pause is a pause that doubles up to a limit. Of names its Config, and Name and
// LimitName the fields.
type Pause struct {
	Of, Name, LimitName   string
	Default, LimitDefault time.Duration
}

// Set checks the fields and sets those that are 0: the pause to its default, or the limit
// if that is shorter; the limit to its default, or the pause if that is longer.
func (p Pause) Set(pause, limit *time.Duration) error {
	at := argument.Root(p.Of)
	for _, f := range []struct {
		name  string
		value time.Duration
	}{{p.Name, *pause}, {p.LimitName, *limit}} {
		if f.value < 0 {
			return argument.At(at.Field(f.name), argument.CodeOutOfRange, f.value, "is negative", "use a positive duration, or 0 for the default")
		}
	}
	if *pause == 0 {
		*pause = p.Default
		if *limit > 0 {
			*pause = min(*pause, *limit)
		}
	}
	switch {
	case *limit == 0:
		*limit = max(p.LimitDefault, *pause)
	case *limit < *pause:
		return argument.At(at.Field(p.LimitName), argument.CodeConflict, *limit, "is less than", "make it at least as long, or 0 for the default").And(at.Field(p.Name))
	}
	return nil
}
