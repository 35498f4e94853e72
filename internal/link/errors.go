package link

import (
	"errors"

	"github.com/Azure/go-amqp"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
)

// transportError is why a link, a session, or a connection has ended. Users match it by go-amqp's types.
type transportError struct {
	scope error // an *amqp.LinkError, *amqp.SessionError or *amqp.ConnError
	err   error // the engine's
}

func (e *transportError) Error() string   { return e.err.Error() }
func (e *transportError) Unwrap() []error { return []error{e.scope, e.err} }

// transport gives an error of the engine go-amqp's types. It returns other errors unchanged.
func transport(err error) error {
	ended, ok := errors.AsType[*engine.Error](err)
	if !ok {
		return err
	}
	remote := remoteError(ended.Remote)
	switch ended.Scope {
	case engine.ScopeLink:
		return &transportError{&amqp.LinkError{RemoteErr: remote}, err}
	case engine.ScopeSession:
		return &transportError{&amqp.SessionError{RemoteErr: remote}, err}
	}
	return &transportError{&amqp.ConnError{RemoteErr: remote}, err}
}

// EndedConnection reports whether a link that has ended with err did so because its connection has ended.
func EndedConnection(err error) bool { return errors.As(err, new(*amqp.ConnError)) }

// remoteError converts an error that the broker sent to go-amqp's type; nil stays nil.
func remoteError(e *frames.Error) *amqp.Error {
	if e == nil {
		return nil
	}
	remote := &amqp.Error{Condition: amqp.ErrCond(e.Condition), Description: e.Description}
	for _, x := range e.Info {
		if remote.Info == nil {
			remote.Info = make(map[string]any, len(e.Info))
		}
		if key, ok := plain(x.Key).(string); ok {
			remote.Info[key] = plain(x.Value)
		}
	}
	return remote
}

// plainMap converts the properties of a link or a flow, without the keys that aren't texts.
func plainMap(m frames.Map) map[string]any {
	all := make(map[string]any, len(m))
	for _, x := range m {
		if key, ok := plain(x.Key).(string); ok {
			all[key] = plain(x.Value)
		}
	}
	return all
}

// plain converts a value to what go-amqp decodes it to, for the types that RabbitMQ uses outside of messages.
func plain(v any) any {
	switch v := v.(type) {
	case frames.Symbol:
		return string(v)
	case frames.Timestamp:
		return v.Time()
	case frames.UUID:
		return amqp.UUID(v)
	case frames.List:
		all := make([]any, len(v))
		for i, x := range v {
			all[i] = plain(x)
		}
		return all
	}
	return v
}
