// Package userid knows what RabbitMQ makes of the property user-id: a message must name the
// user who publishes it, or none. Only a user with the tag impersonator may name another.
package userid

import (
	"errors"
	"maps"
	"sync/atomic"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/condition"
)

// Annotation is client.AnnotationUserID.
const Annotation = "x-opt-hopback-user-id"

// Login is what is known of a connection's user.
type Login struct {
	user         atomic.Pointer[string] // nil: not known
	impersonator atomic.Bool
	refused      atomic.Bool // the broker has refused another user's name
}

// NewLogin returns a Login. An empty user isn't known, for instance because it is in a token
// or in a certificate.
func NewLogin(user string, impersonator bool) *Login {
	l := &Login{}
	if user != "" {
		l.user.Store(&user)
	}
	l.impersonator.Store(impersonator)
	return l
}

// Accepts reports whether the broker is expected to accept a user-id. It accepts none at
// all, which is how an empty one is sent.
func (l *Login) Accepts(id []byte) bool {
	if len(id) == 0 || l.impersonator.Load() {
		return true
	}
	user := l.user.Load()
	return user != nil && *user == string(id)
}

// Refuses reports whether the broker certainly refuses a user-id.
func (l *Login) Refuses(id []byte) bool { return l.refused.Load() && !l.Accepts(id) }

// Learn learns from the description of an error with which the broker has ended a link or a
// session. It reports whether the broker did so because of a user-id.
func (l *Login) Learn(description string) bool {
	user, ok := condition.UserID(description)
	if ok {
		l.user.Store(&user)
		l.impersonator.Store(false)
		l.refused.Store(true)
	}
	return ok
}

// LearnFrom reports whether the broker has ended a link or a session because of a user-id,
// and learns from err what that says about the connection's user.
func (l *Login) LearnFrom(err error) bool {
	remote, ok := errors.AsType[*amqp.Error](err)
	return ok && remote != nil && remote.Condition == amqp.ErrCondUnauthorizedAccess && l.Learn(remote.Description)
}

// Of returns m's user-id, or nil.
func Of(m *amqp.Message) []byte {
	if m == nil || m.Properties == nil || len(m.Properties.UserID) == 0 {
		return nil
	}
	return m.Properties.UserID
}

// Signed returns m as the user may publish it: another user's user-id becomes an annotation.
// m isn't changed: it may belong to a delivery.
func Signed(login *Login, m *amqp.Message) *amqp.Message {
	id := Of(m)
	if login.Accepts(id) {
		return m
	}
	c := new(*m)
	c.Properties = new(*m.Properties)
	c.Properties.UserID = nil
	if c.Annotations = maps.Clone(m.Annotations); c.Annotations == nil {
		c.Annotations = amqp.Annotations{}
	}
	c.Annotations[Annotation] = Value(id)
	return c
}

// Value is a user-id as the annotation has it.
func Value(id []byte) any {
	if utf8.Valid(id) {
		return string(id)
	}
	return id
}
