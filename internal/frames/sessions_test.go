package frames

import (
	"bytes"
	"encoding/hex"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

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
	list32      = "00 53 13 d0 00 00 00 08 00 00 00 04 43 43 43 43"
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
		var told []bool
		s := &sessions{tell: func(blocked bool) { told = append(told, blocked) }}
		begin := func(channel uint16) *Intake {
			wait, held := s.begin(channel, nil)
			assert.LessOrEqual(t, wait, time.Duration(0))
			assert.False(t, held)
			return s.last()
		}
		arrives := func(frames ...[]byte) {
			stream := slices.Concat(frames...)
			got, err := io.ReadAll(newReader(&recorder{reads: bytes.NewReader(stream), piece: piece}, s))
			require.NoError(t, err)
			require.Equal(t, stream, got)
		}
		one, two := begin(0), begin(7)
		require.NotSame(t, one, two)
		large := performative(0x14, 0, 700)
		arrives([]byte("AMQP\x00\x01\x00\x00"), onChannel(0, begin43), onChannel(7, begin40), large, onChannel(0, flow43))
		assert.False(t, one.Now().Blocked)
		assert.Empty(t, told)

		changed := two.Now().Changed
		arrives(onChannel(0, alarm43), large, onChannel(7, alarm40), onChannel(7, alarm43))
		assert.True(t, one.Now().Blocked)
		assert.True(t, two.Now().Blocked)
		assert.NotZero(t, two.Now().Since)
		<-changed
		assert.Equal(t, []bool{true}, told, "once for both")

		three := begin(8)
		arrives(onChannel(8, blocked43))
		assert.True(t, three.Now().Blocked, "a session that begins under an alarm")

		arrives(onChannel(0, over43), large, onChannel(8, over43))
		assert.False(t, one.Now().Blocked)
		assert.False(t, three.Now().Blocked)
		assert.Len(t, told, 1, "one still is")
		arrives(performative(codeEnd, 7, 3))
		assert.Equal(t, []bool{true, false}, told, "the others aren't")

		arrives(performative(codeEnd, 8, 3), onChannel(0, alarm43), performative(codeEnd, 0, 3))
		assert.Equal(t, []bool{true, false, true}, told, "the end of the last session says nothing of the broker")
		s.left(0)
		begin(0)
		arrives(onChannel(0, blocked43))
		assert.Len(t, told, 3, "it still takes none")
		begin(9)
		arrives(performative(codeEnd, 0, 3))
		assert.Len(t, told, 3, "no session is known to be open")
		s.left(0)
		begin(0)
		arrives(onChannel(0, begin43), onChannel(9, begin43))
		assert.Equal(t, []bool{true, false, true, false}, told)

		arrives(onChannel(0, alarm43))
		s.close()
		s.close()
		assert.Len(t, told, 5, "nor does the end of the connection")
	}
}

// However the frames come: Blocked is called with true and false in turn, and no session
// is left when the connection has ended.
func FuzzSessions(f *testing.F) {
	for _, body := range []string{begin43, begin40, blocked43, alarm43, alarm40, over43, list32, noWindow, notOurs, cutOffFlow, emptyFlow, cutOffBegin} {
		f.Add(onChannel(3, body), uint8(5))
		f.Add(slices.Concat([]byte("AMQP\x03\x01\x00\x00"), onChannel(3, body), performative(codeEnd, 3, 3)), uint8(200))
	}
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		told := false
		s := &sessions{tell: func(blocked bool) {
			if blocked == told {
				t.Error("told twice of the same")
			}
			told = blocked
		}}
		for channel := range uint16(8) {
			s.begin(channel, nil)
		}
		got, err := io.ReadAll(newReader(&recorder{reads: bytes.NewReader(stream), piece: int(piece) + 1}, s))
		if err != nil || len(got) != len(stream) {
			t.Errorf("%d bytes of %d were passed on: %v", len(got), len(stream), err)
		}
		s.close()
		if s.blocked != 0 {
			t.Errorf("%d sessions are blocked for ever", s.blocked)
		}
	})
}

// What the broker sends by itself, such as deliveries and credit, is no answer.
func TestAnswersAreCounted(t *testing.T) {
	stream := slices.Concat(ProtocolAMQP.Header(), []byte{0, 0, 0, 8, 2, 0, 0, 0},
		performative(codeTransfer, 0, 700), onChannel(0, flow43), performative(codeOpen, 0, 30), performative(codeClose, 0, 30))
	r := newReader(&recorder{reads: bytes.NewReader(stream), piece: 100}, &sessions{tell: func(bool) {}})
	_, err := io.ReadAll(r)
	require.NoError(t, err)
	assert.Zero(t, r.answers.Load())
	stream = slices.Concat(onChannel(0, begin43), performative(codeAttach, 0, 30), performative(codeDisposition, 0, 20), performative(codeDetach, 0, 3), performative(codeEnd, 0, 3))
	r.src = &recorder{reads: bytes.NewReader(stream), piece: 100}
	_, err = io.ReadAll(r)
	require.NoError(t, err)
	assert.EqualValues(t, 5, r.answers.Load())
}
