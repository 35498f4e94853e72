package wire

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// each runs a test in virtual time with each version.
func each(t *testing.T, cfg Config, f func(t *testing.T, w *world, old bool)) {
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, newWorld(t, version, cfg), version == "4.0.5") })
		})
	}
}

func TestProtocolHeaders(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		for sent, want := range map[string]string{
			"AMQP\x00\x01\x00\x00":             "AMQP\x03\x01\x00\x00", // SASL is required
			"AMQP\x02\x01\x00\x00":             "AMQP\x03\x01\x00\x00",
			"AMQP\x00\x00\x09\x01":             "AMQP\x00\x00\x09\x01",
			"AMQP\x01\x01\x00\x0a":             "AMQP\x00\x00\x09\x01",
			"GET / HTTP/1.1\r\n":               "AMQP\x03\x01\x00\x00",
			"\x16\x03\x01\x00\xee\x01\x00\x00": "AMQP\x03\x01\x00\x00",
		} {
			p := w.dial()
			p.write([]byte(sent))
			got, err := io.ReadAll(p.nc)
			require.NoError(t, err)
			assert.Equal(t, want, string(got), "%q", sent)
		}
	})
}

func TestSilentClientIsDroppedInTheHandshake(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		began := time.Now()
		p := w.dial()
		p.write([]byte("AM"))
		_, err := io.ReadAll(p.nc)
		require.NoError(t, err)
		assert.Equal(t, 10*time.Second, time.Since(began))
	})
}

func TestOpenTellsWhoTheBrokerIs(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		open := p.open(func(o *frames.Open) { o.ChannelMax = frames.Some[uint16](10) })
		assert.Equal(t, uint16(10), open.ChannelMax.Value)
		assert.Equal(t, uint32(131072), open.MaxFrameSize.Value)
		assert.Equal(t, uint32(30000), open.IdleTimeout.Value)
		assert.Equal(t, []frames.Symbol{"LINK_PAIR_V1_0", "ANONYMOUS-RELAY"}, open.OfferedCapabilities)
		for key, want := range map[string]any{"product": "RabbitMQ", "version": w.engine.Version()} {
			got, _ := open.Properties.Get(key)
			assert.Equal(t, want, got)
		}
		for _, key := range []string{"node", "cluster_name"} {
			got, _ := open.Properties.Get(key)
			assert.NotEmpty(t, got)
		}
		assert.Equal(t, uint16(63), w.dial().open(nil).ChannelMax.Value)
		infos := w.server.Conns()
		require.Len(t, infos, 2)
		assert.Equal(t, "guest", infos[0].Info().User)
		assert.Equal(t, "test", infos[0].Info().Container)
	})
}

func TestRefusedLoginsTakeTime(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		began := time.Now()
		p := w.dial()
		p.login("guest", "wrong", 1)
		assert.Equal(t, 3*time.Second, time.Since(began))
		p.closed()

		for name, change := range map[string]func(*frames.Open){
			"a virtual host that isn't there": func(o *frames.Open) { o.Hostname = "vhost:nowhere" },
			"half a second of idle timeout":   func(o *frames.Open) { o.IdleTimeout = frames.Some[uint32](500) },
			"tiny frames":                     func(o *frames.Open) { o.MaxFrameSize = frames.Some[uint32](511) },
		} {
			p := w.dial()
			p.login("guest", "guest", 0)
			p.write(frames.ProtocolAMQP.Header())
			_, err := p.r.AwaitProtocol()
			require.NoError(t, err)
			open := &frames.Open{ContainerID: "test"}
			change(open)
			began := time.Now()
			p.send(0, open)
			p.closed()
			assert.Equal(t, 3*time.Second, time.Since(began), name)
		}
	})
}

func TestHeartbeatsGoBothWays(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(func(o *frames.Open) { o.IdleTimeout = frames.Some[uint32](10_000) })
		began := time.Now()
		for i := range 3 {
			f, err := p.r.AwaitFrame()
			require.NoError(t, err)
			assert.Nil(t, f.Body)
			assert.Equal(t, time.Duration(i+1)*5*time.Second, time.Since(began))
		}
		closed := expect[*frames.Close](p)
		assert.Equal(t, frames.Symbol("amqp:resource-limit-exceeded"), closed.Error.Condition)
		assert.GreaterOrEqual(t, time.Since(began), 2*time.Minute)
		assert.LessOrEqual(t, time.Since(began), 3*time.Minute)
		p.closed() // though the client answers nothing
	})
}

