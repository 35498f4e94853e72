package client

import (
	"bytes"
	"encoding/hex"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// onChannel is a frame of a performative that was seen on the wire.
func onChannel(channel uint16, body string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(body, " ", ""))
	if err != nil {
		panic(err)
	}
	frame := performative(b[2], channel, len(b)-3)
	copy(frame[8:], b)
	return frame
}

// What RabbitMQ 4.3.6 and 4.0.5 have sent, as a session began, with its window open,
// and under an alarm.
const (
	begin43     = "00 53 11 c0 14 08 60 00 00 43 70 00 00 01 90 70 ff ff ff ff 52 ff 40 40 40"
	begin40     = "00 53 11 c0 18 08 60 00 00 70 ff ff ff fc 70 00 00 01 90 70 ff ff ff ff 52 ff 40 40 40"
	blocked43   = "00 53 11 c0 10 08 60 00 01 43 43 70 ff ff ff ff 52 ff 40 40 40"
	blocked40   = "00 53 11 c0 14 08 60 00 01 70 ff ff ff fc 43 70 ff ff ff ff 52 ff 40 40 40"
	flow43      = "00 53 13 c0 13 07 52 55 70 00 00 01 3b 43 70 ff ff ff ff 43 52 55 52 aa"
	small40     = "00 53 13 c0 18 0b 52 aa 52 e6 70 ff ff ff fc 70 ff ff ff ff 43 52 aa 52 aa 40 40 40 40"
	alarm43     = "00 53 13 c0 0d 04 70 00 00 ec f2 43 43 70 ff ff ff ff"
	alarm40     = "00 53 13 c0 18 0b 70 00 00 93 c1 43 70 ff ff ff fc 70 ff ff ff ff 40 40 40 40 40 40 40"
	over43      = "00 53 13 c0 11 04 70 00 00 01 90 70 00 00 01 90 43 70 ff ff ff ff"
	list32      = "00 53 13 d0 00 00 00 0e 00 00 00 04 43 43 43 43"
	noWindow    = "00 53 13 c0 03 02 43 40"
	notOurs     = "00 53 13 a1 01 00"
	cutOffFlow  = "00 53 13 c0 03 02 43"
	emptyFlow   = "00 53 13 45"
	cutOffBegin = "00 53 11 c0 10 08 60 00"
)

func TestIncomingWindowsAreRead(t *testing.T) {
	for body, want := range map[string]int{
		begin43: 400, begin40: 400, blocked43: 0, blocked40: 0, flow43: 315, small40: 230, alarm43: 0, alarm40: 0, over43: 400, list32: 0,
		noWindow: -1, notOurs: -1, cutOffFlow: -1, emptyFlow: -1, cutOffBegin: -1,
	} {
		n, ok := incomingWindow(onChannel(0, body))
		if want < 0 {
			assert.False(t, ok, body)
			continue
		}
		assert.True(t, ok, body)
		assert.EqualValues(t, want, n, body)
	}
}

func TestIntakesFollowTheFrames(t *testing.T) {
	for piece := 1; piece < 400; piece = piece*2 + 1 {
		c := &channels{}
		var told []bool
		c.intakes.tell = func(blocked bool) { told = append(told, blocked) }
		begin := func(channel uint16) *intake {
			c.Conn = &recorder{}
			_, err := c.Write(onChannel(channel, begin43))
			require.NoError(t, err)
			return c.intakes.last()
		}
		arrives := func(frames ...[]byte) {
			stream := slices.Concat(frames...)
			c.Conn = &recorder{reads: bytes.NewReader(stream), piece: piece}
			got, err := io.ReadAll(c)
			require.NoError(t, err)
			require.Equal(t, stream, got)
		}
		one, two := begin(0), begin(7)
		require.NotSame(t, one, two)
		large := performative(0x14, 0, 700)
		arrives([]byte("AMQP\x00\x01\x00\x00"), onChannel(0, begin43), onChannel(7, begin40), large, onChannel(0, flow43))
		assert.False(t, one.now().blocked)
		assert.Empty(t, told)

		changed := two.now().changed
		arrives(onChannel(0, alarm43), large, onChannel(7, alarm40), onChannel(7, alarm43))
		assert.True(t, one.now().blocked)
		assert.True(t, two.now().blocked)
		assert.NotZero(t, two.now().since)
		<-changed
		assert.Equal(t, []bool{true}, told, "once for both")

		three := begin(8)
		arrives(onChannel(8, blocked43))
		assert.True(t, three.now().blocked, "a session that begins under an alarm")

		arrives(onChannel(0, over43), large, onChannel(8, over43))
		assert.False(t, one.now().blocked)
		assert.False(t, three.now().blocked)
		assert.Len(t, told, 1, "one still is")
		arrives(performative(frameEnd, 7, 3))
		assert.Equal(t, []bool{true, false}, told, "a session that has ended isn't")

		arrives(onChannel(0, alarm43))
		assert.Equal(t, []bool{true, false, true}, told)
		c.Conn = closedConn{}
		require.NoError(t, c.Close())
		assert.Equal(t, []bool{true, false, true, false}, told, "nor is one whose connection has ended")
		require.NoError(t, c.Close())
		assert.Len(t, told, 4)
	}
}

type closedConn struct{ net.Conn }

func (closedConn) Close() error { return nil }

func FuzzChannels(f *testing.F) {
	for _, body := range []string{begin43, begin40, blocked43, alarm43, alarm40, over43, list32, noWindow, notOurs, cutOffFlow, emptyFlow, cutOffBegin} {
		f.Add(onChannel(3, body), uint8(5))
		f.Add(slices.Concat([]byte("AMQP\x03\x01\x00\x00"), onChannel(3, body), performative(frameEnd, 3, 3)), uint8(200))
	}
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		c := &channels{Conn: &recorder{}}
		blocked := 0
		c.intakes.tell = func(b bool) {
			if b {
				blocked++
			} else {
				blocked--
			}
			if blocked < 0 || blocked > 1 {
				t.Error("told twice of the same")
			}
		}
		for channel := range uint16(8) {
			_, _ = c.Write(onChannel(channel, begin43))
		}
		c.Conn = &recorder{reads: bytes.NewReader(stream), piece: int(piece) + 1}
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, stream) {
			t.Errorf("what was read isn't what came: %v", err)
		}
		c.Conn = closedConn{}
		_ = c.Close()
		if blocked != 0 {
			t.Error("blocked for ever")
		}
	})
}
