package dedicated

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/userid"
)

func TestSigned(t *testing.T) {
	t.Parallel()
	body, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(frames.SectionData), Value: []byte("b")})
	require.NoError(t, err)
	bob := userid.NewLogin("bob", false)
	for name, c := range map[string]struct {
		m     *frames.Message
		login *userid.Login
		want  any // the annotation; nil: the message isn't changed
	}{
		"no properties":  {&frames.Message{Body: body}, bob, nil},
		"none":           {&frames.Message{Properties: &frames.Properties{MessageID: "1"}, Body: body}, bob, nil},
		"the user's own": {&frames.Message{Properties: &frames.Properties{UserID: []byte("bob")}, Body: body}, bob, nil},
		"an impersonator": {
			&frames.Message{Properties: &frames.Properties{UserID: []byte("ada")}, Body: body}, userid.NewLogin("bob", true), nil,
		},
		"another's": {&frames.Message{Properties: &frames.Properties{MessageID: "1", UserID: []byte("ada")}, Body: body}, bob, "ada"},
		"not UTF-8": {&frames.Message{Properties: &frames.Properties{UserID: []byte{0xff}}, Body: body}, bob, []byte{0xff}},
		"a forged one in the annotation": {&frames.Message{
			Header:      &frames.MessageHeader{Durable: true, Priority: frames.Some(uint8(7))},
			Annotations: frames.Map{{Key: frames.Symbol("x-opt-a"), Value: int64(1)}, {Key: frames.Symbol(userid.Annotation), Value: "root"}},
			Properties:  &frames.Properties{UserID: []byte("ada"), Subject: frames.Some("s")}, ApplicationProperties: frames.Map{{Key: "k", Value: int32(1)}}, Body: body,
		}, bob, "ada"},
	} {
		payload, err := c.m.Append(nil)
		require.NoError(t, err)
		before := append([]byte(nil), payload...)
		out, err := signed(c.login, payload)
		require.NoError(t, err)
		assert.Equal(t, before, payload, "%s: it isn't changed", name)
		if c.want == nil {
			assert.Equal(t, payload, out, name)
			continue
		}
		got, err := frames.DecodeMessage(out)
		require.NoError(t, err, name)
		was, err := frames.DecodeMessage(payload)
		require.NoError(t, err)
		id, _ := got.Annotations.Get(userid.Annotation)
		assert.Equal(t, c.want, id, name)
		assert.Nil(t, got.Properties.UserID, name)
		was.Annotations, was.Properties.UserID = was.Annotations.Set(userid.Annotation, c.want), nil
		assert.Equal(t, was, got, name)
	}
	out, err := signed(bob, []byte("no message"))
	require.NoError(t, err)
	assert.Equal(t, "no message", string(out))
}
