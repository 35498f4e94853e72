package client

import (
	"github.com/hopback/hopback/internal/userid"
)

// AnnotationUserID holds, in a copy, the user-id of the original message: a string, or binary if
// the user-id isn't valid UTF-8. RabbitMQ accepts only the user-id of the publishing user. So a
// copy that another user publishes can't keep the original user-id, unless that user is an
// impersonator (see [Config.Impersonator]). A copy that the same user publishes keeps it.
const AnnotationUserID = userid.Annotation

// UserID returns the user who published m, or the message that m is a copy of. It returns "" if
// the message doesn't carry a user-id.
//
// checked reports whether the broker has verified it. The broker verifies the property user-id,
// but not an annotation: anyone who may publish to the queue can set [AnnotationUserID]. Don't
// base authorization on it.
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
