package message

import (
	"maps"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
)

// Sending implements instrument.Sending: what an Instrument sees of a message that is about to be sent.
type Sending struct {
	to      address.Address // zero: the message names it
	message *amqp.Message
	server  *string

	// pooled: properties is used for one message after the other, because a new map for each
	// would be a third of what an Instrument makes the client allocate.
	pooled     bool
	properties map[string]any
	set        bool           // the message's properties are the map
	own        map[string]any // what the message had before
}

// NewSending returns a Sending that is used once.
func NewSending(to address.Address, m *amqp.Message, server *string) *Sending {
	return &Sending{to: to, message: m, server: server}
}

// maxKept bounds the maps that are kept, as a map never shrinks.
const maxKept = 16

var sendings = sync.Pool{New: func() any { return &Sending{pooled: true, properties: make(map[string]any, 4)} }}

// PooledSending returns a Sending to call Recycle on.
func PooledSending(to address.Address, m *amqp.Message, server *string) *Sending {
	s := sendings.Get().(*Sending)
	s.to, s.message, s.server = to, m, server
	return s
}

// Recycle makes a Sending of PooledSending available again. Nobody may send its message any more.
func (s *Sending) Recycle() {
	if len(s.properties) > maxKept {
		return
	}
	if s.set {
		s.message.ApplicationProperties = s.own
		clear(s.properties)
	}
	*s = Sending{pooled: true, properties: s.properties}
	sendings.Put(s)
}

// Message returns the message.
func (s *Sending) Message() *amqp.Message { return s.message }

// To returns the address that the message is sent to, or the zero Address if it has no valid
// one.
func (s *Sending) To() address.Address {
	if !s.to.IsZero() {
		return s.to
	}
	if s.message.Properties == nil || s.message.Properties.To == nil {
		return address.Address{}
	}
	to, err := address.Parse(*s.message.Properties.To)
	if err != nil {
		return address.Address{}
	}
	return to
}

// Server returns the endpoint that the Conn was last connected to, or "".
func (s *Sending) Server() string {
	if s.server == nil {
		return ""
	}
	return *s.server
}

// PerMessage reports whether the publisher has no fixed address.
func (s *Sending) PerMessage() bool { return s.to.IsZero() }

// SetProperty sets an application property of what is sent, if it is Addable.
func (s *Sending) SetProperty(key, value string) {
	m := s.message
	switch {
	case !Addable(key, value, maxAdded):
	case !s.pooled:
		all := make(map[string]any, len(m.ApplicationProperties)+1)
		maps.Copy(all, m.ApplicationProperties)
		all[key] = value
		m.ApplicationProperties = all
	default:
		if !s.set {
			s.set, s.own = true, m.ApplicationProperties
			maps.Copy(s.properties, s.own)
			m.ApplicationProperties = s.properties
		}
		s.properties[key] = value
	}
}

// SetAnnotation sets a message annotation of what is sent, if it is Addable and its key begins
// with "x-".
func (s *Sending) SetAnnotation(key, value string) {
	if !Addable(key, value, maxAdded) || !strings.HasPrefix(key, "x-") {
		return
	}
	m := make(amqp.Annotations, len(s.message.Annotations)+1)
	maps.Copy(m, s.message.Annotations)
	m[BoxedKey(key)] = value
	s.message.Annotations = m
}

// maxAdded is how many bytes an Instrument's value may have. W3C baggage has 8,192.
const maxAdded = 8192

// Addable reports whether an Instrument's key and value can do no harm.
func Addable(key, value string, limit int) bool {
	return key != "" && len(key) <= 255 && len(value) <= limit && utf8.ValidString(key) && utf8.ValidString(value)
}
