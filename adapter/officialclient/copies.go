package officialclient

import (
	"context"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// maxLinks is how many addresses there are publishers for at once. Each has a session.
const maxLinks = 50

// attachPause is the pause before another attempt to open a link that was refused.
const attachPause = time.Second

// side is what Serve needs besides a consumer. Tests have one without a broker.
type side interface {
	start() client.Start
	publisher(ctx context.Context, to address.Address) (publisher, error)
	// deadLetters reports whether a queue's arguments have a dead-letter exchange.
	deadLetters(ctx context.Context, queue string) bool
}

type publisher interface {
	Publish(ctx context.Context, m *client.Message, edit ...func(*client.Message)) error
	Close(ctx context.Context) error
}

// own is a connection of package client.
type own struct{ *client.Conn }

func (o own) start() client.Start {
	return client.Start{Broker: o.Broker(), Management: o.Management()}
}

func (o own) publisher(ctx context.Context, to address.Address) (publisher, error) {
	return client.NewPublisher[*client.Message](ctx, o.Conn, to, client.PublisherConfig{Copies: true})
}

func (o own) deadLetters(ctx context.Context, queue string) bool {
	info, err := declare.Inspect(ctx, o.Management(), queue)
	return err == nil && info.Arguments["x-dead-letter-exchange"] != nil
}

// copies publishes the copies of client.Forward. Each address has its own publisher: a link
// for all of them would overwrite the sender's To property.
type copies struct {
	side  side
	mu    sync.Mutex
	links map[address.Address]*link
	ended bool
}

type link struct {
	users int // guarded by copies.mu

	mu  sync.Mutex // guards what follows
	pub publisher
	// err is why it wasn't opened, and holds until next.
	err  error
	next time.Time
}

func newCopies(s side) *copies { return &copies{side: s, links: map[address.Address]*link{}} }

// publish returns nil once the broker has accepted m. While conn is being rebuilt, or the
// broker accepts nothing because of an alarm, it waits within ctx.
func (c *copies) publish(ctx context.Context, to address.Address, m *client.Message) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l, err := c.link(to)
	if err != nil {
		return err
	}
	defer c.leave(l)
	pub, err := l.open(ctx, c.side, to)
	if err != nil {
		return err
	}
	return pub.Publish(ctx, m)
}

func (l *link) open(ctx context.Context, s side, to address.Address) (publisher, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pub != nil || l.err != nil && time.Now().Before(l.next) {
		return l.pub, l.err
	}
	l.pub, l.err = s.publisher(ctx, to)
	if l.err != nil {
		l.pub, l.next = nil, time.Now().Add(attachPause)
	}
	return l.pub, l.err
}

func (c *copies) link(to address.Address) (*link, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.links[to]
	switch {
	case c.ended:
		return nil, client.ErrClosed
	case l == nil && !c.room():
		return nil, &client.Error{Op: "forward", Target: to.String(), Kind: client.ErrNotSent, Text: "too many different forward addresses are in use"}
	case l == nil:
		l = &link{}
		c.links[to] = l
	}
	l.users++
	return l, nil
}

// room makes room for another link by closing one that nobody uses. c.mu is held.
func (c *copies) room() bool {
	if len(c.links) < maxLinks {
		return true
	}
	for to, l := range c.links {
		if l.users == 0 {
			delete(c.links, to)
			go l.close()
			return true
		}
	}
	return false
}

func (c *copies) leave(l *link) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.users--
}

// close closes all links. Nothing is published on them any more.
func (c *copies) close() {
	c.mu.Lock()
	links := c.links
	c.links, c.ended = nil, true
	c.mu.Unlock()
	var closing sync.WaitGroup
	for _, l := range links {
		closing.Go(l.close)
	}
	closing.Wait()
}

func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pub != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = l.pub.Close(ctx) // nothing of ours is on it
	}
}
