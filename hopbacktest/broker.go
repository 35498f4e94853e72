package hopbacktest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/hopbacktest/internal/vnet"
	"github.com/hopback/hopback/hopbacktest/internal/wire"
	"github.com/hopback/hopback/internal/frames"
)

// Config configures a Broker. The zero value is a RabbitMQ 4.3.6 with the virtual host "/"
// and the user guest with the password guest.
type Config struct {
	// Version is "4.4.0", "4.3.6", or "4.0.5". Default: "4.3.6".
	Version string
	// Nodes are the names of the cluster's nodes. Clients connect to the first one. The other
	// names are only for [Queue.MoveLeader]. Default: "rabbit@memory".
	Nodes []string
	// ConsumerTimeout is how long a delivery can stay unsettled. After that, version 4.3 and
	// later deliver the message to another consumer. Default: 30 min.
	ConsumerTimeout time.Duration
	// DeadLetterRetry is how long a queue with at-least-once dead-lettering waits for a confirm
	// before it publishes a dead letter again. Default: 180 s.
	DeadLetterRetry time.Duration
	// Heartbeat is RabbitMQ's setting heartbeat, in whole seconds: the broker closes a connection that has been
	// silent for two to three times as long. Increase it together with [client.Config].IdleTimeout if a test lets
	// days pass: heartbeats take most of its time. Default: 60 s.
	Heartbeat time.Duration
	// MaxMessageSize is the maximum size of a message in bytes. Default: 16 MiB.
	MaxMessageSize int
	// MaxMessages and MaxBytes limit all queues together. The broker rejects messages beyond
	// a limit. MaxBytes includes the memory of annotations. Defaults: 10,000,000 messages and
	// 1 GiB.
	MaxMessages int
	MaxBytes    int64
	// MaxEvents is how many of the latest events [Broker.Events] returns. Use a negative value
	// for none. Default: 10,000.
	MaxEvents int
	// OnConnect, if not nil, is called with each new connection before the broker reads from
	// it, on the connection's goroutine. Use it to inject an early fault, such as
	// CutBefore(DirectionFromClient, 7).
	OnConnect func(*Connection)
	// OnLog, if not nil, is called with each line that RabbitMQ would write to its log
	// about a connection. It must not block, and must not call the Broker.
	OnLog func(line string)
}

// host is the broker's name in the in-memory network.
const host = "rabbitmq.memory"

// Broker is a RabbitMQ in memory. Create one with [Start] in a test, or with [New] elsewhere. It
// is safe for concurrent use.
type Broker struct {
	engine  *engine.Broker
	server  *wire.Server
	log     func(string)
	latency atomic.Int64
	ports   atomic.Uint32
	bubble  string // the bubble of New; see bubble
	// settling is held by the caller of synctest.Wait.
	settling chan struct{}

	mu        sync.Mutex
	clients   map[*vnet.Conn]struct{} // the clients' ends of connections from Dial
	listeners map[net.Listener]struct{}
	url       string
	closed    bool
	running   sync.WaitGroup
}

