package client

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"
)

// intake tells whether the broker takes messages on a session. While RabbitMQ has a
// memory or disk alarm it doesn't: it says so with an incoming-window of 0, in a flow,
// or in the begin of a session that is opened meanwhile. go-amqp keeps that to itself,
// and goes by it only once everything is answered that it has sent before, since it
// reckons the window with what is under way and thereby below 0. So the frames are
// watched, and senders stop at once.
type intake struct {
	state atomic.Pointer[intakeState]
}

type intakeState struct {
	blocked bool
	since   time.Time     // of blocked
	changed chan struct{} // closed when another state takes its place
}

func newIntake() *intake {
	i := &intake{}
	i.state.Store(&intakeState{changed: make(chan struct{})})
	return i
}

func (i *intake) now() *intakeState { return i.state.Load() }

// set is called by one goroutine at a time. It says whether that is a change.
func (i *intake) set(blocked bool) bool {
	was := i.now()
	if was.blocked == blocked {
		return false
	}
	is := &intakeState{blocked: blocked, changed: make(chan struct{})}
	if blocked {
		is.since = time.Now()
	}
	i.state.Store(is)
	close(was.changed)
	return true
}

// intakes are those of a connection's sessions.
type intakes struct {
	// tell, if set, is told when the first session is blocked, and when the last
	// isn't any more. It must not block.
	tell func(blocked bool)

	mu      sync.Mutex
	of      map[uint16]*intake
	latest  *intake // of the session that began last
	blocked int
	since   time.Time // of the first that is blocked
}

// begun is called before a session's begin is sent.
func (s *intakes) begun(channel uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(channel)
	if s.of == nil {
		s.of = map[uint16]*intake{}
	}
	s.latest = newIntake()
	s.of[channel] = s.latest
}

// ended is called when a session has ended.
func (s *intakes) ended(channel uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(channel)
}

// last is the intake of the session that began last.
func (s *intakes) last() *intake {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest == nil {
		return newIntake()
	}
	return s.latest
}

// window is called with what the broker has said of a session's incoming-window.
func (s *intakes) window(channel uint16, n uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := s.of[channel]; i != nil && i.set(n == 0) {
		s.count(n == 0)
	}
}

// close is called when the connection has ended.
func (s *intakes) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for channel := range s.of {
		s.forget(channel)
	}
}

// blockedSince is since when a session is blocked; zero if none is.
func (s *intakes) blockedSince() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blocked == 0 {
		return time.Time{}
	}
	return s.since
}

// forget is called with mu held.
func (s *intakes) forget(channel uint16) {
	if i := s.of[channel]; i != nil && i.now().blocked {
		s.count(false)
	}
	delete(s.of, channel)
}

// count is called with mu held.
func (s *intakes) count(blocked bool) {
	was := s.blocked
	if was == 0 {
		s.since = time.Now()
	}
	if blocked {
		s.blocked++
	} else {
		s.blocked--
	}
	if s.tell != nil && (was == 0 || s.blocked == 0) {
		s.tell(blocked)
	}
}

// windowHead is what holds a frame's incoming-window: beyond the descriptor a list's
// constructor of up to 9 bytes, and up to three fields of up to 5.
const windowHead = frameHead + 9 + 3*5

// incomingWindow reads the incoming-window of a begin or flow (AMQP 1.0, part 2.7.1
// and 2.7.4): the third field of the one and the second of the other.
func incomingWindow(frame []byte) (n uint32, ok bool) {
	skip := 1
	if frame[frameHead-1] == frameBegin {
		skip = 2
	}
	b := frame[frameHead:]
	switch {
	case len(b) > 3 && b[0] == 0xc0: // list8: size, count
		b = b[3:]
	case len(b) > 9 && b[0] == 0xd0: // list32
		b = b[9:]
	default:
		return 0, false
	}
	for ; ; skip-- {
		if len(b) == 0 {
			return 0, false
		}
		var value uint32
		size := 0
		switch b[0] {
		case 0x40, 0x43: // null, uint 0
		case 0x52: // smalluint
			size = 1
		case 0x60: // ushort
			size = 2
		case 0x70: // uint
			size = 4
		default:
			return 0, false
		}
		if len(b) < 1+size {
			return 0, false
		}
		switch size {
		case 1:
			value = uint32(b[1])
		case 4:
			value = binary.BigEndian.Uint32(b[1:])
		}
		if skip == 0 {
			return value, b[0] == 0x43 || b[0] == 0x52 || b[0] == 0x70
		}
		b = b[1+size:]
	}
}

// blockage tells when the broker takes no messages on a connection. What lasts for
// longer than a moment is logged, too.
type blockage struct {
	conn *Conn
	wire *wire

	mu     sync.Mutex
	since  time.Time
	timer  *time.Timer
	logged bool
}

// noticeAfter is what is longer than a moment.
const noticeAfter = 3 * time.Second

// tell is called on the goroutine that reads from the broker.
func (b *blockage) tell(blocked bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if blocked {
		b.since = time.Now()
		b.timer = time.AfterFunc(noticeAfter, b.notice)
		b.conn.tell(b.wire, Event{Kind: Blocked})
		return
	}
	b.timer.Stop()
	b.timer = nil
	after := time.Since(b.since)
	b.conn.tell(b.wire, Event{Kind: Unblocked, Down: after})
	if b.logged {
		b.logged = false
		go b.conn.log.Info("hopback: the broker takes messages again", "endpoint", b.wire.endpoint.shown, "node", b.wire.broker.Node, "after", after.Round(time.Millisecond))
	}
}

func (b *blockage) notice() {
	b.mu.Lock()
	over, since := b.timer == nil, b.since
	b.logged = !over
	b.mu.Unlock()
	if over {
		return
	}
	b.conn.log.Warn("hopback: the broker takes no messages, as it does while it has a memory or disk alarm: publishing waits", "endpoint", b.wire.endpoint.shown, "node", b.wire.broker.Node, "since", since)
}