func TestClosingIsAnswered(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.begin(3)
		p.send(0, &frames.Close{})
		assert.Nil(t, expect[*frames.Close](p).Error)
		p.send(3, &frames.End{}) // is too late
		require.NoError(t, p.nc.Close())
		synctest.Wait()
		assert.Empty(t, w.server.Conns())
	})
}

func TestWhatCannotBeReadClosesTheConnection(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		for name, c := range map[string]struct {
			bytes []byte
			text  string
		}{
			"too large": {[]byte{0, 2, 0, 1, 2, 0, 0, 0}, "frame size (131073 bytes) > maximum frame size (131072 bytes)"},
			"too small": {[]byte{0, 0, 0, 7, 2, 0, 0, 0}, "frame size (7 bytes) < minimum frame size (8 bytes)"},
			"offset":    {[]byte{0, 0, 0, 8, 1, 0, 0, 0}, "data offset (1) < minimum data offset (2)"},
			"behind it": {[]byte{0, 0, 0, 8, 9, 0, 0, 0}, "data offset (36 bytes) > frame size (8 bytes)"},
			"SASL":      {[]byte{0, 0, 0, 8, 2, 1, 0, 0}, "unexpected frame type 1 in amqp mode (expected 0)"},
			"channel":   {[]byte{0, 0, 0, 12, 2, 0, 0, 64, 0, 0x53, 0x11, 0x45}, "channel number (64) exceeds maximum channel number (63)"},
		} {
			p := w.dial()
			p.open(nil)
			p.write(c.bytes)
			closed := expect[*frames.Close](p)
			require.NotNil(t, closed.Error, name)
			assert.Equal(t, frames.Symbol("amqp:connection:framing-error"), closed.Error.Condition, name)
			assert.Equal(t, c.text, closed.Error.Description, name)
			p.closed()
		}
		p := w.dial()
		p.open(nil)
		p.write([]byte{0, 0, 0, 12, 2, 0, 0, 0, 0, 0x53, 0x11, 0x45}) // a begin that lacks everything
		assert.Equal(t, frames.Symbol("amqp:internal-error"), expect[*frames.Close](p).Error.Condition)
	})
}

func TestLimitsOfSessionsAndLinks(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		for channel := range uint16(64) {
			assert.Equal(t, uint32(255), p.begin(channel).HandleMax.Value)
		}
		a := target("q")
		a.Handle = 256
		p.send(5, a)
		end := expect[*frames.End](p)
		assert.Equal(t, "link handle value (256) exceeds maximum link handle value (255)", end.Error.Description)
		p.send(5, &frames.End{}) // our answer, which nobody hears
		p.begin(5)
		p.send(5, target("q"), target("q"))
		expect[*frames.Attach](p)
		expect[*frames.Flow](p)
		if old { // it doesn't look
			expect[*frames.Attach](p)
			return
		}
		assert.Equal(t, frames.Symbol("amqp:session:handle-in-use"), expect[*frames.End](p).Error.Condition)
	})
}

func TestRefusedAttachEndsTheLinkOrTheSession(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		for name, a := range map[string]*frames.Attach{"target": target("missing"), "source": source("missing")} {
			p.begin(1)
			p.send(1, a)
			const text = "no queue 'missing' in vhost '/'"
			if old {
				assert.Equal(t, text, expect[*frames.End](p).Error.Description)
				continue
			}
			reply := expect[*frames.Attach](p)
			assert.Equal(t, !a.Role, reply.Role)
			if a.Role {
				assert.Nil(t, reply.Source, name)
			} else {
				assert.Nil(t, reply.Target, name)
			}
			d := expect[*frames.Detach](p)
			assert.True(t, d.Closed)
			assert.Equal(t, text, d.Error.Description)
			p.send(1, &frames.Detach{Handle: a.Handle, Closed: true}, &frames.End{})
			expect[*frames.End](p)
		}
	})
}

