package desk

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"unicode/utf8"

	"github.com/hopback/hopback/internal/frames"
)

// A line of an export is a JSON object:
//
//	{"hopback":1,"queue":"orders.dead","id":"...",
//	 "header":{...},"annotations":[[key,value],...],"properties":{...},
//	 "application-properties":[[key,value],...],"body":[...],"footer":[[key,value],...],
//	 "encoding":"base64"}
//
// Sections that the message doesn't have are left out. The body is a list of data, as
// {"text":"..."} or {"data":"base64"}, if it isn't legible, or of {"sequence":[...]}, or one {"value":...}.
// Values are as appendValue writes them. encoding is the original message. A line has it if
// the other members alone would be encoded differently, such as with a number in its long
// form. An import uses it unless another member was changed.

const lineVersion = 1

var headerFields = []string{"durable", "priority", "ttl", "first-acquirer", "delivery-count"}

var propertyFields = []string{
	"message-id", "user-id", "to", "subject", "reply-to", "correlation-id", "content-type", "content-encoding",
	"absolute-expiry-time", "creation-time", "group-id", "group-sequence", "reply-to-group-id",
}

// sectionNames are the members of a line that hold a section before or behind the body.
var sectionNames = map[int]string{
	frames.SectionHeader: "header", frames.SectionDeliveryAnnotations: "delivery-annotations", frames.SectionAnnotations: "annotations",
	frames.SectionProperties: "properties", frames.SectionApplicationProperties: "application-properties", frames.SectionFooter: "footer",
}

// sectionJSON is a section in the form of a line.
func sectionJSON(s frames.Section) (json.RawMessage, error) {
	v, err := s.Value()
	if err != nil {
		return nil, err
	}
	switch s.Code {
	case frames.SectionHeader:
		return fieldsJSON(v, headerFields)
	case frames.SectionProperties:
		return fieldsJSON(v, propertyFields)
	case frames.SectionDeliveryAnnotations, frames.SectionAnnotations, frames.SectionApplicationProperties, frames.SectionFooter:
		m, ok := v.(frames.Map)
		if !ok {
			return nil, errors.New("isn't a map")
		}
		return appendPairs(nil, m)
	case frames.SectionData:
		data, ok := v.([]byte)
		if !ok {
			return nil, errors.New("isn't binary")
		}
		if legible(data) {
			return append(appendText([]byte(`{"text":`), string(data)), '}'), nil
		}
		return []byte(`{"data":"` + base64.StdEncoding.EncodeToString(data) + `"}`), nil
	case frames.SectionSequence:
		l, ok := v.(frames.List)
		if !ok {
			return nil, errors.New("isn't a list")
		}
		return appendMember(nil, "sequence", func(b []byte) ([]byte, error) { return appendList(b, l) })
	}
	return appendMember(nil, "value", func(b []byte) ([]byte, error) { return appendValue(b, v) })
}

// legible reports whether data is written as text. JSON takes six bytes for a control character, so bytes
// that merely are valid UTF-8 are shorter as base64: 1 MiB of zeros would be a line of 7 MB.
func legible(data []byte) bool {
	controls := 0
	for _, c := range data {
		if c < ' ' && c != '\n' && c != '\r' && c != '\t' {
			controls++
		}
	}
	return controls <= len(data)/16 && utf8.Valid(data)
}

func fieldsJSON(v any, names []string) ([]byte, error) {
	l, ok := v.(frames.List)
	if !ok || len(l) > len(names) {
		return nil, errors.New("isn't a list of known fields")
	}
	b := []byte{'{'}
	var err error
	for i, e := range l {
		if e == nil {
			continue
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		if b, err = appendValue(fmt.Appendf(b, `"%s":`, names[i]), e); err != nil {
			return nil, err
		}
	}
	return append(b, '}'), nil
}

// line is the message as a line of an export, with the line feed.
func (l *deadLetter) line(queue string) ([]byte, error) {
	b := fmt.Appendf(nil, `{"hopback":%d,"queue":`, lineVersion)
	b = appendText(b, queue)
	b = fmt.Appendf(b, `,"id":"%s"`, l.id())
	head := len(b)
	exact := func() []byte {
		return append(b, `,"encoding":"`+base64.StdEncoding.EncodeToString(l.payload)+"\"}\n"...)
	}
	if l.bad != nil {
		return exact(), nil
	}
	body := 0
	for _, s := range l.sections {
		text, err := sectionJSON(s)
		if err != nil {
			// The broker delivered it, so keep it.
			b = b[:head]
			return exact(), nil
		}
		if name := sectionNames[s.Code]; name != "" {
			if s.Code == frames.SectionFooter && body > 0 {
				b = append(b, ']')
				body = 0
			}
			b = append(append(b, `,"`+name+`":`...), text...)
			continue
		}
		if body++; body == 1 {
			b = append(b, `,"body":[`...)
		} else {
			b = append(b, ',')
		}
		b = append(b, text...)
	}
	if body > 0 {
		b = append(b, ']')
	}
	reads := func(line []byte) bool {
		in, err := readLine(line)
		return err == nil && bytes.Equal(in.payload, l.payload)
	}
	if line := append(slices.Clone(b), "}\n"...); reads(line) {
		return line, nil
	}
	if line := slices.Clone(exact()); reads(line) {
		return line, nil
	}
	b = b[:head]
	return exact(), nil
}

// imported is a line of an export that was read.
type imported struct {
	queue, id string
	payload   []byte
}

// readLine reads a line of an export.
func readLine(text []byte) (imported, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var line map[string]any
	if err := d.Decode(&line); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the line is cut off")
		}
		return imported{}, fmt.Errorf("isn't JSON: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return imported{}, errors.New("has more than one JSON object")
	}
	var in imported
	if v, _ := line["hopback"].(json.Number); v.String() != "1" {
		return in, fmt.Errorf("isn't a line of an export in format %d; use a file that hopback exported", lineVersion)
	}
	var ok bool
	if in.queue, ok = line["queue"].(string); !ok {
		return in, errors.New("has no queue")
	}
	if in.id, ok = line["id"].(string); !ok || len(in.id) != 24 {
		return in, errors.New("has no id")
	}
	encoding, has := line["encoding"]
	for _, k := range []string{"hopback", "queue", "id", "encoding"} {
		delete(line, k)
	}
	var exact []byte
	if has {
		s, ok := encoding.(string)
		var err error
		if exact, err = base64.StdEncoding.Strict().DecodeString(s); !ok || err != nil {
			return in, errors.New("encoding isn't base64")
		}
		if len(line) == 0 { // the line has only the encoding
			in.payload = exact
			return in, nil
		}
	}
	payload, err := encodeLine(line)
	if err != nil {
		return in, err
	}
	in.payload = payload
	if has {
		if same, err := canonical(exact); err == nil && bytes.Equal(same, payload) {
			in.payload = exact
		}
	}
	return in, nil
}

