package wire

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// Config configures a Server. Its zero values are RabbitMQ's defaults.
type Config struct {
	// Engine is the broker behind the wire. It must not be nil.
	Engine *engine.Broker
	// MaxFrameSize is the largest frame that is received. Default: 131,072.
	MaxFrameSize int
	// MaxSessions is how many sessions a connection may have. Default: 64.
	MaxSessions int
	// MaxLinks is how many links a session may have. Default: 256.
	MaxLinks int
	// MaxMessageSize is the largest message in bytes. Default: 16 MiB.
	MaxMessageSize int
	// MaxPartial is how many bytes of messages a connection may have begun and not
	// ended. Default: 64 MiB.
	MaxPartial int
	// MaxAttached is how many bytes the attach frames of a connection's links, and the
	// delivery tags that they keep, may have. The links hold what is in them. Default:
	// 4 MiB.
	MaxAttached int
	// MaxHeld is how many bytes of both kinds all connections together may hold. The
	// connection that goes beyond it is closed. Default: 256 MiB.
	MaxHeld int
	// Heartbeat is how long a client may be silent, in whole seconds; it is sent half of
	// that. As RabbitMQ does, the server looks at the end of each such time, and ends a
	// connection that has been silent for two of them. Default: 60 s.
	Heartbeat time.Duration
	// HandshakeTimeout is how long a client may take until its open frame. Default: 10 s.
	HandshakeTimeout time.Duration
	// RefusalDelay is how long the server waits before it refuses a login or a virtual
	// host. Default: 3 s.
	RefusalDelay time.Duration
	// Accept, if not nil, is called for each connection before anything is read from it.
	Accept func(*Conn)
	// Log, if not nil, is called with what RabbitMQ would write to its log. It must not
	// block, or call the Conn except for its ID.
	Log func(c *Conn, text string)
}

func (c Config) withDefaults() Config {
	number := func(field *int, def int) {
		if *field <= 0 {
			*field = def
		}
	}
	duration := func(field *time.Duration, def time.Duration) {
		if *field <= 0 {
			*field = def
		}
	}
	number(&c.MaxFrameSize, 131_072)
	c.MaxFrameSize = max(c.MaxFrameSize, 512)
	number(&c.MaxSessions, 64)
	number(&c.MaxLinks, 256)
	number(&c.MaxMessageSize, 16<<20)
	number(&c.MaxPartial, 64<<20)
	number(&c.MaxAttached, 4<<20)
	number(&c.MaxHeld, 256<<20)
	duration(&c.Heartbeat, time.Minute)
	duration(&c.HandshakeTimeout, 10*time.Second)
	duration(&c.RefusalDelay, 3*time.Second)
	return c
}

// Server serves the connections of a broker.
type Server struct {
	cfg Config
	// old is for what RabbitMQ 4.0 does differently.
	old bool

	mu      sync.Mutex
	next    uint64
	conns   map[*Conn]struct{}
	closed  bool
	idle    chan struct{} // closed when closed and there are no connections
	answers answers
	held    atomic.Int64 // bytes of unfinished messages, attach frames and delivery tags
}

// NewServer returns a server. It starts no goroutines.
func NewServer(cfg Config) *Server {
	return &Server{
		cfg: cfg.withDefaults(), old: strings.HasPrefix(cfg.Engine.Version(), "4.0"),
		conns: map[*Conn]struct{}{}, idle: make(chan struct{}),
	}
}

// Serve serves one connection. It returns when that has ended. It closes nc.
func (s *Server) Serve(nc net.Conn) {
	c := s.enter(nc)
	if c == nil {
		_ = nc.Close()
		return
	}
	defer s.leave(c)
	if s.cfg.Accept != nil {
		s.cfg.Accept(c)
	}
	c.run()
}

func (s *Server) enter(nc net.Conn) *Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.next++
	c := newConn(s, nc, s.next)
	s.conns[c] = struct{}{}
	return c
}

func (s *Server) leave(c *Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	if s.closed && len(s.conns) == 0 {
		close(s.idle)
	}
}

// Conns returns the connections that there are, oldest first.
func (s *Server) Conns() []*Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*Conn, 0, len(s.conns))
	for c := range s.conns {
		all = append(all, c)
	}
	sortConns(all)
	return all
}

// CloseConns closes all connections. With an error they get a close frame that has it,
// as when RabbitMQ is stopped in order. Without one they are cut, as when it is killed.
func (s *Server) CloseConns(why *frames.Error) {
	for _, c := range s.Conns() {
		if why == nil {
			c.Cut()
		} else {
			c.Shut(why)
		}
	}
}

// Close cuts all connections and waits until they have ended.
func (s *Server) Close() {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		if len(s.conns) == 0 {
			close(s.idle)
		}
	}
	s.mu.Unlock()
	s.CloseConns(nil)
	<-s.idle
}

func (s *Server) log(c *Conn, text string) {
	if s.cfg.Log != nil {
		s.cfg.Log(c, text)
	}
}

// answers is what is done to the broker's answers: confirmations and replies to requests.
type answers struct {
	held  atomic.Bool
	delay atomic.Int64
}

// HoldAnswers holds back the answers to messages and requests, or no longer. Those that
// were held back are sent then.
func (s *Server) HoldAnswers(hold bool) {
	s.answers.held.Store(hold)
	for _, c := range s.Conns() {
		c.poke()
	}
}

// DelayAnswers makes each answer late by d.
func (s *Server) DelayAnswers(d time.Duration) { s.answers.delay.Store(int64(d)) }
