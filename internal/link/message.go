package link

import (
	"fmt"
	"slices"

	"github.com/Azure/go-amqp"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/message"
)

// arrived decodes a delivery.
func arrived(d *engine.Delivery) Arrival {
	x := &struct {
		message.Decoded
		tag [32]byte
	}{}
	a := Arrival{Msg: &x.Message, ID: d.ID, Size: d.Size, Kept: len(d.Payload)}
	switch {
	case d.Size > uint64(len(d.Payload)):
		a.Unreadable = true
		if x.Decode(frames.Head(d.Payload)) != nil {
			x.Message = amqp.Message{}
		}
	case x.Decode(d.Payload) != nil:
		x.Message = amqp.Message{Data: [][]byte{slices.Clone(d.Payload)}}
		a.Unreadable = true
	}
	x.DeliveryTag = append(x.tag[:0], d.Tag...)
	return a
}

// annotationMap returns annotations in the form that frames encodes.
func annotationMap(all amqp.Annotations) (frames.Map, error) {
	if len(all) == 0 {
		return nil, nil
	}
	m := make(frames.Map, 0, len(all))
	for k, v := range all {
		key, ok := k.(string)
		if !ok || !direct(v) {
			return encodedMap(all)
		}
		m = append(m, frames.Entry{Key: frames.Symbol(key), Value: v})
	}
	return m, nil
}

// direct reports whether go-amqp and frames encode values of v's type in the same way.
func direct(v any) bool {
	switch v.(type) {
	case string, bool, int64, int32, uint64, uint32:
		return true
	}
	return false
}

// encodedMap is annotationMap for values of any type: go-amqp encodes them, and frames decodes the result.
func encodedMap(all amqp.Annotations) (frames.Map, error) {
	encoded, err := (&amqp.Message{Annotations: all}).MarshalBinary()
	if err != nil {
		return nil, fmt.Errorf("annotations: %w", err)
	}
	m, err := frames.DecodeMessage(encoded)
	if err != nil {
		return nil, fmt.Errorf("annotations: %w", err)
	}
	return m.Annotations, nil
}
