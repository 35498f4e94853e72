package engine

import (
	"errors"
	"math"
	"reflect"

	"github.com/hopback/hopback/internal/frames"
)

// message is a message in the form in which it was published or dead-lettered. It is never changed once it
// is in a queue: several queues and deliveries have it.
type message struct {
	sections
	// sent are the sender's annotations, added those of the broker that begin with x-.
	// added overrides sent.
	sent, added frames.Map
	exchange    string
	keys        []string // the first is the routing key, the others are from x-cc
	deaths      []death  // the latest key first
	durable     bool
	priority    int16  // -1: none
	ttl         int64  // in milliseconds; -1: none
	count       uint32 // the delivery count that it brings along
	// poisoned messages make the session crash that is to deliver them.
	poisoned bool
	id       string // the encoded message-id, if it isn't long
	first    entry  // its place in the first queue
	used     bool   // first is taken
	guess    int    // the size of its annotations
	weight   int64  // about what it takes in memory
}

// guessedSize is what RabbitMQ 4.3 takes annotations for in the bytes of a queue.
const guessedSize = 100

func (m *message) size() int { return len(m.Bare) + m.guess }

var errNoBody = errors.New("missing_amqp_message_body")

// parse reads what the broker needs of a published message.
func parse(payload []byte, version *version) (*message, error) {
	if version.newer {
		if problem := illFormed(payload); problem != "" {
			return nil, errors.New(problem)
		}
	}
	s, err := split(payload)
	if err != nil {
		return nil, err
	}
	if s.Body == nil {
		return nil, errNoBody
	}
	m := &message{sections: s, priority: -1, ttl: -1, durable: version.durableByDefault, weight: int64(len(payload))}
	if s.Header != nil {
		switch v := field(s.Header, 0); {
		case len(v) == 1:
			m.durable = v[0] == frames.CodeTrue
		case len(v) == 2:
			m.durable = v[1] == 1
		}
		if v := field(s.Header, 1); len(v) == 2 {
			m.priority = int16(v[1])
		}
		if v, ok := read(field(s.Header, 2)).(uint32); ok {
			m.ttl = int64(v)
		}
	}
	if id := field(s.Properties, fieldMessageID); len(id) <= 300 {
		m.id = string(id)
	}
	if s.Annotations != nil {
		if m.sent, err = sectionMap(s.Annotations); err != nil {
			return nil, err
		}
		for _, e := range m.sent {
			if e.Value == nil {
				m.poisoned = true
			}
		}
		m.weight += weight(m.sent)
		if version.newer && len(m.sent) > 0 {
			m.guess = guessedSize
		}
	}
	return m, nil
}

// weight is about how many bytes a decoded value takes in memory. Parts of the encoded
// message count there.
func weight(v any) int64 {
	const slot, header = 16, 24 // an interface; a slice
	n := int64(slot)
	switch v := v.(type) {
	case string:
		n += int64(len(v)) + slot
	case frames.Symbol:
		n += int64(len(v)) + slot
	case []byte:
		n += header
	case frames.List:
		n += header
		for _, element := range v {
			n += weight(element)
		}
	case frames.Map:
		n += header
		for _, e := range v {
			n += weight(e.Key) + weight(e.Value)
		}
	case frames.Array:
		n += 4 * slot
		if v.Descriptor != nil {
			n += weight(v.Descriptor)
		}
		if !v.Shared() {
			for _, element := range v.Elements {
				n += weight(element)
			}
		}
	case frames.Described:
		n += weight(v.Descriptor) + weight(v.Value)
	case nil, bool:
	default:
		n += slot
	}
	return n
}

// read decodes one value, nil if there is none.
func read(b []byte) any {
	if b == nil {
		return nil
	}
	v, _, err := frames.ReadValue(b)
	if err != nil {
		return nil
	}
	return v
}

// The fields of the properties section.
const (
	fieldMessageID = 0
	fieldUserID    = 1
	fieldTo        = 2
	fieldSubject   = 3
)

func (m *message) property(n int) any {
	if m.Properties == nil {
		return nil
	}
	return read(field(m.Properties, n))
}

