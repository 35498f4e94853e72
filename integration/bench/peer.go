package main

import "context"

// A peer implements those of the interfaces below that it can do. Each connects
// for each run and leaves nothing behind. All send the same message: body as
// one binary section, durable, with a message-id.

// publishPeer publishes m.total() messages, and ticks for each one that the broker
// has confirmed.
type publishPeer interface {
	publish(ctx context.Context, url, queue string, body []byte, m *meter) error
}

// consumePeer consumes and settles what it has handled, until m is done.
type consumePeer interface {
	consume(ctx context.Context, url, queue string, m *meter) error
}

// failPeer consumes with a number of handlers at a time, ticks for each message, and
// sends it off to come back after failDelay, until ctx ends.
type failPeer interface {
	fail(ctx context.Context, url string, bed *retryBed, concurrency int, m *meter) error
}

// streamReader consumes a stream from its beginning, one handler at a time, until m is
// done.
type streamReader interface {
	read(ctx context.Context, url, name string, m *meter) error
}

// speaks091 reports whether a peer needs AMQP 0-9-1, which a hopbacktest broker doesn't have.
func speaks091(peer any) bool {
	_, ok := peer.(amqp091Peer)
	return ok
}
