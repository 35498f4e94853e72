package frames

// Sections are the encoded sections of a message. What isn't there is nil.
type Sections struct {
	Header, Annotations, Properties, ApplicationProperties []byte
	// Bare is the bare message and the footer: all from the properties on.
	Bare []byte
	// Body is all from the body on.
	Body []byte
}

// SplitMessage finds the sections of a message and decodes none. They are parts of b. As
// RabbitMQ does, it doesn't look into the body, nor whether there is one.
func SplitMessage(b []byte) (Sections, error) {
	var s Sections
	for last := 0; len(b) > 0; {
		code := sectionOf(b)
		if code >= sectionProperties && s.Bare == nil {
			s.Bare = b
		}
		if code >= sectionData && code != sectionFooter {
			s.Body = b
			return s, nil
		}
		code, size, err := nextSection(b, last)
		switch {
		case err != nil:
			return s, err
		case code == sectionFooter:
			return s, malformed("a footer without a body")
		}
		switch code {
		case sectionHeader:
			s.Header = b[:size]
		case sectionAnnotations:
			s.Annotations = b[:size]
		case sectionProperties:
			s.Properties = b[:size]
		case sectionApplicationProperties:
			s.ApplicationProperties = b[:size]
		}
		last, b = code, b[size:]
	}
	return s, nil
}

// Field returns the encoded n-th field, from 0, of a section that is a list, such as the
// header. It is nil if the field is absent or the section malformed.
func Field(section []byte, n int) []byte {
	list := inner(section)
	if len(list) == 0 {
		return nil
	}
	var count int
	switch list[0] {
	case codeList8:
		if len(list) < 3 {
			return nil
		}
		count, list = int(list[2]), list[3:]
	case codeList32:
		if len(list) < 9 {
			return nil
		}
		count, list = int(list[5])<<24|int(list[6])<<16|int(list[7])<<8|int(list[8]), list[9:]
	default:
		return nil
	}
	if n >= count {
		return nil
	}
	for range n {
		size := 0
		if len(list) > 0 {
			size = valueSize(list)
		}
		if size == 0 {
			return nil
		}
		list = list[size:]
	}
	if len(list) == 0 || list[0] == codeNull {
		return nil
	}
	size := valueSize(list)
	return list[:size:size]
}

// inner is a described value without its descriptor.
func inner(section []byte) []byte {
	if len(section) < 2 || section[0] != codeDescribed || section[1] == codeDescribed {
		return nil
	}
	size := plainSize(section[1:])
	if size == 0 {
		return nil
	}
	return section[1+size:]
}

// SectionMap decodes a section that is a map, such as the annotations.
func SectionMap(section []byte) (Map, error) {
	if section == nil {
		return nil, nil
	}
	v, _, err := ReadValue(inner(section))
	if err != nil {
		return nil, err
	}
	m, ok := v.(Map)
	if !ok {
		return nil, malformed("a section that isn't a map")
	}
	return m, nil
}
