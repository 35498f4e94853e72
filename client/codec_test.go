package client

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

type (
	endless *endless
	itself  struct{ C chan int }
	textual func()
	body    []byte
	inlined struct{ C chan int }
	shadows struct {
		inlined
		C string
	}
	hidden struct {
		F    func()   `json:"-"`
		G    func()   `json:",omitzero"`
		H    chan int `json:"-"`
		List []hidden
	}
)

func (itself) MarshalJSON() ([]byte, error)  { return []byte("1"), nil }
func (*itself) UnmarshalJSON([]byte) error   { return nil }
func (textual) MarshalText() ([]byte, error) { return nil, errors.New("not this one") }
func (*textual) UnmarshalText([]byte) error  { return nil }

// nothing is a codec without a TypeChecker.
type nothing struct{}

func (nothing) Encode(any, *Message) error { return nil }
func (nothing) Decode(*Message, any) error { return nil }

func TestCodecsRefuseTypesThatTheyCanNeverCarry(t *testing.T) {
	for name, c := range map[string]struct {
		encode, decode error
		encodes        bool
		decodes        bool
	}{
		"JSON struct":                {checkEncode[hidden](JSONCodec{}), checkDecode[hidden](JSONCodec{}), true, true},
		"JSON pointer":               {checkEncode[*hidden](JSONCodec{}), checkDecode[*hidden](JSONCodec{}), true, true},
		"JSON time":                  {checkEncode[time.Time](JSONCodec{}), checkDecode[time.Time](JSONCodec{}), true, true},
		"JSON any":                   {checkEncode[any](JSONCodec{}), checkDecode[any](JSONCodec{}), true, true},
		"JSON interface":             {checkEncode[io.Reader](JSONCodec{}), checkDecode[io.Reader](JSONCodec{}), true, false},
		"JSON map":                   {checkEncode[map[int]string](JSONCodec{}), checkDecode[map[int]string](JSONCodec{}), true, true},
		"JSON endless":               {checkEncode[endless](JSONCodec{}), checkDecode[endless](JSONCodec{}), true, true},
		"JSON marshals itself":       {checkEncode[itself](JSONCodec{}), checkDecode[itself](JSONCodec{}), true, true},
		"JSON list of those":         {checkEncode[[]*itself](JSONCodec{}), checkDecode[[]*itself](JSONCodec{}), true, true},
		"JSON text":                  {checkEncode[textual](JSONCodec{}), checkDecode[textual](JSONCodec{}), true, true},
		"JSON shadowed":              {checkEncode[shadows](JSONCodec{}), checkDecode[shadows](JSONCodec{}), true, true},
		"JSON field":                 {checkEncode[inlined](JSONCodec{}), checkDecode[inlined](JSONCodec{}), false, true},
		"JSON field behind pointers": {checkEncode[[]*inlined](JSONCodec{}), checkDecode[[]*inlined](JSONCodec{}), false, true},
		"JSON channel":               {checkEncode[chan int](JSONCodec{}), checkDecode[chan int](JSONCodec{}), false, false},
		"JSON function":              {checkEncode[func()](JSONCodec{}), checkDecode[func()](JSONCodec{}), false, false},
		"JSON complex":               {checkEncode[complex128](JSONCodec{}), checkDecode[complex128](JSONCodec{}), false, false},
		"JSON list of functions":     {checkEncode[[]func()](JSONCodec{}), checkDecode[[]func()](JSONCodec{}), false, false},
		"JSON message":               {checkEncode[*Message](JSONCodec{}), nil, true, true},
		"raw bytes":                  {checkEncode[[]byte](RawCodec{}), checkDecode[[]byte](RawCodec{}), true, true},
		"raw string":                 {checkEncode[string](RawCodec{}), checkDecode[string](RawCodec{}), true, true},
		"raw any":                    {checkEncode[any](RawCodec{}), checkDecode[any](RawCodec{}), true, false},
		"raw named":                  {checkEncode[body](RawCodec{}), checkDecode[body](RawCodec{}), false, false},
		"raw struct":                 {checkEncode[hidden](RawCodec{}), checkDecode[hidden](RawCodec{}), false, false},
		"raw message":                {checkEncode[*Message](RawCodec{}), checkDecode[*Message](RawCodec{}), true, false},
		"a codec that doesn't say":   {checkEncode[chan int](nothing{}), checkDecode[chan int](nothing{}), true, true},
	} {
		for what, is := range map[string]struct {
			err error
			ok  bool
		}{"encode": {c.encode, c.encodes}, "decode": {c.decode, c.decodes}} {
			if is.ok {
				assert.NoError(t, is.err, "%s: %s", name, what)
			} else {
				assert.ErrorAs(t, is.err, new(*argument.Error), "%s: %s", name, what)
			}
		}
	}
}

func TestWrongTypesFailAtTheStart(t *testing.T) {
	conn := &Conn{} // nobody may use it
	_, err := NewPublisher[func()](t.Context(), conn, address.Queue("q"), PublisherConfig{})
	require.ErrorAs(t, err, new(*argument.Error))
	assert.EqualError(t, err, `hopback: value = "func()" can't be encoded (JSON can't hold a func()); publish values of another type, or use another PublisherConfig.Codec`)
	_, err = NewPublisher[hidden](t.Context(), conn, address.Queue("q"), PublisherConfig{Codec: RawCodec{}})
	require.ErrorAs(t, err, new(*argument.Error))

	h := Typed(RawCodec{}, func(context.Context, hidden) error { panic("called") })
	require.ErrorAs(t, conn.Consume(t.Context(), "q", h, ConsumerConfig{}), new(*argument.Error))
	require.ErrorAs(t, Prepare(t.Context(), Timeout(time.Second)(h), Start{}), new(*argument.Error))
	for _, h := range []Handler{h, Typed[int](nil, nil), Typed[int](JSONCodec{}, nil)} {
		o, ok := h.Handle(t.Context(), NewDelivery("q", NewMessage([]byte("1")))).(Requeue)
		assert.True(t, ok && o.Failed, "nobody prepared it: the message isn't at fault")
	}
}
