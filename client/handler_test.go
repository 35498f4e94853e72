package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
)

type order struct{ ID string }

func handle(h Handler, m *Message) error {
	d := NewDelivery("q", m)
	return h.Handle(WithDelivery(context.Background(), d), d)
}

func TestJSONHandlerDecodesBodiesOfAllKinds(t *testing.T) {
	for name, m := range map[string]*Message{
		"one data section":   {Data: [][]byte{[]byte(`{"ID":"o-1"}`)}},
		"many data sections": {Data: [][]byte{[]byte(`{"ID":`), nil, []byte(`"o-1"}`)}},
		"a string":           {Value: `{"ID":"o-1"}`},
		"binary":             {Value: []byte(`{"ID":"o-1"}`)},
	} {
		var got order
		require.NoError(t, handle(JSON(func(_ context.Context, o order) error { got = o; return nil }), m), name)
		assert.Equal(t, order{"o-1"}, got, name)
	}
}

func TestTypedHandlerDeadLettersWhatCannotBeDecoded(t *testing.T) {
	h := JSON(func(context.Context, order) error { t.Error("the handler was called"); return nil })
	for name, m := range map[string]*Message{
		"no body": {}, "not JSON": {Data: [][]byte{[]byte("{")}}, "an empty body": {Data: [][]byte{{}}}, "another type": {Data: [][]byte{[]byte(`{"ID":1}`)}},
		"a null": {Value: amqp.Null{}}, "a number": {Value: int64(1)}, "a sequence": {Sequence: [][]any{{1}}},
	} {
		o, ok := OutcomeOf(handle(h, m)).(DeadLetter)
		require.True(t, ok, name)
		assert.Equal(t, ReasonUndecodable, o.Reason, name)
		assert.Error(t, o.Err, name)
	}
	panics := Typed(panicCodec{}, func(context.Context, order) error { return nil })
	o, ok := OutcomeOf(handle(panics, NewMessage(nil))).(DeadLetter)
	require.True(t, ok)
	assert.ErrorContains(t, o.Err, "panicked")
}

type panicCodec struct{ JSONCodec }

func (panicCodec) Decode(*Message, any) error { panic("hostile body") }

func TestRawCodecPassesBytes(t *testing.T) {
	var b []byte
	var s string
	m := &Message{}
	require.NoError(t, RawCodec{}.Encode([]byte("bytes"), m))
	require.NoError(t, RawCodec{}.Decode(m, &b))
	require.NoError(t, RawCodec{}.Encode("text", m))
	require.NoError(t, RawCodec{}.Decode(m, &s))
	assert.Equal(t, "bytes", string(b))
	assert.Equal(t, "text", s)
	require.Error(t, RawCodec{}.Encode(1, m))
	require.Error(t, RawCodec{}.Decode(m, new(int)))
	require.ErrorIs(t, RawCodec{}.Decode(&Message{}, &b), ErrNoBytes)
	_, err := Body(nil)
	require.ErrorIs(t, err, ErrNoBytes)
	require.NoError(t, JSONCodec{}.Encode(order{"o"}, m))
	assert.Equal(t, contentTypeJSON, *m.Properties.ContentType)
	require.Error(t, JSONCodec{}.Encode(make(chan int), m))
}

func TestMiddlewareRunsInItsOrderAndPassesPrepareOn(t *testing.T) {
	var trace []string
	mw := func(name string) Middleware {
		return func(h Handler) Handler {
			return Wrap(h, func(ctx context.Context, d *Delivery) error {
				trace = append(trace, name)
				return h.Handle(ctx, d)
			})
		}
	}
	h := Chain(mw("outer"), nil, mw("inner"), Recover(), Timeout(time.Second))(Typed[order](nil, nil))
	require.ErrorAs(t, Prepare(t.Context(), h, Start{}), new(*argument.Error))
	h = Chain(mw("outer"), nil, mw("inner"))(HandlerFunc(func(context.Context, *Delivery) error { return io.EOF }))
	require.NoError(t, Prepare(t.Context(), h, Start{}))
	require.ErrorIs(t, handle(h, NewMessage(nil)), io.EOF)
	assert.Equal(t, []string{"outer", "inner"}, trace)
}

func TestRecoverTurnsAPanicIntoAnError(t *testing.T) {
	recovered := func(v any) *failure.PanicError {
		err := handle(Recover()(HandlerFunc(func(context.Context, *Delivery) error { panic(v) })), NewMessage(nil))
		var p *failure.PanicError
		require.ErrorAs(t, err, &p)
		return p
	}
	assert.EqualError(t, recovered("boom"), "handler panicked: boom")
	assert.Contains(t, string(recovered("boom").Stack), "TestRecover")
	require.ErrorIs(t, recovered(io.EOF), io.EOF)
	assert.ErrorAs(t, recovered(nil), new(*runtime.PanicNilError))
	require.NoError(t, handle(Recover()(returns(nil)), NewMessage(nil)))
}

func TestTimeoutEndsTheHandlersContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		heeds := HandlerFunc(func(ctx context.Context, _ *Delivery) error {
			select {
			case <-ctx.Done():
				return fmt.Errorf("paying: %w", ctx.Err())
			case <-time.After(time.Hour):
				return nil
			}
		})
		start := time.Now()
		err := handle(Timeout(time.Second)(heeds), NewMessage(nil))
		require.ErrorIs(t, err, ErrHandlerTimeout)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, time.Second, time.Since(start))

		require.NoError(t, handle(Timeout(0)(heeds), NewMessage(nil)), "no limit")
		require.NoError(t, handle(Timeout(-1)(heeds), NewMessage(nil)), "no limit")
		err = handle(Timeout(time.Second)(returns(context.DeadlineExceeded)), NewMessage(nil))
		require.NotErrorIs(t, err, ErrHandlerTimeout, "another's deadline")
	})
}

func TestDeliveryFromFindsTheDelivery(t *testing.T) {
	_, ok := DeliveryFrom(context.Background())
	assert.False(t, ok)
	_, ok = DeliveryFrom(WithDelivery(context.Background(), nil))
	assert.False(t, ok)
	type key struct{}
	type other struct{}
	d := NewDelivery("q", full())
	ctx := context.WithValue(WithDelivery(context.WithValue(context.Background(), key{}, 1), d), other{}, 2)
	got, ok := DeliveryFrom(ctx)
	assert.True(t, ok)
	assert.Same(t, d, got)
	assert.Equal(t, 1, ctx.Value(key{}))
	assert.Equal(t, uint32(3), d.DeliveryCount())
	assert.Equal(t, "text", d.Property("s"))
	assert.Equal(t, "a", d.Annotation("x-opt-tenant"))
	bare := NewDelivery("q", &Message{})
	assert.Zero(t, bare.DeliveryCount())
	assert.Nil(t, bare.Property("s"))
	assert.Nil(t, bare.Annotation("s"))
}

func TestOutcomesAreErrorsWithACause(t *testing.T) {
	for _, o := range []Outcome{
		Requeue{Err: io.EOF}, DeadLetter{Reason: "r", Err: io.EOF}, Modify{Err: io.EOF}, Forward{To: address.Queue("q"), Err: io.EOF},
	} {
		require.ErrorIs(t, o, io.EOF)
		assert.ErrorContains(t, o, "EOF")
		assert.Equal(t, o, OutcomeOf(fmt.Errorf("wrapped: %w", o)))
	}
	assert.Nil(t, OutcomeOf(nil))
	assert.Equal(t, Requeue{Failed: true, Err: io.EOF}, OutcomeOf(io.EOF))
	assert.NotPanics(t, func() { _ = Requeue{Err: hostileError{func() string { panic("") }}}.Error() })
}

func TestPublisherLeavesTheCallersMessageAlone(t *testing.T) {
	p := &Publisher[*Message]{codec: JSONCodec{}}
	given := full()
	m, err := p.message(given)
	require.NoError(t, err)
	PublishTo(address.Queue("elsewhere"))(m)
	m.Properties.MessageID = nil
	complete(m)
	assert.Equal(t, full(), given)
	_, err = p.message(nil)
	require.ErrorAs(t, err, new(*argument.Error))
	PublishTo(address.Queue(""))(m)
	assert.Nil(t, m.Properties.To, "Publish refuses it")

	_, err = (&Publisher[chan int]{codec: JSONCodec{}}).message(make(chan int))
	require.ErrorAs(t, err, new(*argument.Error))
	_, err = (&Publisher[panicMarshaler]{codec: JSONCodec{}}).message(panicMarshaler{})
	require.ErrorAs(t, err, new(*argument.Error))
}

type panicMarshaler struct{}

func (panicMarshaler) MarshalJSON() ([]byte, error) { panic("boom") }

var _ json.Marshaler = panicMarshaler{}

func TestTextsAreClippedBetweenCharacters(t *testing.T) {
	assert.Equal(t, "añ", failure.Clip("añb", 3))
	assert.Equal(t, "a", failure.Clip("añb", 2))
	assert.Equal(t, "", failure.Clip("ñ", 1))
	assert.Equal(t, "a?", failure.Clip("a\xff\xfe", 10))
	assert.Equal(t, "x", ErrorText(errors.New("x")))
	assert.Contains(t, ErrorText((*nilCause)(nil)), "*client.nilCause")
}

func FuzzClip(f *testing.F) {
	f.Add("añb", 2)
	f.Add("\xff\xff\xff\xff\xff", 3)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		if limit < 0 || limit > 1<<20 {
			return
		}
		got := failure.Clip(s, limit)
		assert.LessOrEqual(t, len(got), limit)
		assert.True(t, utf8.ValidString(got))
		if utf8.ValidString(s) {
			assert.True(t, strings.HasPrefix(s, got))
			assert.True(t, len(got) == len(s) || len(got) > limit-utf8.UTFMax)
		}
		text := ErrorText(hostileError{func() string { return s }})
		assert.LessOrEqual(t, len(text), ErrorTextLimit)
		assert.NoError(t, checkModified(map[string]any{AnnotationError: text}))
	})
}

func BenchmarkJSONHandler(b *testing.B) {
	h := JSON(func(context.Context, order) error { return nil })
	m := NewMessage([]byte(`{"ID":"o-1"}`))
	d := NewDelivery("q", m)
	ctx := WithDelivery(context.Background(), d)
	b.ReportAllocs()
	for b.Loop() {
		if err := h.Handle(ctx, d); err != nil {
			b.Fatal(err)
		}
	}
}
