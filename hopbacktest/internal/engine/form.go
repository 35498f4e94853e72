package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/hopback/hopback/internal/frames"
)

// formOf has what RabbitMQ 4.3 asks of a section's value.
var formOf = map[int]string{
	frames.SectionHeader: "list", frames.SectionDeliveryAnnotations: "map", frames.SectionAnnotations: "map",
	frames.SectionProperties: "list", frames.SectionApplicationProperties: "map", frames.SectionData: "binary",
	frames.SectionSequence: "list", frames.SectionValue: "any", frames.SectionFooter: "map",
}

var sectionNames = map[int]string{
	frames.SectionHeader: "header", frames.SectionDeliveryAnnotations: "delivery_annotations", frames.SectionAnnotations: "message_annotations",
	frames.SectionProperties: "properties", frames.SectionApplicationProperties: "application_properties", frames.SectionData: "data",
	frames.SectionSequence: "amqp_sequence", frames.SectionValue: "amqp_value", frames.SectionFooter: "footer",
}

// illFormed is what RabbitMQ 4.3 says of a message whose sections aren't right, as it says
// it; "" if they are. It doesn't look into their values.
func illFormed(b []byte) string {
	for at, last := 0, 0; at < len(b); {
		rest := b[at:]
		if len(rest) < 3 || rest[0] != 0 {
			return fmt.Sprintf("{not_a_message_section,{position,%d}}", at)
		}
		if rest[1] != 0x53 {
			return "" // a descriptor that is written in another way: left to others
		}
		code := int(rest[2])
		form, repeats := formOf[code], code == last && (code == frames.SectionData || code == frames.SectionSequence)
		switch body := last >= frames.SectionData; {
		case form == "":
			return fmt.Sprintf("{unexpected_message_section,%d,{position,%d}}", code, at)
		case !repeats && (code <= last || body != (code == frames.SectionFooter)):
			return fmt.Sprintf("{unexpected_message_section,%s,{position,%d}}", sectionNames[code], at)
		}
		size, problem := sizeOf(rest[3:], form)
		switch {
		case problem != "":
			return problem
		case size < 0 || 3+size > len(rest):
			return fmt.Sprintf("{invalid_section_value,%s,{position,%d}}", form, at+3)
		}
		at, last = at+3+size, code
	}
	return ""
}

// sizeOf is the size of the value at the beginning of b; -1 if it isn't of that form or
// isn't whole.
func sizeOf(b []byte, form string) (int, string) {
	if len(b) == 0 {
		if form == "any" {
			return 0, "{insufficient_input,peek_value_size}"
		}
		return -1, ""
	}
	code := b[0]
	fits := form == "any"
	switch form {
	case "list":
		fits = code == 0x45 || code == 0xc0 || code == 0xd0
	case "map":
		fits = code == 0xc1 || code == 0xd1
	case "binary":
		fits = code == 0xa0 || code == 0xb0
	}
	switch {
	case !fits:
		return -1, ""
	case code == 0:
		return sizeOfDescribed(b)
	}
	switch code >> 4 {
	case 4:
		return 1, ""
	case 5:
		return 2, ""
	case 6:
		return 3, ""
	case 7:
		return 5, ""
	case 8:
		return 9, ""
	case 9:
		return 17, ""
	case 0xa, 0xc, 0xe:
		if len(b) > 1 {
			return 2 + int(b[1]), ""
		}
		return -1, ""
	case 0xb, 0xd, 0xf:
		if code == 0xff { // an example of what is no constructor
			break
		}
		if len(b) > 4 {
			return 5 + int(binary.BigEndian.Uint32(b[1:])), ""
		}
		return -1, ""
	}
	return 0, fmt.Sprintf("{primitive_type_unsupported,%d,peek_value_size}", code)
}

// sizeOfDescribed is sizeOf for a value with a descriptor. It goes by sizes alone, as
// RabbitMQ does, so that values may be nested as deep as they like.
func sizeOfDescribed(b []byte) (int, string) {
	at := 0
	for open := 1; open > 0; open-- { // how many values are to come
		for at < len(b) && b[at] == 0 {
			at++
			open++ // a descriptor and a value in place of one
		}
		size, problem := sizeOf(b[min(at, len(b)):], "any")
		if problem != "" || size < 0 {
			return size, problem
		}
		at += size
	}
	return at, ""
}