func TestMessagesAreConfirmedInRanges(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		p.begin(1)
		p.send(1, target("q"))
		reply := expect[*frames.Attach](p)
		assert.Equal(t, uint64(16<<20), reply.MaxMessageSize.Value)
		assert.Equal(t, uint32(170), expect[*frames.Flow](p).LinkCredit.Value)
		var b []byte
		for id := range uint32(1000) {
			if id > 0 && id%100 == 0 {
				p.write(b)
				b = b[:0]
				for first := id - 100; ; {
					f := p.next()
					d, ok := f.Body.(*frames.Disposition)
					if !ok {
						require.IsType(t, &frames.Flow{}, f.Body)
						continue
					}
					assert.True(t, d.Role && d.Settled.Value)
					assert.Equal(t, &frames.Accepted{}, d.State)
					assert.Equal(t, first, d.First)
					if first = d.Last.Or(d.First) + 1; first == id {
						break
					}
				}
			}
			var err error
			b, err = frames.Append(b, frames.Frame{Channel: 1, Body: &frames.Transfer{DeliveryID: frames.Some(id), DeliveryTag: []byte{1}}, Payload: body([]byte("x"))})
			require.NoError(t, err)
		}
	})
}

func TestLargeMessagesGoInManyFrames(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(func(o *frames.Open) { o.MaxFrameSize = frames.Some[uint32](512) })
		p.declare(0, "q")
		p.begin(1)
		p.send(1, target("q"))
		expect[*frames.Attach](p)
		expect[*frames.Flow](p)
		text := bytes.Repeat([]byte("0123456789"), 10_000)
		payload := body(text)
		for at := 0; at < len(payload); at += 40_000 {
			part := &frames.Transfer{Handle: 0, More: at+40_000 < len(payload)}
			if at == 0 {
				part.DeliveryID, part.DeliveryTag = frames.Some[uint32](7), []byte{7}
			}
			p.transfer(1, part, payload[at:min(at+40_000, len(payload))])
		}
		assert.Equal(t, uint32(7), expect[*frames.Disposition](p).First)
		p.send(1, source("q"))
		count := expect[*frames.Attach](p).InitialDeliveryCount.Value
		// A window of 100 frames blocks the rest of the message.
		p.send(1, &frames.Flow{NextIncomingID: frames.Some(nextOutgoing(old)), IncomingWindow: 100, OutgoingWindow: 5000, NextOutgoingID: 3, Handle: frames.Some[uint32](1), DeliveryCount: frames.Some(count), LinkCredit: frames.Some[uint32](10)})
		var got []byte
		for i := range 100 {
			f := p.next()
			transfer := f.Body.(*frames.Transfer)
			assert.True(t, transfer.More)
			assert.Equal(t, i == 0, transfer.DeliveryID.Set)
			got = append(got, f.Payload...)
		}
		p.credit(1, 1, count, 10, true) // is behind the message
		p.send(1, &frames.Flow{NextIncomingID: frames.Some(nextOutgoing(old) + 100), IncomingWindow: 5000, OutgoingWindow: 5000, NextOutgoingID: 3})
		_, rest, n := p.message()
		assert.Greater(t, n, 100)
		assert.True(t, bytes.Equal(text, data(t, append(got, rest...))))
		if !old { // that its consumer is the active one
			active, _ := expect[*frames.Flow](p).Properties.Get("rabbitmq:active")
			assert.Equal(t, true, active)
		}
		flow := expect[*frames.Flow](p)
		assert.True(t, flow.Drain)
		assert.Equal(t, count+10, flow.DeliveryCount.Value)
		assert.Zero(t, flow.LinkCredit.Value)
	})
}

func nextOutgoing(old bool) uint32 {
	if old {
		return 1<<32 - 1 - 3
	}
	return 0
}

func TestMuchCreditIsGivenPieceByPieceAndDrained(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		p.begin(1)
		p.send(1, target("q"))
		expect[*frames.Attach](p)
		expect[*frames.Flow](p)
		const messages = 1000
		for id := range uint32(messages) {
			p.publish(1, id, []byte("x"))
			for {
				if _, ok := p.next().Body.(*frames.Disposition); ok {
					break
				}
			}
		}
		p.send(1, source("q"))
		count := expect[*frames.Attach](p).InitialDeliveryCount.Value
		p.credit(1, 1, count, 2000, true)
		for i := range uint32(messages) {
			transfer, _, _ := p.message()
			assert.Equal(t, i, transfer.DeliveryID.Value)
		}
		flow := expect[*frames.Flow](p)
		assert.Equal(t, count+2000, flow.DeliveryCount.Value)
		assert.True(t, flow.Drain)
		p.send(1, &frames.Disposition{Role: frames.RoleReceiver, First: 0, Last: frames.Some[uint32](1<<31 - 1), Settled: frames.Some(false), State: &frames.Released{}})
		answer := expect[*frames.Disposition](p)
		assert.True(t, answer.Settled.Value)
		assert.Equal(t, frames.RoleSender, answer.Role)
		p.credit(1, 1, count+2000, 1, false)
		transfer, _, _ := p.message()
		assert.Equal(t, uint32(messages), transfer.DeliveryID.Value)
	})
}

