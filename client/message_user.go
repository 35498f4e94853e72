package client

import (
	"github.com/hopback/hopback/internal/userid"
)

// AnnotationUserID holds, in a copy, the user-id of the message that it is a copy of: a
// string, or binary if the user-id isn't valid UTF-8. RabbitMQ lets a message have the
// user-id of the user who publishes it, and no other. So what one user has published
// another can't publish again with its user-id, unless that user is an impersonator (see
// Config.Impersonator). A copy that the same user publishes keeps its user-id.
const AnnotationUserID = userid.Annotation

// UserID returns the user who published m, or of whose message m is a copy. It returns ""
// if the message doesn't say so.
//
// checked reports whether the broker has checked it: it checks the property user-id, and
// not an annotation. Anyone who may publish to the queue can set AnnotationUserID. Don't
// decide by it what a message may do.
func UserID(m *Message) (user string, checked bool) {
	if id := userid.Of(m); id != nil {
		return string(id), true
	}
	switch id := m.Annotations[AnnotationUserID].(type) {
	case string:
		return id, false
	case []byte:
		return string(id), false
	}
	return "", false
}