// New starts a Broker. The caller closes it with [Broker.Close]. In a test, use [Start] instead.
// If a field of cfg is invalid, the error is an [*argument.Error].
func New(cfg Config) (*Broker, error) {
	if cfg.Version != "" && !slices.Contains([]string{"4.4.0", "4.3.6", "4.0.5"}, cfg.Version) {
		return nil, argument.New("Config.Version", cfg.Version, "isn't supported", `use "4.4.0", "4.3.6", or "4.0.5"`)
	}
	if cfg.ConsumerTimeout < 0 || cfg.DeadLetterRetry < 0 || cfg.Heartbeat < 0 || cfg.MaxMessageSize < 0 || cfg.MaxMessages < 0 || cfg.MaxBytes < 0 {
		return nil, argument.New("Config", nil, "has a negative time or limit", "use a positive one, or 0 for the default")
	}
	ec := engine.Config{
		Version: cfg.Version, Nodes: cfg.Nodes, DeadLetterRetry: cfg.DeadLetterRetry, ConsumerTimeout: cfg.ConsumerTimeout,
		MaxMessageSize: cfg.MaxMessageSize, MaxMessages: cfg.MaxMessages, MaxBytes: cfg.MaxBytes, MaxLog: cfg.MaxEvents,
	}
	if len(cfg.Nodes) > 0 {
		ec.Node = cfg.Nodes[0]
	}
	e, err := engine.New(ec)
	if err != nil {
		return nil, argument.New("Config", nil, "can't be used", "see the error's cause").Because(err)
	}
	b := &Broker{engine: e, log: cfg.OnLog, bubble: bubble(), settling: make(chan struct{}, 1), listeners: map[net.Listener]struct{}{}, clients: map[*vnet.Conn]struct{}{}, url: "amqp://guest:guest@" + host + ":5672/"}
	if b.log == nil {
		b.log = func(string) {}
	}
	wc := wire.Config{Engine: e, Heartbeat: cfg.Heartbeat, MaxMessageSize: cfg.MaxMessageSize, Log: func(c *wire.Conn, text string) {
		b.log(fmt.Sprintf("connection %d: %s", c.ID(), text))
	}}
	if cfg.OnConnect != nil {
		wc.Accept = func(c *wire.Conn) { cfg.OnConnect(&Connection{c}) }
	}
	b.server = wire.NewServer(wc)
	return b, nil
}

// tb is the part of testing.TB that this package uses.
type tb interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Start starts a Broker for a test and closes it when the test ends.
//
//   - An invalid Config fails the test.
//   - In a testing/synctest bubble, a client that is still connected at the end fails the
//     test, since its goroutines would keep the bubble from ending.
func Start(t tb, cfg Config) *Broker {
	t.Helper()
	b, err := New(cfg)
	if err != nil {
		t.Fatalf("hopbacktest: %v", err)
	}
	t.Cleanup(func() {
		if n := b.connected(); n > 0 && b.bubble != "" && b.elsewhere() == nil {
			t.Errorf("hopbacktest: a client is still connected (connections: %d), so the testing/synctest bubble can't end; close each client.Conn, for example with defer", n)
		}
		b.Close()
	})
	return b
}

// connected is how many clients of Dial haven't closed their connections.
func (b *Broker) connected() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.clients {
		if c.Open() {
			n++
		}
	}
	return n
}

// Close cuts all connections, closes all listeners, and drops all data. It returns when all of
// the Broker's goroutines and timers have ended.
//
// Close a Broker of a testing/synctest bubble inside the bubble. Outside of it, Close does
// nothing.
func (b *Broker) Close() {
	if b.bubble != "" && b.elsewhere() != nil {
		return
	}
	b.mu.Lock()
	b.closed = true
	for l := range b.listeners {
		_ = l.Close()
	}
	b.mu.Unlock()
	b.server.Close()
	b.running.Wait()
	b.engine.Close()
}

// Version returns the version of RabbitMQ: "4.4.0", "4.3.6", or "4.0.5".
func (b *Broker) Version() string { return b.engine.Version() }

// URL returns the URL for client.Connect. After [Broker.Listen] it is the URL of the latest
// listener. Before that, it works only together with Dial.
func (b *Broker) URL() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.url
}

// errClosed is the cause of errors after Close.
var errClosed = errors.New("hopbacktest: the broker is closed")

// Dial connects to the broker over an in-memory network. Use it as client.Config.Dial. It
// ignores the network and the address.
//
//   - While the broker is stopped, the connection is refused.
//   - In another testing/synctest bubble than that of New, the error is an [*argument.Error].
func (b *Broker) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	if err := b.elsewhere(); err != nil {
		return nil, err
	}
	if delay := 2 * time.Duration(b.latency.Load()); delay > 0 { // one round trip
		t := time.NewTimer(delay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	server := vnet.Addr(address)
	if address == "" {
		server = host + ":5672"
	}
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: server, Err: err}
	}
	if !b.engine.Running() {
		return fail(syscall.ECONNREFUSED)
	}
	local := vnet.Addr(fmt.Sprintf("127.0.0.1:%d", 32768+b.ports.Add(1)%28_000))
	ours, theirs := vnet.Pipe(vnet.Config{Client: local, Server: server, Latency: b.delay})
	if !b.serve(theirs, ours) {
		return fail(errClosed)
	}
	return ours, nil
}

