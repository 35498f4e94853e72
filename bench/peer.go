package main

import (
	"context"
	"time"

	"github.com/hopback/hopback/client"
)

// A peer implements those of the interfaces below that it can do. Each connects
// anew for each run and leaves nothing behind. All send the same message: body as
// one binary section, durable, with a message-id.

// publishPeer publishes m.total() messages, and ticks for each one that the broker
// has confirmed.
type publishPeer interface {
	publish(ctx context.Context, url, queue string, body []byte, m *meter) error
}

// consumePeer consumes with one handler at a time and settles what it has handled,
// until m is done.
type consumePeer interface {
	consume(ctx context.Context, url, queue string, json bool, m *meter) error
}

// failPeer consumes with a number of handlers at a time. What handle says to retry
// it sends on its way to come back after delay, and accepts the rest, until ctx ends.
type failPeer interface {
	fail(ctx context.Context, url string, bed *retryBed, concurrency int, handle func(body []byte) (delay time.Duration, again bool)) error
}

// streamPeer publishes what comes from in as soon as it comes, and hands each
// message that it consumes to got, until ctx ends. ready is called once it consumes.
type streamPeer interface {
	stream(ctx context.Context, url, queue string, in <-chan []byte, ready func(), got func(body []byte)) error
}

// recoverPeer consumes until ctx ends, whatever happens to its connection.
type recoverPeer interface {
	survive(ctx context.Context, url, queue string, got func(body []byte)) error
}

// since43 is for peers that need RabbitMQ 4.3.
func since43(b client.Broker) bool { return b.AtLeast(4, 3) }

// speaks091 says whether a peer needs AMQP 0-9-1, which a hopbacktest broker hasn't.
func speaks091(peer any) bool {
	switch peer.(type) {
	case amqp091Peer, watermillPeer:
		return true
	}
	return false
}
