package amqp

import (
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// demands are frames that each ask for an answer.
func demands() map[string]frames.Performative {
	zero := frames.Some(uint32(0))
	flow := func(handle uint32, drain, echo bool) *frames.Flow {
		return &frames.Flow{NextIncomingID: zero, IncomingWindow: 1000, OutgoingWindow: 1000, Handle: frames.Some(handle), DeliveryCount: zero, LinkCredit: zero, Drain: drain, Echo: echo}
	}
	return map[string]frames.Performative{
		"an echo of the session's flow": &frames.Flow{NextIncomingID: zero, IncomingWindow: 1000, OutgoingWindow: 1000, Echo: true},
		"an echo of a receiver's flow":  flow(20, false, true),
		"a drain of a sender":           flow(21, true, true),
	}
}

// unread has a peer send n frames that are to be answered, and not read what comes. It returns how
// many it could send before the connection stopped reading.
func unread(c *Conn, p *peer, n int, demand frames.Performative) (sent *atomic.Int64, waiting int) {
	p.t.Helper()
	s := p.begin(c, SessionConfig{})
	var got record
	p.receive(s, got.receiver("q"))
	p.sender(s, SenderConfig{}, 0)
	sent = &atomic.Int64{}
	go func() {
		const together = 1000
		all := make([]frames.Performative, together)
		for i := range all {
			all[i] = demand
		}
		for sent.Load() < int64(n) {
			p.send(0, all...)
			sent.Add(together)
		}
	}()
	synctest.Wait() // the peer's own buffer holds the first 10,000 answers
	c.mu.Lock()
	defer c.mu.Unlock()
	return sent, len(c.out.b)
}

// drop reads what the peer has not, and what still comes.
func (p *peer) drop() {
	go func() {
		for range p.got {
			continue
		}
	}()
}

// The connection stops reading from a peer that doesn't read its answers, and continues when it does.
func TestAnswersToAPeerThatDoesNotReadAreBounded(t *testing.T) {
	const n = 120_000
	for name, demand := range demands() {
		t.Run(name, func(t *testing.T) {
			pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
				sent, waiting := unread(c, p, n, demand)
				assert.Less(t, sent.Load(), int64(n))
				assert.Less(t, waiting, readLimit+4*readSize)
				for range n {
					<-p.got
				}
				synctest.Wait()
				assert.Equal(t, int64(n), sent.Load())
				require.NoError(t, c.Err())
				p.nothing()
				p.begin(c, SessionConfig{}) // it still answers
			})
		})
	}
}

// A peer that never reads its answers loses its connection, as for anything else that it doesn't read.
func TestAPeerThatNeverReadsItsAnswersLosesItsConnection(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		_, waiting := unread(c, p, 120_000, demands()["a drain of a sender"])
		defer p.drop()
		assert.Less(t, waiting, readLimit+4*readSize)
		time.Sleep(writeLimit + time.Second)
		select {
		case <-c.Done():
		case <-time.After(time.Minute):
			require.Fail(t, "the connection hasn't ended")
		}
		require.ErrorIs(t, c.Err(), os.ErrDeadlineExceeded)
	})
}

// Close and Fail end a connection whose reader waits for its peer to read.
func TestAConnectionEndsWhileItsPeerDoesNotRead(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		unread(c, p, 120_000, demands()["an echo of the session's flow"])
		defer p.drop()
		c.Fail(os.ErrClosed)
		synctest.Wait()
		select {
		case <-c.Done():
		default:
			require.Fail(t, "the connection hasn't ended")
		}
	})
}

// A sender whose queue is never empty doesn't keep room for all messages that it has ever sent.
func TestASendersQueueIsAsLargeAsWhatWaits(t *testing.T) {
	pair(t, Config{}, func(t *testing.T, c *Conn, p *peer) {
		s := p.begin(c, SessionConfig{})
		l := p.sender(s, SenderConfig{Settled: true}, 0)
		var r record
		for range 3 {
			require.NoError(t, l.Send(r.sending("m")))
		}
		for i := range uint32(5000) {
			require.NoError(t, l.Send(r.sending("m")))
			p.send(0, &frames.Flow{NextIncomingID: frames.Some(i), IncomingWindow: 1, OutgoingWindow: 1000, Handle: frames.Some(uint32(20)), DeliveryCount: frames.Some(i), LinkCredit: frames.Some(uint32(1))})
			next[*frames.Transfer](p)
		}
		_, queued := l.Unanswered()
		assert.Equal(t, 3, queued)
		assert.LessOrEqual(t, l.queue.Cap(), 16)
	})
}
