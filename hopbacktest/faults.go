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
// release is called. The broker still stores the messages and executes the requests.
func (b *Broker) HoldAnswers() (release func()) {
	b.server.HoldAnswers(true)
	return func() { b.server.HoldAnswers(false) }
}

// DelayAnswers delays the answer to each published message and management request by d. Pass 0
// to remove the delay.
func (b *Broker) DelayAnswers(d time.Duration) { b.server.DelayAnswers(d) }

// SetLatency sets the network's latency to d in each direction. It affects all connections from
// Dial, and TCP connections that are accepted afterwards.
func (b *Broker) SetLatency(d time.Duration) { b.latency.Store(int64(d)) }

// StepClock sets the broker's clock forward by d, or back if d is negative, as if somebody set
// the clock of its host. Timers that are already running fire as if the clock hadn't changed.
func (b *Broker) StepClock(d time.Duration) { b.engine.StepClock(d) }

// slow is c with the latency added.
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
	// Client is the client's network address, Since the time when it connected, and Sessions
	// the number of its open sessions.
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

// Info describes the connection at this moment.
func (c *Connection) Info() ConnectionInfo { return ConnectionInfo(c.conn.Info()) }

// Cut breaks the connection immediately. The client gets a connection reset.
func (c *Connection) Cut() { c.conn.Cut() }

// Frames returns how many frames have passed in a direction. It counts from the open frame on,
// without empty frames (heartbeats).
func (c *Connection) Frames(d Direction) int { return c.conn.Frames(d.wire()) }

// CutBefore cuts the connection just before the n-th frame from now in a direction. That frame
// is neither executed nor sent. The first frame of a connection is the open frame. An n below 1
// means 1.
func (c *Connection) CutBefore(d Direction, n int) { c.conn.CutBefore(d.wire(), n) }

// CutAfter cuts the connection right after the n-th frame from now in a direction. A frame from
// the client is executed, but its answer isn't sent. An n below 1 means 1.
func (c *Connection) CutAfter(d Direction, n int) { c.conn.CutAfter(d.wire(), n) }

// Silence drops everything in a direction from now on, until the connection ends. Neither side
// notices, as with a cut cable or a crashed host.
func (c *Connection) Silence(d Direction) { c.conn.Silence(d.wire()) }
