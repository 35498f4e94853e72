package frames

// MessageHeader is the first section of a message.
type MessageHeader struct {
	Durable       bool
	Priority      Optional[uint8]  // absent: 4
	TTL           Optional[uint32] // in milliseconds
	FirstAcquirer bool
	DeliveryCount uint32
}

func (*MessageHeader) kind() (uint64, string) { return SectionHeader, "header" }
func (p *MessageHeader) walk(f *fields) {
	orZero(f, &p.Durable)
	optional(f, &p.Priority)
	optional(f, &p.TTL)
	orZero(f, &p.FirstAcquirer)
	orZero(f, &p.DeliveryCount)
}

// Properties are a message's standard properties.
type Properties struct {
	MessageID          any // a uint64, UUID, []byte or string
	UserID             []byte
	To                 any // a string in RabbitMQ
	Subject            Optional[string]
	ReplyTo            any
	CorrelationID      any
	ContentType        Optional[Symbol]
	ContentEncoding    Optional[Symbol]
	AbsoluteExpiryTime Optional[Timestamp]
	CreationTime       Optional[Timestamp]
	GroupID            Optional[string]
	GroupSequence      Optional[uint32]
	ReplyToGroupID     Optional[string]
}

func (*Properties) kind() (uint64, string) { return SectionProperties, "properties" }
func (p *Properties) walk(f *fields) {
	anything(f, &p.MessageID)
	orNil(f, &p.UserID)
	anything(f, &p.To)
	optional(f, &p.Subject)
	anything(f, &p.ReplyTo)
	anything(f, &p.CorrelationID)
	optional(f, &p.ContentType)
	optional(f, &p.ContentEncoding)
	optional(f, &p.AbsoluteExpiryTime)
	optional(f, &p.CreationTime)
	optional(f, &p.GroupID)
	optional(f, &p.GroupSequence)
	optional(f, &p.ReplyToGroupID)
}

// The codes of a message's sections (AMQP 1.0, part 3.2).
const (
	SectionHeader = 0x70 + iota
	SectionDeliveryAnnotations
	SectionAnnotations
	SectionProperties
	SectionApplicationProperties
	SectionData
	SectionSequence
	SectionValue
	SectionFooter
)

// Message is a message whose body is left unchanged. A broker changes only what is before
// the body.
type Message struct {
	Header                *MessageHeader
	DeliveryAnnotations   Map
	Annotations           Map
	Properties            *Properties
	ApplicationProperties Map
	// Body is the encoded sections of data, sequences or a value, and the footer.
	Body []byte
}

// DecodeMessage decodes a message. Its body and binary values are parts of b. It doesn't
// look into the values of the body.
func DecodeMessage(b []byte) (*Message, error) {
	m := &Message{}
	for last := 0; len(b) > 0; {
		code, size, err := NextSection(b, last)
		if err != nil {
			return nil, err
		}
		if code >= SectionData {
			if last < SectionData {
				m.Body = b
			}
			last, b = code, b[size:]
			continue
		}
		d := newDecoder(b[:size])
		v := d.described()
		if d.err != nil {
			return nil, d.err
		}
		last, b = code, b[size:]
		ok := true
		switch v := v.(type) {
		case *MessageHeader:
			m.Header = v
		case *Properties:
			m.Properties = v
		case Described:
			var to *Map
			switch code {
			case SectionDeliveryAnnotations:
				to = &m.DeliveryAnnotations
			case SectionAnnotations:
				to = &m.Annotations
			default:
				to = &m.ApplicationProperties
			}
			*to, ok = v.Value.(Map)
		}
		if !ok {
			return nil, malformed("section 0x%02x isn't a map", code)
		}
	}
	return m, nil
}

var sectionNames = map[Symbol]int{
	"amqp:header:list": SectionHeader, "amqp:delivery-annotations:map": SectionDeliveryAnnotations,
	"amqp:message-annotations:map": SectionAnnotations, "amqp:properties:list": SectionProperties,
	"amqp:application-properties:map": SectionApplicationProperties, "amqp:data:binary": SectionData,
	"amqp:amqp-sequence:list": SectionSequence, "amqp:amqp-value:*": SectionValue, "amqp:footer:map": SectionFooter,
}

