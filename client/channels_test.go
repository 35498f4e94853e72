package client

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
	written [][]byte
}

func (r *recorder) Read(b []byte) (int, error) { return r.reads.Read(b[:min(len(b), r.piece)]) }

func (r *recorder) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written = append(r.written, bytes.Clone(b))
	return len(b), nil
}

func (r *recorder) all() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.written
}

func TestSessionBeginsOnAChannelOnlySomeTimeAfterTheLastOneEnded(t *testing.T) {
	const other = 0x14 // transfer
	stream := bytes.Join([][]byte{
		[]byte("AMQP\x03\x01\x00\x00"), []byte("AMQP\x00\x01\x00\x00"),
		{0, 0, 0, 8, 2, 0, 0, 0}, // a sign of life
		performative(other, 3, 700), performative(other, 4, 0), performative(frameEnd, 5, 3), performative(other, 6, 1),
	}, nil)
	for piece := 1; piece < len(stream); piece = piece*2 + 1 {
		synctest.Test(t, func(t *testing.T) {
			r := &recorder{reads: bytes.NewReader(stream), piece: piece}
			c := &channels{Conn: r}
			c.rests.Store(true)
			got, err := io.ReadAll(c)
			require.NoError(t, err)
			require.Equal(t, stream, got)

			for _, channel := range []uint16{3, 4, 5, 6} {
				n, err := c.Write(performative(frameBegin, channel, 20))
				require.NoError(t, err)
				require.Equal(t, frameHead+20, n)
			}
			assert.Len(t, r.all(), 3, "those on other numbers go out at once")
			time.Sleep(channelRest)
			synctest.Wait()
			require.Len(t, r.all(), 4)
			assert.Equal(t, performative(frameBegin, 5, 20), r.all()[3])
			_, err = c.Write(performative(frameBegin, 5, 20))
			require.NoError(t, err)
			assert.Len(t, r.all(), 5, "the rest counts once")
		})
	}
}

func TestSessionBeginsAtOnceWhereTheBrokerNeedsNoRest(t *testing.T) {
	r := &recorder{reads: bytes.NewReader(performative(frameEnd, 0, 3)), piece: 100}
	c := &channels{Conn: r}
	_, err := io.ReadAll(c)
	require.NoError(t, err)
	_, err = c.Write(performative(frameBegin, 0, 20))
	require.NoError(t, err)
	assert.Len(t, r.all(), 1)
}

func TestChannelsSurviveAHostileStream(t *testing.T) {
	for _, stream := range []string{"", "AM", "AMQP", "\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x09\x02\x00\x00\x00\x00", "\xff\xff\xff\xff\x02\x00\x00\x00\x00\x53\x17", "\x00\x00\x00\x01", "HTTP/1.1 400"} {
		c := &channels{Conn: &recorder{reads: bytes.NewReader([]byte(stream)), piece: 3}}
		c.rests.Store(true)
		got, err := io.ReadAll(c)
		require.NoError(t, err)
		assert.Equal(t, stream, string(got))
	}
}
