package main

import (
	"context"

	"github.com/hopback/hopback/declare"
)

// streamCredit is how many messages of a stream each peer may hold: 1,000 is the default
// of package stream.
const streamCredit = 1000

func streamContest() contest {
	return contest{
		name: "stream", title: "consume a stream from its beginning, no-op handler, 256 B", real: true, run: runStream,
		contestants: []contestant{{name: nHop, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}},
		pairs:       []pair{{ours: nHop, peer: nRaw, faster: 1}},
	}
}

// runStream has all contestants of a run read the same stream.
func runStream(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
	n = fit(n, 256)
	name, err := l.stream(ctx, warmUp(n)+n)
	if err != nil {
		return nil, err
	}
	m := l.newMeter(warmUp(n), n)
	settleDown()
	if err := c.peer.(streamReader).read(ctx, l.url, name, m); err != nil {
		return nil, err
	}
	return m.metrics(), nil
}

// stream returns a stream with n messages, which is made and filled the first time.
func (l *lab) stream(ctx context.Context, n int) (string, error) {
	if name := l.streams[n]; name != "" {
		return name, nil
	}
	name := l.name()
	if err := l.apply(ctx, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: name}}}); err != nil {
		return "", err
	}
	l.streams[n] = name
	return name, l.fill(ctx, name, body(256), n)
}