// Section is one section of an encoded message.
type Section struct {
	Code int
	// Raw is the section with its descriptor, byte for byte as in the message.
	Raw []byte
}

// Value decodes what the section holds, behind its descriptor.
func (s Section) Value() (any, error) {
	d := newDecoder(s.Raw)
	v := d.value()
	if d.err != nil {
		return nil, d.err
	}
	described, ok := v.(Described)
	if !ok || len(d.b) > 0 {
		return nil, malformed("section 0x%02x isn't a described value", s.Code)
	}
	return described.Value, nil
}

// SplitSections splits an encoded message into its sections, which are parts of b. It looks
// into none of them.
func SplitSections(b []byte) ([]Section, error) {
	all := make([]Section, 0, 8)
	for last := 0; len(b) > 0; {
		code, size, err := NextSection(b, last)
		if err != nil {
			return nil, err
		}
		all = append(all, Section{code, b[:size:size]})
		last, b = code, b[size:]
	}
	return all, nil
}

// Bare returns an encoded message without the sections that brokers change: the header and the
// annotations. It is what the publisher wrote. If b is malformed, it is what can't be read of it.
func Bare(b []byte) []byte {
	for last := 0; len(b) > 0; {
		code, size, err := NextSection(b, last)
		if err != nil || code > SectionAnnotations {
			break
		}
		last, b = code, b[size:]
	}
	return b
}

// NextSection returns the code and the size of the section at the beginning of b, which is behind
// one with the code last; 0 for the first. The code is known also if the size is wrong.
func NextSection(b []byte, last int) (code, size int, err error) {
	if code = sectionOf(b); code == 0 {
		return 0, 0, malformed("no section begins with %x", b[:min(len(b), 16)])
	}
	if !follows(code, last) {
		return 0, 0, malformed("section 0x%02x behind 0x%02x", code, last)
	}
	if size = ValueSize(b); size == 0 {
		return code, 0, malformed("section 0x%02x is cut off", code)
	}
	return code, size, nil
}

// follows says whether a section may be behind another. Sections have an order. Of the
// body's there is one, or several of one kind.
func follows(code, last int) bool {
	repeats := code == last && (code == SectionData || code == SectionSequence)
	otherBody := last >= SectionData && code < SectionFooter
	return repeats || code > last && !otherBody
}

// Head is what is before the body of an encoded message, as far as b has it in whole sections.
func Head(b []byte) []byte {
	at, last := 0, 0
	for at < len(b) {
		code, size, err := NextSection(b[at:], last)
		if err != nil || code >= SectionData {
			break
		}
		at, last = at+size, code
	}
	return b[:at]
}

// sectionOf is the code of the section at the beginning of b, 0 if there is none.
func sectionOf(b []byte) int {
	if b[0] != CodeDescribed {
		return 0
	}
	if len(b) > 2 && b[1] == CodeSmallUlong { // as all clients write it
		if code := int(b[2]); code >= SectionHeader && code <= SectionFooter {
			return code
		}
		return 0
	}
	d := newDecoder(b[1:])
	switch v := d.value().(type) {
	case uint64:
		if v >= SectionHeader && v <= SectionFooter {
			return int(v)
		}
	case Symbol:
		return sectionNames[v]
	}
	return 0
}

// Append writes m behind b. Sections that are nil are left out.
func (m *Message) Append(b []byte) ([]byte, error) {
	e := encoder{b: b}
	mapping := func(code uint64, section Map) {
		if section != nil {
			e.value(Described{code, section})
		}
	}
	if m.Header != nil {
		e.composite(m.Header)
	}
	mapping(SectionDeliveryAnnotations, m.DeliveryAnnotations)
	mapping(SectionAnnotations, m.Annotations)
	if m.Properties != nil {
		e.composite(m.Properties)
	}
	mapping(SectionApplicationProperties, m.ApplicationProperties)
	e.b = append(e.b, m.Body...)
	return e.b, e.err
}