// with is the map with the entries of more, which win. The map isn't changed. The keys of
// more are symbols.
func with(m, more frames.Map) frames.Map {
	if len(more) == 0 {
		return m
	}
	merged := make(frames.Map, len(m), len(m)+len(more))
	copy(merged, m)
	if len(m)+len(more) <= 16 {
		for _, e := range more {
			merged = merged.Set(e.Key.(frames.Symbol), e.Value)
		}
		return merged
	}
	// Nobody may make the broker compare each of a million with each.
	at := make(map[frames.Symbol]int, len(m)+len(more))
	for i, e := range merged {
		if key, ok := e.Key.(frames.Symbol); ok {
			at[key] = i
		}
	}
	for _, e := range more {
		key := e.Key.(frames.Symbol)
		if i, ok := at[key]; ok {
			merged[i].Value = e.Value
			continue
		}
		at[key] = len(merged)
		merged = append(merged, e)
	}
	return merged
}

// keysOf says which keys a map has, whose keys are symbols.
func keysOf(m frames.Map) func(key string) bool {
	if len(m) <= 16 {
		return func(key string) bool { _, ok := m.Get(key); return ok }
	}
	keys := make(map[string]bool, len(m))
	for _, e := range m {
		keys[string(e.Key.(frames.Symbol))] = true
	}
	return func(key string) bool { return keys[key] }
}

// copyFor is the copy of the message that a queue dead-letters.
func (e *entry) copyFor() *message {
	m := *e.msg
	m.first, m.used = entry{}, false
	m.added = with(m.added, e.added)
	m.weight += e.weight
	m.poisoned = m.poisoned || e.poisoned
	m.count = e.failed
	return &m
}

// death is an element of x-opt-deaths.
type death struct {
	queue, reason, exchange string
	keys                    []string
	count                   uint64
	first, last             int64
	ttl                     int64 // -1: none
}

// die records a death in a message that is this queue's no more.
func (m *message) die(queue, reason string, now int64) {
	deaths := make([]death, 0, len(m.deaths)+1)
	d := death{queue: queue, reason: reason, exchange: m.exchange, keys: m.keys, first: now, ttl: m.ttl}
	for _, old := range m.deaths {
		if old.queue == queue && old.reason == reason {
			d = old
			continue
		}
		deaths = append(deaths, old)
	}
	d.count++
	d.last = now
	added := frames.Map{
		{Key: frames.Symbol("x-last-death-reason"), Value: reason},
		{Key: frames.Symbol("x-last-death-queue"), Value: queue},
		{Key: frames.Symbol("x-last-death-exchange"), Value: m.exchange},
	}
	if len(m.deaths) == 0 {
		added = append(added, frames.Map{
			{Key: frames.Symbol("x-first-death-reason"), Value: reason},
			{Key: frames.Symbol("x-first-death-queue"), Value: queue},
			{Key: frames.Symbol("x-first-death-exchange"), Value: m.exchange},
		}...)
	}
	m.deaths = append([]death{d}, deaths...)
	m.added = with(m.added, added)
	m.ttl = -1
}

// cycles says whether a message that died for another reason than rejection would come
// to queue again without anybody having rejected it since.
func (m *message) cycles(queue string) bool {
	for _, d := range m.deaths {
		if d.reason == reasonRejected {
			return false
		}
		if d.queue == queue {
			return true
		}
	}
	return false
}

// The reasons of deaths.
const (
	reasonRejected = "rejected"
	reasonExpired  = "expired"
	reasonLength   = "maxlen"
	reasonLimit    = "delivery_limit"
)

// inferred is what becomes of an annotation of a modified outcome: RabbitMQ keeps the
// bare value and guesses its type when it delivers it. ok is false for those that it
// can't guess: they make the session crash.
func inferred(v any) (_ any, ok bool) {
	switch v := v.(type) {
	case string, bool, int64, frames.List, frames.Map, frames.Array, frames.Described:
		return v, true
	case frames.Symbol:
		return string(v), true
	case []byte:
		return string(v), true
	case frames.UUID:
		return string(v[:]), true
	}
	switch n := reflect.ValueOf(v); {
	case n.CanInt():
		return n.Int(), true
	case n.CanUint():
		return int64(min(n.Uint(), math.MaxInt64)), true
	}
	return v, false
}
