package frames

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// performative is a frame with a body that is cut off behind its descriptor.
func performative(code byte, channel uint16, padding int) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(frameHead+padding))
	b = append(b, 2, 0)
	b = binary.BigEndian.AppendUint16(b, channel)
	return append(append(b, 0, 0x53, code), make([]byte, padding)...)
}

// recorder is a net.Conn that gives its bytes in pieces and notes what is written.
type recorder struct {
	net.Conn
	reads   *bytes.Reader
	piece   int
	mu      sync.Mutex
	written []byte
}

func (r *recorder) Read(b []byte) (int, error) { return r.reads.Read(b[:min(len(b), r.piece)]) }

func (r *recorder) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written = append(r.written, b...)
	return len(b), nil
}

func (r *recorder) SetWriteDeadline(time.Time) error { return nil }
func (r *recorder) Close() error                     { return nil }

// frames are those that were written.
func (r *recorder) frames() (all [][]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for b := r.written; len(b) > 0; {
		size := binary.BigEndian.Uint32(b)
		all, b = append(all, b[:size]), b[size:]
	}
	return all
}

func TestSessionBeginsOnAChannelOnlySomeTimeAfterTheLastOneEnded(t *testing.T) {
	stream := bytes.Join([][]byte{
		ProtocolSASL.Header(), ProtocolAMQP.Header(),
		{0, 0, 0, 8, 2, 0, 0, 0}, // a sign of life
		performative(codeTransfer, 3, 700), performative(codeTransfer, 4, 0), performative(codeEnd, 5, 3), performative(codeTransfer, 6, 1),
	}, nil)
	for piece := 1; piece < len(stream); piece = piece*2 + 1 {
		synctest.Test(t, func(t *testing.T) {
			r := &recorder{reads: bytes.NewReader(stream), piece: piece}
			c := Wrap(r, Config{})
			defer func() { require.NoError(t, c.Close()) }()
			c.RestChannels()
			got, err := io.ReadAll(c)
			require.NoError(t, err)
			require.Equal(t, stream, got)

			for _, channel := range []uint16{3, 4, 5, 6} {
				n, err := c.Write(performative(codeBegin, channel, 20))
				require.NoError(t, err)
				require.Equal(t, frameHead+20, n)
			}
			synctest.Wait()
			assert.Len(t, r.frames(), 3, "those on other numbers go out at once")
			time.Sleep(channelRest)
			synctest.Wait()
			require.Len(t, r.frames(), 4)
			assert.Equal(t, performative(codeBegin, 5, 20), r.frames()[3])
			for _, code := range []byte{codeEnd, codeBegin} {
				_, err = c.Write(performative(code, 5, 20))
				require.NoError(t, err)
			}
			synctest.Wait()
			assert.Len(t, r.frames(), 6, "the rest counts once")
		})
	}
}

func TestSessionBeginsAtOnceWhereTheBrokerNeedsNoRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recorder{reads: bytes.NewReader(performative(codeEnd, 0, 3)), piece: 100}
		c := Wrap(r, Config{})
		defer func() { require.NoError(t, c.Close()) }()
		_, err := io.ReadAll(c)
		require.NoError(t, err)
		_, err = c.Write(performative(codeBegin, 0, 20))
		require.NoError(t, err)
		synctest.Wait()
		assert.Len(t, r.frames(), 1)
	})
}

// go-amqp gives a number to the next session as soon as the broker has ended the last one,
// and may have frames of the last one to write, its end among them.
func TestSessionBeginsOnlyOnceTheLastOneOnItsNumberHasBeenEnded(t *testing.T) {
	for _, rests := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := &recorder{reads: bytes.NewReader(performative(codeEnd, 7, 3)), piece: 100}
			c := Wrap(r, Config{})
			defer func() { require.NoError(t, c.Close()) }()
			if rests {
				c.RestChannels()
			}
			write := func(code byte, channel uint16, padding int) []byte {
				b := performative(code, channel, padding)
				n, err := c.Write(b)
				require.NoError(t, err)
				require.Equal(t, len(b), n)
				clear(b) // a writer uses its buffer again
				return performative(code, channel, padding)
			}
			var want [][]byte
			want = append(want, write(codeBegin, 7, 20), write(codeBegin, 8, 20))
			_, err := io.ReadAll(c) // the broker ends it
			require.NoError(t, err)
			held := write(codeBegin, 7, 21)
			want = append(want, write(codeFlow, 7, 30), write(codeEnd, 8, 1), write(codeBegin, 8, 22))
			synctest.Wait()
			assert.Equal(t, want, r.frames(), "the rest goes on")
			want = append(want, write(codeEnd, 7, 2))
			if rests {
				synctest.Wait()
				assert.Equal(t, want, r.frames())
				time.Sleep(channelRest)
			}
			synctest.Wait()
			want = append(want, held)
			assert.Equal(t, want, r.frames())
			want = append(want, write(codeEnd, 7, 3), write(codeBegin, 7, 23))
			synctest.Wait()
			assert.Equal(t, want, r.frames(), "in order where the client ends it")
		})
	}
}

func TestConnSurvivesAHostileStream(t *testing.T) {
	for _, stream := range []string{"", "AM", "AMQP", "\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x09\x02\x00\x00\x00\x00", "\xff\xff\xff\xff\x02\x00\x00\x00\x00\x53\x17", "\x00\x00\x00\x01", "HTTP/1.1 400"} {
		c := Wrap(&recorder{reads: bytes.NewReader([]byte(stream)), piece: 3}, Config{})
		c.RestChannels()
		got, err := io.ReadAll(c)
		require.NoError(t, err)
		assert.Equal(t, stream, string(got))
		require.NoError(t, c.Close())
	}
}

// A window of 0 without anybody who wants to know, which once ended the process.
func TestBlockedMayBeNil(t *testing.T) {
	c := Wrap(&recorder{reads: bytes.NewReader(append(onChannel(0, blocked43), onChannel(0, over43)...)), piece: 100}, Config{})
	_, err := c.Write(onChannel(0, begin43))
	require.NoError(t, err)
	in := c.Intake()
	changed := in.Now().Changed
	_, err = io.ReadAll(c)
	require.NoError(t, err)
	<-changed
	assert.False(t, in.Now().Blocked)
	require.NoError(t, c.Close())
}

// The reason for which a broker closes the connection while it opens can be asked for;
// go-amqp doesn't read it.
func TestRefusalIsRead(t *testing.T) {
	want := &Error{Condition: "amqp:not-allowed", Description: "vhost 'x' not found"}
	answer, err := Append(ProtocolAMQP.Header(), Frame{Body: &Close{Error: want}})
	require.NoError(t, err)
	for piece := 1; piece < 100; piece += 13 {
		c := Wrap(&recorder{reads: bytes.NewReader(answer), piece: piece}, Config{})
		assert.False(t, c.Opening())
		_, err = c.Write(ProtocolAMQP.Header())
		require.NoError(t, err)
		assert.True(t, c.Opening())
		assert.Nil(t, c.Refusal())
		_, err = io.ReadAll(c)
		require.NoError(t, err)
		assert.Equal(t, want, c.Refusal())
		require.NoError(t, c.Close())
	}
}