// canonical is a message as encodeLine would encode it.
func canonical(payload []byte) ([]byte, error) {
	sections, err := frames.SplitSections(payload)
	if err != nil {
		return nil, err
	}
	var out []byte
	for _, s := range sections {
		v, err := s.Value()
		if err != nil {
			return nil, err
		}
		if l, ok := v.(frames.List); ok && (s.Code == frames.SectionHeader || s.Code == frames.SectionProperties) {
			v = trimmed(l)
		}
		if out, err = frames.AppendValue(out, frames.Described{Descriptor: uint64(s.Code), Value: v}); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// trimmed leaves out absent fields at the end.
func trimmed(l frames.List) frames.List {
	for len(l) > 0 && l[len(l)-1] == nil {
		l = l[:len(l)-1]
	}
	return l
}

// encodeLine encodes the sections that a line has.
func encodeLine(line map[string]any) ([]byte, error) {
	var out []byte
	var err error
	add := func(code int, v any) {
		if err == nil {
			out, err = frames.AppendValue(out, frames.Described{Descriptor: uint64(code), Value: v})
		}
	}
	named := func(code int) error {
		name := sectionNames[code]
		v, has := line[name]
		if !has {
			return nil
		}
		delete(line, name)
		var section any
		var bad error
		switch code {
		case frames.SectionHeader:
			section, bad = readFields(v, headerFields)
		case frames.SectionProperties:
			section, bad = readFields(v, propertyFields)
		default:
			section, bad = readPairs(v)
		}
		if bad != nil {
			return fmt.Errorf("%s: %w", name, bad)
		}
		add(code, section)
		return nil
	}
	for code := frames.SectionHeader; code < frames.SectionData; code++ {
		if err := named(code); err != nil {
			return nil, err
		}
	}
	body, _ := line["body"].([]any)
	delete(line, "body")
	if len(body) == 0 {
		return nil, errors.New("has no body")
	}
	kind := 0
	for i, e := range body {
		code, v, bad := readBody(e)
		if bad == nil && i > 0 && (code != kind || code == frames.SectionValue) {
			bad = errors.New("isn't of the same kind as the part before it")
		}
		if bad != nil {
			return nil, fmt.Errorf("body[%d]: %w", i, bad)
		}
		kind = code
		add(code, v)
	}
	if err := named(frames.SectionFooter); err != nil {
		return nil, err
	}
	for k := range line {
		return nil, fmt.Errorf("has the unknown member %.40q", k)
	}
	return out, err
}

func readBody(e any) (code int, v any, err error) {
	m, ok := e.(map[string]any)
	if !ok || len(m) != 1 {
		return 0, nil, errors.New(`isn't one of {"text":...}, {"data":...}, {"sequence":...} and {"value":...}`)
	}
	if s, ok := m["text"].(string); ok {
		return frames.SectionData, []byte(s), nil
	}
	if s, ok := m["data"].(string); ok {
		v, err = scalarNamed["binary"].read(s)
		return frames.SectionData, v, err
	}
	if l, ok := m["sequence"].([]any); ok {
		out, err := readList(l)
		return frames.SectionSequence, frames.List(out), err
	}
	if value, ok := m["value"]; ok {
		v, err = readValue(value)
		return frames.SectionValue, v, err
	}
	return 0, nil, errors.New(`isn't one of {"text":...}, {"data":...}, {"sequence":...} and {"value":...}`)
}

func readFields(v any, names []string) (frames.List, error) {
	m, ok := v.(map[string]any)
	if !ok {
		return nil, errors.New("isn't an object")
	}
	l := make(frames.List, len(names))
	for k, e := range m {
		i := slices.Index(names, k)
		if i < 0 {
			return nil, fmt.Errorf("has no field %.40q", k)
		}
		out, err := readValue(e)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", k, err)
		}
		l[i] = out
	}
	return trimmed(l), nil
}