func TestAlarmClosesTheWindows(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		assert.Equal(t, uint32(400), p.begin(1).IncomingWindow)
		w.engine.SetAlarm(engine.AlarmMemory, true)
		assert.Zero(t, expect[*frames.Flow](p).IncomingWindow)
		assert.Zero(t, p.begin(2).IncomingWindow)
		w.engine.SetAlarm(engine.AlarmMemory, false)
		for range 2 {
			assert.Equal(t, uint32(400), expect[*frames.Flow](p).IncomingWindow)
		}
	})
}

func TestUnfinishedMessagesAreBounded(t *testing.T) {
	each(t, Config{MaxPartial: 1 << 20}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		p.begin(1)
		for handle := range uint32(2) {
			a := target("q")
			a.Handle = handle
			p.send(1, a)
			expect[*frames.Attach](p)
			expect[*frames.Flow](p)
		}
		part := make([]byte, 100_000)
		for i := range uint32(11) {
			p.transfer(1, &frames.Transfer{Handle: i % 2, DeliveryID: frames.Some(i % 2), DeliveryTag: []byte{1}, More: true}, part)
		}
		assert.Equal(t, frames.Symbol("amqp:resource-limit-exceeded"), expect[*frames.Close](p).Error.Condition)
	})
}

// The bound of one connection times many connections would be no bound.
func TestUnfinishedMessagesOfAllConnectionsAreBounded(t *testing.T) {
	each(t, Config{MaxHeld: 1 << 20}, func(t *testing.T, w *world, old bool) {
		part := make([]byte, 100_000)
		hold := func() *peer {
			p := w.dial()
			p.open(nil)
			p.begin(1)
			p.send(1, target("q"))
			expect[*frames.Attach](p)
			expect[*frames.Flow](p)
			for range 4 {
				p.transfer(1, &frames.Transfer{Handle: 0, DeliveryID: frames.Some[uint32](0), DeliveryTag: []byte{1}, More: true}, part)
			}
			return p
		}
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		hold()
		second := hold()
		synctest.Wait()
		third := hold()
		assert.Equal(t, "too many bytes in messages that haven't come whole", expect[*frames.Close](third).Error.Description)
		// What has ended holds nothing any more.
		require.NoError(t, third.nc.Close())
		require.NoError(t, second.nc.Close())
		synctest.Wait()
		another := hold()
		another.send(1, &frames.End{})
		assert.Nil(t, expect[*frames.End](another).Error)
		for _, c := range w.server.Conns() {
			c.Cut()
		}
		synctest.Wait()
		assert.Zero(t, w.server.held.Load())
	})
}

// A link without an address keeps the tag of its latest settled message.
func TestDeliveryTagsAreBounded(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.begin(1)
		tag := make([]byte, 100_000)
		send := func(handle uint32) *frames.Close {
			p.send(1, &frames.Attach{
				Name: fmt.Sprint(handle), Handle: handle, SenderSettleMode: frames.Some[uint8](1),
				Source: &frames.Source{}, Target: &frames.Target{}, InitialDeliveryCount: frames.Some[uint32](0),
			})
			if closed, ok := p.next().Body.(*frames.Close); ok {
				return closed
			}
			expect[*frames.Flow](p)
			p.transfer(1, &frames.Transfer{Handle: handle, DeliveryID: frames.Some(handle), DeliveryTag: tag, Settled: frames.Some(true), More: true}, []byte{0})
			return nil
		}
		for i := range uint32(60) { // one after the other is no harm
			send(i)
			p.send(1, &frames.Detach{Handle: i, Closed: true})
			expect[*frames.Detach](p)
		}
		for i := range uint32(50) {
			if closed := send(i); closed != nil {
				assert.Equal(t, "too many bytes in the delivery tags of links", closed.Error.Description)
				return
			}
		}
		t.Error("it keeps 5 MB of tags")
	})
}

