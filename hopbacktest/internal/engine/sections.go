package engine

import (
	"encoding/binary"
	"errors"

	"github.com/hopback/hopback/internal/frames"
)

// sections are the encoded sections of a message. What isn't there is nil.
type sections struct {
	Header, Annotations, Properties, ApplicationProperties []byte
	// Bare is the bare message and the footer: all from the properties on.
	Bare []byte
	// Body is all from the body on.
	Body []byte
}

// split finds the sections of a message and decodes none. They are parts of b. As RabbitMQ
// does, it doesn't look into the body, nor whether there is one.
func split(b []byte) (s sections, err error) {
	for last := 0; len(b) > 0; {
		code, size, err := frames.NextSection(b, last)
		if code >= frames.SectionProperties && s.Bare == nil {
			s.Bare = b
		}
		switch {
		case code >= frames.SectionData && code != frames.SectionFooter:
			s.Body = b
			return s, nil
		case err != nil:
			return s, err
		case code == frames.SectionFooter:
			return s, errors.New("a footer without a body")
		case code == frames.SectionHeader:
			s.Header = b[:size]
		case code == frames.SectionAnnotations:
			s.Annotations = b[:size]
		case code == frames.SectionProperties:
			s.Properties = b[:size]
		case code == frames.SectionApplicationProperties:
			s.ApplicationProperties = b[:size]
		}
		last, b = code, b[size:]
	}
	return s, nil
}

// field returns the encoded n-th field, from 0, of a section that is a list, such as the
// header. It is nil if the field is absent or the section malformed.
func field(section []byte, n int) []byte {
	list := inner(section)
	if len(list) == 0 {
		return nil
	}
	var count int
	switch list[0] {
	case frames.CodeList8:
		if len(list) < 3 {
			return nil
		}
		count, list = int(list[2]), list[3:]
	case frames.CodeList32:
		if len(list) < 9 {
			return nil
		}
		count, list = int(binary.BigEndian.Uint32(list[5:])), list[9:]
	default:
		return nil
	}
	if n >= count {
		return nil
	}
	for range n {
		size := 0
		if len(list) > 0 {
			size = frames.ValueSize(list)
		}
		if size == 0 {
			return nil
		}
		list = list[size:]
	}
	if len(list) == 0 || list[0] == frames.CodeNull {
		return nil
	}
	size := frames.ValueSize(list)
	return list[:size:size]
}

// inner is a described value without its descriptor.
func inner(section []byte) []byte {
	if len(section) < 2 || section[0] != frames.CodeDescribed || section[1] == frames.CodeDescribed {
		return nil
	}
	size := frames.ValueSize(section[1:])
	if size == 0 {
		return nil
	}
	return section[1+size:]
}

// sectionMap decodes a section that is a map, such as the annotations.
func sectionMap(section []byte) (frames.Map, error) {
	if section == nil {
		return nil, nil
	}
	v, _, err := frames.ReadValue(inner(section))
	if err != nil {
		return nil, err
	}
	m, ok := v.(frames.Map)
	if !ok {
		return nil, errors.New("a section that isn't a map")
	}
	return m, nil
}