func (b *Broker) delay() time.Duration { return time.Duration(b.latency.Load()) }

// serve serves a connection on a new goroutine, unless the broker is closed. client is the
// other end of a connection from Dial, and nil for others.
func (b *Broker) serve(c net.Conn, client *vnet.Conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	if client != nil {
		b.clients[client] = struct{}{}
	}
	b.running.Go(func() {
		b.server.Serve(c)
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.clients, client)
	})
	return true
}

// Listen serves AMQP over TCP at an address such as "127.0.0.1:5672" and returns the URL for
// clients. Use it for other programs and other clients. Close closes the listener.
//
//   - With port 0, the system chooses a port.
//   - Without a host, the address is 127.0.0.1.
//   - If the address is malformed, the error is an [*argument.Error]. Other errors are those of
//     net.Listen.
func (b *Broker) Listen(address string) (url string, err error) {
	if err := b.elsewhere(); err != nil {
		return "", err
	}
	h, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", argument.New("address", address, "isn't a host and a port to listen on", `use an address such as "127.0.0.1:5672"`).Because(err)
	}
	if h == "" {
		h = "127.0.0.1"
	}
	l, err := net.Listen("tcp", net.JoinHostPort(h, port))
	if err != nil {
		return "", err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		_ = l.Close()
		return "", errClosed
	}
	b.url = "amqp://guest:guest@" + l.Addr().String() + "/"
	b.listeners[l] = struct{}{}
	b.running.Go(func() { _ = b.accept(l) })
	return b.url, nil
}

// Serve accepts connections on l, such as a TLS listener, until l is closed or Close is called.
// It closes l. A client with a certificate can log in with SASL EXTERNAL; the user is the
// certificate's common name. The error is never nil.
func (b *Broker) Serve(l net.Listener) error {
	if err := b.elsewhere(); err != nil {
		_ = l.Close()
		return err
	}
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		_ = l.Close()
		return errClosed
	}
	b.listeners[l] = struct{}{}
	b.mu.Unlock()
	return b.accept(l)
}

func (b *Broker) accept(l net.Listener) error {
	defer func() {
		b.mu.Lock()
		delete(b.listeners, l)
		b.mu.Unlock()
		_ = l.Close()
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		if !b.engine.Running() || !b.serve(b.slow(c), nil) {
			_ = c.Close()
		}
	}
}

// Stop shuts the broker down as an operator does: connections get a close frame, and new ones
// are refused until Restart. Confirmed messages are kept.
func (b *Broker) Stop() {
	b.server.CloseConns(&frames.Error{
		Condition:   "amqp:internal-error",
		Description: `Connection forced: "broker forced connection closure with reason 'shutdown'"`,
	})
	b.engine.Stop()
}

// Kill stops the broker as kill -9 does: connections break without a close frame. Confirmed
// messages are kept.
func (b *Broker) Kill() {
	b.engine.Stop()
	b.server.CloseConns(nil)
}

// Restart starts the broker again after Stop or Kill, with all confirmed messages.
func (b *Broker) Restart() { b.engine.Start() }

// Upgrade restarts the broker as another version, as an upgrade in place does: confirmed messages and
// the topology stay. It supports the upgrade from "4.3.6" to "4.4.0". If the broker has a transient queue
// that isn't exclusive, which RabbitMQ 4.4 refuses, it returns an error, and the broker stays stopped.
func (b *Broker) Upgrade(version string) error {
	if was := b.Version(); was != "4.3.6" || version != "4.4.0" {
		return argument.New("version", version, "can't follow "+was, `upgrade a broker of "4.3.6" to "4.4.0"`)
	}
	transient := b.engine.TransientQueues()
	b.Stop()
	if len(transient) > 0 {
		return fmt.Errorf("hopbacktest: RabbitMQ %s doesn't start: queue %q is transient and isn't exclusive", version, transient[0])
	}
	b.engine.SetVersion(version)
	b.Restart()
	return nil
}

// Running reports whether the broker is running. It isn't between Stop or Kill and Restart.
func (b *Broker) Running() bool { return b.engine.Running() }
