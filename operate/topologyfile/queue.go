package topologyfile

import (
	"maps"
	"reflect"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/declare"
)

const (
	typeKey       = "type"
	deadLetterKey = "dead-letter"
	// singleActiveKey is a key that fair queues don't have.
	singleActiveKey = "single-active-consumer"
)

// kinds are the types of queues, the default one first.
var kinds = []kind{
	kindOf("quorum", "A quorum queue, the default.", workKeys),
	kindOf("classic", "A classic queue, which has one replica.", classicKeys),
	kindOf("stream", "A stream.", streamKeys),
	kindOf("raw", "Any queue, by its arguments.", rawKeys),
}

// kind is a type of queue. read and write don't know the queue's name.
type kind struct {
	name   string
	of     reflect.Type
	fields []goField
	schema map[string]any
	read   func(r *reader, a at) (declare.Queue, bool)
	write  func(declare.Queue) *yaml.Node // nil for a queue of another type
}

func kindOf[Q declare.Queue](name, about string, keys []key[Q]) kind {
	schema := objectSchema(keys)
	properties := maps.Clone(schema["properties"].(map[string]any))
	properties[typeKey] = map[string]any{"const": name, "description": "The type of the queue: quorum (default), classic, stream or raw."}
	schema["properties"], schema["description"] = properties, about
	var required []string
	if name != "quorum" {
		required = append(required, typeKey)
	}
	if _, gives := properties[deadLetterKey]; gives {
		required = append(required, deadLetterKey)
	}
	schema["required"], schema["type"] = required, "object"
	typed := append([]key[Q]{{name: typeKey, read: func(*reader, at, *Q) {}, write: func(*Q) *yaml.Node {
		if name == "quorum" {
			return nil
		}
		return textNode(name)
	}}}, keys...)
	return kind{
		name: name, of: reflect.TypeFor[Q](), fields: goFields(keys), schema: schema,
		read: func(r *reader, a at) (declare.Queue, bool) { return object(typed).read(r, a) },
		write: func(q declare.Queue) *yaml.Node {
			v, ok := q.(Q)
			if !ok {
				return nil
			}
			return writeKeys(typed, &v)
		},
	}
}

// anyQueue is a queue of any type, without its name.
var anyQueue = shape[declare.Queue]{
	schema: map[string]any{"oneOf": schemasOf(kinds)},
	read: func(r *reader, a at) (declare.Queue, bool) {
		k := kinds[0]
		if n := a.node; n.Kind == yaml.MappingNode {
			for i := 0; i+1 < len(n.Content); i += 2 {
				if n.Content[i].Value != typeKey {
					continue
				}
				names := make([]string, len(kinds))
				for i := range kinds {
					names[i] = kinds[i].name
				}
				name, ok := word(names...).read(r, a.key(n.Content[i+1], typeKey))
				if !ok {
					return nil, false
				}
				for _, other := range kinds {
					if other.name == name {
						k = other
					}
				}
			}
		}
		return k.read(r, a)
	},
	write: func(q declare.Queue) *yaml.Node {
		for _, k := range kinds {
			if n := k.write(q); n != nil {
				return n
			}
		}
		return nil
	},
}

func schemasOf(kinds []kind) []any {
	list := make([]any, len(kinds))
	for i, k := range kinds {
		list[i] = k.schema
	}
	return list
}

// fieldsOf are the fields of a queue.
func fieldsOf(q declare.Queue) []goField {
	return kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.of == reflect.TypeOf(q) })].fields
}

// withName gives a queue its name.
func withName(q declare.Queue, name string) declare.Queue {
	named := reflect.New(reflect.TypeOf(q)).Elem()
	named.Set(reflect.ValueOf(q))
	named.FieldByName("Name").SetString(name)
	return named.Interface().(declare.Queue)
}

// asValue is what a pointer to a queue points to: both are a declare.Queue.
func asValue(q declare.Queue) declare.Queue {
	return reflect.Indirect(reflect.ValueOf(q)).Interface().(declare.Queue)
}
