package hopbacktest

import (
	"io"
	"net"
	"time"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/hopbacktest/internal/vnet"
	"github.com/hopback/hopback/hopbacktest/internal/wire"
)

// Alarm is an alarm of RabbitMQ. While there is one, no connection may publish, or send
// requests to the management.
type Alarm string

// RabbitMQ's alarms.
const (
	MemoryAlarm Alarm = "memory"
	DiskAlarm   Alarm = "disk"
)

// SetAlarm raises or clears an alarm.
func (b *Broker) SetAlarm(a Alarm, on bool) { b.engine.SetAlarm(engine.Alarm(a), on) }

// HoldAnswers keeps back what the broker answers to messages and to requests, until
// release is called. Messages are stored and requests carried out meanwhile.
func (b *Broker) HoldAnswers() (release func()) {
	b.server.HoldAnswers(true)
	return func() { b.server.HoldAnswers(false) }
}

// DelayAnswers has the broker answer each message and each request late by d. 0 ends
// that.
func (b *Broker) DelayAnswers(d time.Duration) { b.server.DelayAnswers(d) }

// SetLatency has everything take d to arrive, in each direction, on the connections of
// Dial, and on those of Listen that are made from now on.
func (b *Broker) SetLatency(d time.Duration) { b.latency.Store(int64(d)) }

// slow is c with the latency.
func (b *Broker) slow(c net.Conn) net.Conn {
	if b.latency.Load() <= 0 {
		return c
	}
	ours, theirs := vnet.Pipe(vnet.Config{
		Client: vnet.Addr(c.RemoteAddr().String()), Server: vnet.Addr(c.LocalAddr().String()), Latency: b.delay,
	})
	forward := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		_ = to.Close()
		_ = from.Close()
	}
	b.running.Go(func() { forward(ours, c) })
	b.running.Go(func() { forward(c, ours) })
	return theirs
}

// Direction is a direction of a connection.
type Direction string

// The directions of a connection.
const (
	FromClient Direction = "from client"
	ToClient   Direction = "to client"
)

func (d Direction) wire() wire.Direction {
	if d == ToClient {
		return wire.ToClient
	}
	return wire.FromClient
}

// Connection is a client's connection to the broker.
type Connection struct{ conn *wire.Conn }

// ConnectionInfo describes a connection.
type ConnectionInfo struct {
	// ID counts the broker's connections, from 1.
	ID uint64
	// User and VHost are empty until the client has logged in and opened the connection.
	User, VHost string
	// Container is the client's container-id, such as client.Config.Name.
	Container string
	// Client is its network address.
	Client   string
	Since    time.Time
	Sessions int
}

// Connections returns the connections that there are, oldest first.
func (b *Broker) Connections() []*Connection {
	conns := b.server.Conns()
	all := make([]*Connection, len(conns))
	for i, c := range conns {
		all[i] = &Connection{c}
	}
	return all
}

// Info describes the connection as it is now.
func (c *Connection) Info() ConnectionInfo { return ConnectionInfo(c.conn.Info()) }

// Cut ends the connection at once. The client finds it reset.
func (c *Connection) Cut() { c.conn.Cut() }

// Frames is how many frames have gone in a direction: the open frame and all behind it,
// without signs of life.
func (c *Connection) Frames(d Direction) int { return c.conn.Frames(d.wire()) }

// CutBefore cuts the connection in place of the n-th frame from now on, which isn't
// carried out, or isn't sent. Before the open frame, that is the first.
func (c *Connection) CutBefore(d Direction, n int) { c.conn.CutBefore(d.wire(), n) }

// CutAfter cuts the connection behind the n-th frame from now on. A client's frame is
// carried out, and its answer isn't sent any more.
func (c *Connection) CutAfter(d Direction, n int) { c.conn.CutAfter(d.wire(), n) }

// Silence makes everything vanish that is sent in a direction from now on, for as long as
// the connection lasts. Neither end learns of it, as when a cable is cut or a host has
// died.
func (c *Connection) Silence(d Direction) { c.conn.Silence(d.wire()) }
