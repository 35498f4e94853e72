package web

import (
	"bytes"
	"encoding/json"
	"strconv"
	"time"
)

// field is a property or an annotation, for people.
type field struct {
	Key, Value, Type string
}

const maxFields = 200

// fieldsOf reads a section in the JSON form of a desk.DeadLetter: pairs, or an object.
func fieldsOf(raw json.RawMessage) (fields []field, more bool) {
	if len(raw) == 0 {
		return nil, false
	}
	var pairs [][2]json.RawMessage
	if raw[0] == '{' {
		d := json.NewDecoder(bytes.NewReader(raw))
		_, _ = d.Token()
		for d.More() {
			key, err := d.Token()
			if err != nil {
				break
			}
			name, _ := json.Marshal(key)
			var v json.RawMessage
			if d.Decode(&v) != nil {
				break
			}
			pairs = append(pairs, [2]json.RawMessage{name, v})
		}
	} else if json.Unmarshal(raw, &pairs) != nil {
		return []field{{Key: "?", Value: cutAt(string(raw), 2000)}}, false
	}
	for i, p := range pairs {
		if i == maxFields {
			return fields, true
		}
		key, _ := valueText(p[0])
		value, kind := valueText(p[1])
		fields = append(fields, field{short(key), cutAt(value, 4000), kind})
	}
	return fields, false
}

// valueText is a value as text, with its AMQP type.
func valueText(raw json.RawMessage) (text, kind string) {
	var s string
	if json.Unmarshal(raw, &s) == nil && len(raw) > 0 && raw[0] == '"' {
		return s, "string"
	}
	var one map[string]json.RawMessage
	if json.Unmarshal(raw, &one) != nil || len(one) != 1 {
		switch string(raw) {
		case "true", "false":
			return string(raw), "boolean"
		}
		return string(raw), ""
	}
	for k, v := range one {
		kind = k
		switch {
		case json.Unmarshal(v, &s) == nil && len(v) > 0 && v[0] == '"':
			text = s
		default:
			text = string(v)
		}
	}
	if kind == "timestamp" {
		if ms, err := strconv.ParseInt(text, 10, 64); err == nil && ms > 0 && ms < 253402300800000 {
			text = time.UnixMilli(ms).UTC().Format("2006-01-02 15:04:05.000")
		}
	}
	return text, kind
}
