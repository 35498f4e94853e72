package wire

import (
	"fmt"
	"io"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/hopbacktest/internal/vnet"
	"github.com/hopback/hopback/internal/frames"
)

// all encodes frames on channel 1, and those of a connection on channel 0.
func all(bodies ...frames.Performative) []byte {
	var b []byte
	for _, body := range bodies {
		channel := uint16(1)
		switch body.(type) {
		case *frames.Open, *frames.Close:
			channel = 0
		}
		f := frames.Frame{Channel: channel, Body: body}
		if t, ok := body.(*frames.Transfer); ok {
			switch {
			case t.Handle == 5:
				f.Payload = request("PUT", "/queues/q", frames.Map{{Key: "durable", Value: true}, {Key: "arguments", Value: frames.Map{{Key: "x-queue-type", Value: "quorum"}}}})
			default:
				f.Payload = body2
			}
		}
		var err error
		if b, err = frames.Append(b, f); err != nil {
			panic(err)
		}
	}
	return b
}

var body2 = body([]byte("text"))

// conversation is what a client says that does everything once.
func conversation() []byte {
	me, node := any("$me"), any(managementNode)
	return all(
		&frames.Begin{IncomingWindow: 100, OutgoingWindow: 100},
		&frames.Attach{Name: "m", Handle: 4, Role: true, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: node}, Target: &frames.Target{Address: me}, Properties: paired()},
		&frames.Attach{Name: "m", Handle: 5, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: me}, Target: &frames.Target{Address: node}, InitialDeliveryCount: frames.Some[uint32](0), Properties: paired()},
		&frames.Flow{IncomingWindow: 100, OutgoingWindow: 100, Handle: frames.Some[uint32](4), LinkCredit: frames.Some[uint32](10)},
		&frames.Transfer{Handle: 5, DeliveryID: frames.Some[uint32](0), DeliveryTag: []byte{0}, Settled: frames.Some(true)},
		target("q"), source("q"),
		&frames.Transfer{Handle: 0, DeliveryID: frames.Some[uint32](1), DeliveryTag: []byte{1}},
		&frames.Transfer{Handle: 0, DeliveryID: frames.Some[uint32](2), DeliveryTag: []byte{2}, More: true},
		&frames.Transfer{Handle: 0},
		&frames.Transfer{Handle: 0, DeliveryID: frames.Some[uint32](3), DeliveryTag: []byte{3}, More: true},
		&frames.Transfer{Handle: 0, Aborted: true},
		&frames.Flow{IncomingWindow: 100, OutgoingWindow: 100, Handle: frames.Some[uint32](1), LinkCredit: frames.Some[uint32](1), Echo: true},
		&frames.Disposition{Role: true, First: 0, Last: frames.Some[uint32](9), Settled: frames.Some(false), State: &frames.Modified{UndeliverableHere: true, Annotations: frames.Map{{Key: frames.Symbol("x-a"), Value: "b"}}}},
		&frames.Flow{IncomingWindow: 100, OutgoingWindow: 100, Handle: frames.Some[uint32](1), LinkCredit: frames.Some[uint32](1000), Drain: true},
		&frames.Disposition{Role: true, First: 1, Settled: frames.Some(true), State: &frames.Accepted{}},
		&frames.Detach{Handle: 0, Closed: true},
		&frames.End{},
		&frames.Close{},
	)
}

// No input from a client after the open frame makes the server panic or hang: the server's
// goroutines end with the client.
func FuzzConnection(f *testing.F) {
	whole := conversation()
	f.Add(whole, false)
	f.Add(whole, true)
	for at := 40; at < len(whole); at += 97 {
		spoilt := append([]byte(nil), whole...)
		spoilt[at] ^= 0x41
		f.Add(spoilt, at%2 == 0)
	}
	f.Fuzz(func(t *testing.T, sent []byte, old bool) {
		synctest.Test(t, func(t *testing.T) {
			version := "4.3.6"
			if old {
				version = "4.0.5"
			}
			w := newWorld(t, version, Config{})
			p := w.dial()
			p.open(func(o *frames.Open) { o.IdleTimeout = frames.Some[uint32](2000) })
			go func() { _, _ = io.Copy(io.Discard, p.nc) }()
			_, _ = p.nc.Write(sent)
			synctest.Wait()
			for _, c := range w.server.Conns() {
				require.Empty(t, c.excess(len(sent)))
			}
			require.NoError(t, p.nc.Close())
			synctest.Wait()
			require.Empty(t, w.server.Conns())
		})
	})
}

// excess is what a connection holds more of than its client's bytes and the limits allow.
func (c *Conn) excess(sent int) (what []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	atMost := func(name string, n, limit int) {
		if n > limit {
			what = append(what, fmt.Sprintf("%s: %d, and the limit is %d", name, n, limit))
		}
	}
	atMost("unfinished messages", c.partial, sent)
	atMost("attach frames", c.attached, sent)
	atMost("frames to write", len(c.out), 2*maxOut)
	atMost("sessions", len(c.sessions), c.server.cfg.MaxSessions)
	attached := 0
	for _, s := range c.sessions {
		atMost("links", len(s.links), c.server.cfg.MaxLinks)
		atMost("replies", s.pendingReplies, maxReplies)
		atMost("flows", s.pendingFlows, maxFlows)
		atMost("deliveries", len(s.unsettled)+s.pending.len(), sent)
		for _, l := range s.links {
			attached += l.size
		}
	}
	if attached != c.attached && !c.closeSent {
		what = append(what, fmt.Sprintf("the links' attach frames have %d bytes, and %d are counted", attached, c.attached))
	}
	return what
}

// The same from the first byte on.
func FuzzHandshake(f *testing.F) {
	login, err := frames.Append(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Init{Mechanism: "PLAIN", InitialResponse: plain("guest", "guest")}})
	if err != nil {
		f.Fatal(err)
	}
	begin := append(append(append([]byte(nil), frames.ProtocolSASL.Header()...), login...), frames.ProtocolAMQP.Header()...)
	begin = append(begin, all(&frames.Open{ContainerID: "fuzz", Hostname: "vhost:/"})...)
	f.Add(begin)
	f.Add(append(begin, conversation()...))
	f.Add([]byte("AMQP\x00\x00\x09\x01"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		synctest.Test(t, func(t *testing.T) {
			e, err := engine.New(engine.Config{})
			require.NoError(t, err)
			defer e.Close()
			server := NewServer(Config{Engine: e})
			client, theirs := vnet.Pipe(vnet.Config{})
			ended := make(chan struct{})
			go func() {
				server.Serve(theirs)
				close(ended)
			}()
			go func() { _, _ = io.Copy(io.Discard, client) }()
			_, _ = client.Write(sent)
			require.NoError(t, client.Close())
			<-ended // or the bubble is deadlocked
			server.Close()
		})
	})
}
