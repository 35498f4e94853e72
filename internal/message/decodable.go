package message

import (
	"errors"
	"fmt"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// decodable returns why an encoded message must not be passed to go-amqp's decoder, or why
// that can't decode it; nil if it's safe to try. What go-amqp makes of it may still be an
// error, for instance because a property is of the wrong type.
//
// go-amqp takes stack for each level of nesting, which ends the process when there are too
// many. It panics over map keys that Go can't hash, and reads neither char nor decimals. It
// doesn't compare the sizes of compound values with what is in them, as [frames.ReadValue]
// does: where they differ, elements that take no room in the message could take much memory.
// Nor does it bound the number of maps: a small one takes 100 times its bytes.
func decodable(b []byte) error {
	if at, err := frames.ReadValues(b, sectionDecodable); err != nil {
		return fmt.Errorf("at byte %d: %w", at, err)
	}
	return nil
}

func sectionDecodable(v any) error {
	d, ok := v.(frames.Described)
	if !ok {
		return fmt.Errorf("no section is %s", kind(v))
	}
	code, ok := d.Descriptor.(uint64)
	if !ok {
		return errors.New("a section's descriptor isn't a ulong")
	}
	if m, ok := d.Value.(frames.Map); ok && code == frames.SectionApplicationProperties {
		for _, x := range m {
			switch x.Key.(type) {
			case string, frames.Symbol:
			default:
				return fmt.Errorf("an application property has %s for a key", kind(x.Key))
			}
		}
	}
	return valueDecodable(d.Value)
}

func valueDecodable(v any) error {
	switch v := v.(type) {
	case frames.Char, frames.Decimal32, frames.Decimal64, frames.Decimal128:
		return fmt.Errorf("go-amqp can't decode %s", kind(v))
	case frames.Described:
		return errors.Join(valueDecodable(v.Descriptor), valueDecodable(v.Value))
	case frames.List:
		return valuesDecodable(v)
	case frames.Map:
		for _, x := range v {
			switch x.Key.(type) { // Go can't hash binaries, nor most described and compound values
			case []byte, frames.Described, frames.List, frames.Map, frames.Array:
				return fmt.Errorf("a map has %s for a key", kind(x.Key))
			}
			if err := errors.Join(valueDecodable(x.Key), valueDecodable(x.Value)); err != nil {
				return err
			}
		}
	case frames.Array:
		if v.Descriptor != nil {
			return errors.New("go-amqp can't decode an array of described values")
		}
		if len(v.Elements) > 0 && v.Shared() { // they are all the same, and there may be many in each section
			return valueDecodable(v.Elements[0])
		}
		return valuesDecodable(v.Elements)
	}
	return nil
}

func valuesDecodable(all []any) error {
	for _, v := range all {
		if err := valueDecodable(v); err != nil {
			return err
		}
	}
	return nil
}

// kind is what errors say of a value's type.
func kind(v any) string {
	switch name := strings.TrimPrefix(fmt.Sprintf("%T", v), "frames."); name {
	case "[]uint8":
		return "a binary"
	case "Array", "int32", "int64", "int8", "int16":
		return "an " + name
	default:
		return "a " + name
	}
}
