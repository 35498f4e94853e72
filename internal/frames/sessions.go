package frames

import (
	"bytes"
	"sync"
	"sync/atomic"
	"time"
)

// Intake says whether the broker takes messages on a session. While RabbitMQ has a
// memory or disk alarm it doesn't: it sends an incoming-window of 0, in a flow, or in
// the begin of a session that is opened meanwhile. go-amqp keeps that to itself, and
// goes by it only once everything is answered that it has sent before, since it reckons
// the window with what is under way and thereby below 0. So the frames are watched, and
// senders stop at once.
type Intake struct {
	state atomic.Pointer[IntakeState]
	heard bool // the broker has told it; guarded by sessions.mu
	// folds says that death histories on the session are folded; some is the
	// connection's, so that those who ask for none pay for none.
	folds atomic.Bool
	some  *atomic.Bool
}

// IntakeState is the state of an Intake at one moment.
type IntakeState struct {
	Blocked bool
	Since   time.Time     // when it became blocked
	Changed chan struct{} // closed when another state takes its place
}

// NewIntake returns one that isn't blocked.
func NewIntake() *Intake {
	i := &Intake{}
	i.state.Store(&IntakeState{Changed: make(chan struct{})})
	return i
}

// Now is the present state. It is never nil, and doesn't change.
func (i *Intake) Now() *IntakeState { return i.state.Load() }

// Set changes the state, and says whether that is a change. It is called by one
// goroutine at a time.
func (i *Intake) Set(blocked bool) bool {
	was := i.Now()
	if was.Blocked == blocked {
		return false
	}
	is := &IntakeState{Blocked: blocked, Changed: make(chan struct{})}
	if blocked {
		is.Since = time.Now()
	}
	i.state.Store(is)
	close(was.Changed)
	return true
}

// FoldDeaths makes death histories come as binaries on the session, for Deaths to read. It
// is called before the session's first link.
func (i *Intake) FoldDeaths() {
	i.folds.Store(true)
	if i.some != nil {
		i.some.Store(true)
	}
}

// channelRest is how long a channel number is kept out of use once a session on it has
// ended.
const channelRest = 250 * time.Millisecond

// sessions follows the sessions of a connection.
//
// go-amqp uses the lowest free number, so mostly the one that has just become free, and
// takes it for free as soon as the broker's end comes. That is too early in two cases:
//
//   - The broker has ended the session by itself, and go-amqp hasn't written its own end
//     yet. What the old session still writes, and its end at last, would be taken for the
//     new session's, which RabbitMQ ends over it.
//   - RabbitMQ below 4.3 forgets a session only some time after it has sent its end,
//     whichever side asked for it, and what arrives on the number meanwhile is lost: a
//     session that begins then is never answered.
//
// Only the frames tell it in time: before go-amqp reports the end of a session, another may
// have begun. So a begin that comes too early is held back. That delays nothing else: a
// session sends nothing before its begin is answered.
type sessions struct {
	// tell is Config.Blocked. It is called with mu held.
	tell func(blocked bool)
	// folding says that some session folds death histories.
	folding atomic.Bool
	// rests says that the broker needs a rest between two sessions on a number.
	rests atomic.Bool

	mu      sync.Mutex
	of      map[uint16]*Intake
	latest  *Intake              // of the session that began last
	blocked int                  // sessions
	told    bool                 // that some session was blocked
	ended   map[uint16]time.Time // when the last session on a number ended
	// unended has the numbers on which a begin was written, and no end since. The begin
	// that waits for that end is with its number.
	unended map[uint16][]byte
}

// begin is called before a session's begin is sent. It returns how long that is to wait. If
// it is held, it waits for the end of the number's last session: see left.
func (s *sessions) begin(channel uint16, frame []byte) (wait time.Duration, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(channel)
	if s.of == nil {
		s.of, s.unended = map[uint16]*Intake{}, map[uint16][]byte{}
	}
	s.latest = NewIntake()
	s.latest.some = &s.folding
	s.of[channel] = s.latest
	if _, held = s.unended[channel]; held {
		s.unended[channel] = bytes.Clone(frame)
		return 0, true
	}
	s.unended[channel] = nil
	return s.rest(channel), false
}

// left is called when a session's end has been written. It returns the begin that was held
// until then, nil if there is none, and how long that is to wait.
func (s *sessions) left(channel uint16) (begin []byte, wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	begin = s.unended[channel]
	if begin == nil {
		delete(s.unended, channel)
		return nil, 0
	}
	s.unended[channel] = nil
	return begin, s.rest(channel)
}

// rest is how long the broker needs until a session may begin. It is called with mu held.
func (s *sessions) rest(channel uint16) time.Duration {
	if !s.rests.Load() {
		return 0
	}
	ended := s.ended[channel]
	delete(s.ended, channel)
	return channelRest - time.Since(ended)
}

// end is called when a session has ended. RabbitMQ sends on the number that the session
// began on.
func (s *sessions) end(channel uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(channel)
	s.report()
	if s.ended == nil {
		s.ended = map[uint16]time.Time{}
	}
	s.ended[channel] = time.Now()
}

// last is the intake of the session that began last.
func (s *sessions) last() *Intake {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest == nil {
		return NewIntake()
	}
	return s.latest
}

// window is called with what the broker has said of a session's incoming-window.
func (s *sessions) window(channel uint16, n uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.of[channel]
	if i == nil {
		return
	}
	if i.Set(n == 0) {
		if n == 0 {
			s.blocked++
		} else {
			s.blocked--
		}
	}
	i.heard = true
	s.report()
}

// folds says whether death histories on a session are folded.
func (s *sessions) folds(channel uint16) bool {
	if !s.folding.Load() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.of[channel]
	return i != nil && i.folds.Load()
}

// report is called with mu held. The broker takes messages again once a session is known
// to be open and none is blocked: the end of the last one says nothing of that.
func (s *sessions) report() {
	told := s.blocked > 0
	if s.told && !told {
		told = true
		for _, i := range s.of {
			told = told && !i.heard
		}
	}
	if told != s.told {
		s.told = told
		s.tell(told)
	}
}

// close is called when the connection has ended.
func (s *sessions) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for channel := range s.of {
		s.forget(channel)
	}
}

// forget is called with mu held.
func (s *sessions) forget(channel uint16) {
	if i := s.of[channel]; i != nil && i.Now().Blocked {
		s.blocked--
	}
	delete(s.of, channel)
}
