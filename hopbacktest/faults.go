package hopbacktest

import (
	"io"
	"net"
	"time"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/hopbacktest/internal/vnet"
	"github.com/hopback/hopback/hopbacktest/internal/wire"
)

// SetMemoryAlarm raises RabbitMQ's memory alarm if on is true, and clears it otherwise. While
// it is raised, connections can neither publish nor send management requests.
func (b *Broker) SetMemoryAlarm(on bool) { b.engine.SetAlarm(engine.AlarmMemory, on) }

// SetDiskAlarm is [Broker.SetMemoryAlarm] for the disk alarm.
func (b *Broker) SetDiskAlarm(on bool) { b.engine.SetAlarm(engine.AlarmDisk, on) }

// HoldAnswers holds back the answers to published messages and management requests until
// release is called. Messages are stored and requests carried out meanwhile.
func (b *Broker) HoldAnswers() (release func()) {
	b.server.HoldAnswers(true)
	return func() { b.server.HoldAnswers(false) }
}

// DelayAnswers delays the answer to each published message and management request by d. A d
// of 0 ends the delay.
func (b *Broker) DelayAnswers(d time.Duration) { b.server.DelayAnswers(d) }

// SetLatency sets the network's latency to d in each direction. It affects all connections
// of Dial, and TCP connections that are made afterwards.
func (b *Broker) SetLatency(d time.Duration) { b.latency.Store(int64(d)) }

// StepClock sets the broker's clock forward by d, or back if d is negative, as when somebody
// sets the clock of its host. What already waits for a time is looked at when it would have
// come without the step.
func (b *Broker) StepClock(d time.Duration) { b.engine.StepClock(d) }

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

// Direction is the direction of frames on a connection.
type Direction string

// The directions of a connection.
const (
	DirectionFromClient Direction = "from client"
	DirectionToClient   Direction = "to client"
)

func (d Direction) wire() wire.Direction {
	if d == DirectionToClient {
		return wire.DirectionToClient
	}
	return wire.DirectionFromClient
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
	// Client is the client's network address. Since is when the connection was made, and
	// Sessions the number of its open sessions.
	Client   string
	Since    time.Time
	Sessions int
}

// Connections returns the open connections, oldest first.
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

// Cut ends the connection at once. The client sees a connection reset.
func (c *Connection) Cut() { c.conn.Cut() }

// Frames returns how many frames have passed in a direction. It counts from the open frame
// and leaves out empty frames (heartbeats).
func (c *Connection) Frames(d Direction) int { return c.conn.Frames(d.wire()) }

// CutBefore cuts the connection in place of the n-th next frame in a direction, which is
// neither carried out nor sent. An n below 1 means 1. The first frame of a connection is
// the open frame.
func (c *Connection) CutBefore(d Direction, n int) { c.conn.CutBefore(d.wire(), n) }

// CutAfter cuts the connection right after the n-th next frame in a direction. A frame from
// the client is carried out, but its answer isn't sent. An n below 1 means 1.
func (c *Connection) CutAfter(d Direction, n int) { c.conn.CutAfter(d.wire(), n) }

// Silence drops everything that is sent in a direction from now on, until the connection
// ends. Neither end notices, as when a cable is cut or a host has died.
func (c *Connection) Silence(d Direction) { c.conn.Silence(d.wire()) }
