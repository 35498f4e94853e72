package client_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/frames"
)

// What a client still sends for a session that the broker has ended hits the next session on
// its channel, if that has begun. go-amqp begins it, so internal/frames holds it back.
func TestLateFramesOfASessionHitTheNextOne(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			t.Skip("RabbitMQ 4.0 can lose a begin that comes so soon after an end")
		}
		p := speak(t, s.AMQPURL())
		say := func(body frames.Performative) frames.Frame {
			p.write(step{channel: 1, body: body}.bytes(t))
			return p.next()
		}
		begin := &frames.Begin{IncomingWindow: 100, OutgoingWindow: 100}
		late := &frames.Flow{NextIncomingID: frames.Some[uint32](7), IncomingWindow: 100, OutgoingWindow: 100}
		p.write(step{body: &frames.Open{ContainerID: "late", Hostname: "vhost:" + s.VHost}}.bytes(t))
		require.IsType(t, &frames.Open{}, p.next().Body)
		for range 3 {
			require.IsType(t, &frames.Begin{}, say(begin).Body)
			end, ok := say(late).Body.(*frames.End)
			require.True(t, ok)
			assert.Equal(t, frames.Symbol("amqp:session:window-violation"), end.Error.Condition)
			assert.Equal(t, "next-incoming-id from FLOW (7) leads next-outgoing-id (0)", end.Error.Description)
		}
		require.IsType(t, &frames.Begin{}, say(begin).Body)
		end, ok := say(&frames.End{}).Body.(*frames.End)
		require.True(t, ok)
		assert.Nil(t, end.Error, "the last session's end is taken for this one's")
	})
}