// What a client asks for can wait behind a window that it never opens, and a name can be as
// long as a frame: both are bounded.
func TestAnswersThatWaitAreBounded(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		p.begin(1)
		p.send(1, target("q"))
		expect[*frames.Attach](p)
		expect[*frames.Flow](p)
		p.publish(1, 0, []byte("text"))
		expect[*frames.Disposition](p)
		p.send(2, &frames.Begin{IncomingWindow: 0, OutgoingWindow: 5000})
		expect[*frames.Begin](p)
		p.send(2, source("q"))
		expect[*frames.Attach](p)
		echo := &frames.Flow{IncomingWindow: 0, OutgoingWindow: 5000, Handle: frames.Some[uint32](1), LinkCredit: frames.Some[uint32](1), Echo: true}
		for range maxFlows + 1 {
			p.send(2, echo)
		}
		assert.Equal(t, frames.Symbol("amqp:resource-limit-exceeded"), expect[*frames.End](p).Error.Condition)
		c := w.server.Conns()[0]
		c.mu.Lock()
		defer c.mu.Unlock()
		assert.Len(t, c.sessions, 1, "the other sessions stay")
	})
}

func TestLinksHoldABoundedNumberOfBytes(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		p.begin(1)
		attach := func(handle uint32) {
			a := target("q")
			a.Name, a.Handle = strings.Repeat("n", 100_000), handle
			p.send(1, a)
		}
		for i := range uint32(200) { // one after the other is no harm
			attach(i)
			expect[*frames.Attach](p)
			expect[*frames.Flow](p)
			p.send(1, &frames.Detach{Handle: i, Closed: true})
			expect[*frames.Detach](p)
		}
		for i := range uint32(41) {
			attach(i)
			expect[*frames.Attach](p)
			expect[*frames.Flow](p)
		}
		attach(41)
		assert.Equal(t, frames.Symbol("amqp:resource-limit-exceeded"), expect[*frames.Close](p).Error.Condition)
	})
}

func TestAClientThatReadsNothingIsReadNoMore(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		_ = p.nc.SetWriteDeadline(time.Now().Add(time.Minute))
		var b []byte
		for range 100 {
			for _, f := range []frames.Performative{&frames.Begin{IncomingWindow: 1, OutgoingWindow: 1}, &frames.End{}} {
				var err error
				b, err = frames.Append(b, frames.Frame{Channel: 1, Body: f})
				require.NoError(t, err)
			}
		}
		var err error
		for range 100_000 {
			if _, err = p.nc.Write(b); err != nil {
				break
			}
		}
		require.Error(t, err, "the server reads on")
		c := w.server.Conns()[0]
		c.mu.Lock()
		defer c.mu.Unlock()
		assert.Less(t, len(c.out), 2*maxOut)
	})
}

// A link gets no more credit while too many of its messages are in flight, settled or not,
// and gets it once they aren't.
func TestCreditWaitsForAFrozenQueue(t *testing.T) {
	each(t, Config{}, func(t *testing.T, w *world, old bool) {
		p := w.dial()
		p.open(nil)
		p.declare(0, "q")
		p.begin(1)
		p.send(1, target("q"))
		expect[*frames.Attach](p)
		expect[*frames.Flow](p)
		thaw, err := w.engine.Freeze("/", "q")
		require.NoError(t, err)
		sent := uint32(0)
		publish := func(n int) {
			for range n {
				p.transfer(1, &frames.Transfer{DeliveryID: frames.Some(sent), DeliveryTag: []byte{1}, Settled: frames.Some(true)}, body([]byte("x")))
				sent++
			}
		}
		publish(85)
		assert.Equal(t, uint32(170), expect[*frames.Flow](p).LinkCredit.Value)
		publish(170) // 255 are in flight, the maximum
		synctest.Wait()
		thaw()
		flow := expect[*frames.Flow](p)
		for !flow.Handle.Set { // the session's window
			flow = expect[*frames.Flow](p)
		}
		assert.Equal(t, uint32(170), flow.LinkCredit.Value)
		assert.Equal(t, sent, flow.DeliveryCount.Value)
		publish(1)
		p.begin(3)
		q, err := w.engine.Queue("/", "q")
		require.NoError(t, err)
		assert.Equal(t, int(sent), q.Ready)
	})
}
