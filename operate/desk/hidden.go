package desk

import (
	"errors"

	"github.com/hopback/hopback/internal/frames"
)

// RabbitMQ translates a message of AMQP 0-9-1 for an AMQP 1.0 client, and leaves out headers
// that have no place there: application properties can't hold tables or arrays. It says nowhere
// that it has, nor which protocol a message came by. But it writes the translation itself, and
// passes on other messages byte for byte. So a message that RabbitMQ would have written in
// other bytes, or couldn't have, wasn't translated.

var errHeaders = errors.New("it may have been published over AMQP 0-9-1, and RabbitMQ hides headers of such messages that hold tables or arrays, so a copy would lose them; if your publishers set none, accept " + string(WarningHeaders) + "; otherwise let the broker move the message: see ReplayByMove, or use a shovel")

// mayHideHeaders reports whether the message may be a translation. It is often true for messages
// of AMQP 1.0 clients that encode as RabbitMQ does, and never false for a translation.
func (l *deadLetter) mayHideHeaders() bool {
	if l.bad != nil || len(l.body) != 1 || l.body[0].Code != frames.SectionData || l.footer != nil {
		return false
	}
	if p := l.properties; p != nil {
		if p.To != nil || p.Subject.Set || p.AbsoluteExpiryTime.Set || p.GroupSequence.Set || p.ReplyToGroupID.Set {
			return false // AMQP 0-9-1 has nothing for them
		}
	}
	for _, s := range l.sections {
		switch s.Code {
		case frames.SectionProperties, frames.SectionApplicationProperties:
			if wide(s.Raw) {
				return false
			}
		}
	}
	return true
}

// wide reports whether a section of a list or a map is written with the wide constructor,
// although the short one would do. RabbitMQ writes the short one.
func wide(raw []byte) bool {
	if len(raw) < 4 || raw[0] != 0 || raw[1] != 0x53 {
		return true // an unusual descriptor
	}
	switch raw[3] {
	case 0xd0, 0xd1: // the size of the wide one counts 4 bytes for the number of elements
		return len(raw) < 3+9+254
	}
	return false
}
