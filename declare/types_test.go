package declare_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

func TestQueueTypesRefuse(t *testing.T) {
	t.Parallel()
	type raw = declare.RawQueue
	drop := declare.Drop()
	args := func(key string, v any) map[string]any { return map[string]any{"x-queue-type": "quorum", key: v} }
	for says, q := range map[string]declare.Queue{
		`ClassicQueue("").Name is empty`:                        declare.ClassicQueue{DeadLetter: drop},
		`ClassicQueue("q").DeadLetter isn't set`:                declare.ClassicQueue{Name: "q"},
		`a classic queue can't dead-letter at least once`:       declare.ClassicQueue{Name: "q", DeadLetter: declare.ToQueue("d")},
		`isn't an overflow behavior of a classic queue`:         declare.ClassicQueue{Name: "q", DeadLetter: drop, Overflow: "x"},
		`MaxPriority = 256 is out of range`:                     declare.ClassicQueue{Name: "q", DeadLetter: drop, MaxPriority: 256},
		`Version = 3 is out of range`:                           declare.ClassicQueue{Name: "q", DeadLetter: drop, Version: 3},
		`it belongs in MaxPriority`:                             declare.ClassicQueue{Name: "q", DeadLetter: drop, Arguments: map[string]any{"x-max-priority": 3}},
		`has no effect on a classic queue`:                      declare.ClassicQueue{Name: "q", DeadLetter: drop, Arguments: map[string]any{"x-delivery-limit": 3}},
		`LeaderLocator = "x" is unknown`:                        declare.ClassicQueue{Name: "q", DeadLetter: drop, LeaderLocator: "x"},
		`isn't an overflow behavior of a quorum queue`:          declare.QuorumQueue{Name: "q", DeadLetter: drop, Overflow: declare.OverflowRejectPublishDLX},
		`TargetGroupSize = -1 is negative`:                      declare.QuorumQueue{Name: "q", DeadLetter: drop, TargetGroupSize: -1},
		`has no effect on a quorum queue, only on type classic`: declare.QuorumQueue{Name: "q", DeadLetter: drop, Arguments: map[string]any{"x-max-priority": 3}},
		`isn't a whole number of seconds`:                       declare.Stream{Name: "q", MaxAge: time.Millisecond},
		`MaxAge = "-1s" is negative`:                            declare.Stream{Name: "q", MaxAge: -time.Second},
		`FilterSize = 15 is out of range`:                       declare.Stream{Name: "q", FilterSize: 15},
		`MaxSegmentSize = 3000000001 is out of range`:           declare.Stream{Name: "q", MaxSegmentSize: 3_000_000_001},
		`the type of the queue sets it`:                         declare.Stream{Name: "q", Arguments: map[string]any{"x-queue-type": "stream"}},
		`has no effect on a stream queue`:                       declare.Stream{Name: "q", Arguments: map[string]any{"x-message-ttl": 1}},
		`RawQueue("q").Arguments["x-delivery-limit"]`:           raw{Name: "q", Arguments: args("x-delivery-limit", "2")},
		`is a string, and should be a bool`:                     raw{Name: "q", Arguments: args("x-single-active-consumer", "true")},
		`is a float, and should be an integer`:                  raw{Name: "q", Arguments: args("x-message-ttl", 1.5)},
		`is an integer, and should be a string`:                 raw{Name: "q", Arguments: args("x-dead-letter-exchange", 7)},
		`should be one of at-most-once, at-least-once`:          raw{Name: "q", Arguments: args("x-dead-letter-strategy", "never")},
		`should be at most 315360000000`:                        raw{Name: "q", Arguments: args("x-message-ttl", 1<<60)},
		`should be at least -1`:                                 raw{Name: "q", Arguments: args("x-delivery-limit", -2)},
		`followed by Y, M, D, h, m, or s`:                       raw{Name: "q", Arguments: map[string]any{"x-queue-type": "stream", "x-max-age": "7 days"}},
		`starts with "amq."`:                                    raw{Name: "amq.q"},
		`is a declare_test.unsendable; use a string, a `:        raw{Name: "q", Arguments: map[string]any{"x": unsendable{}}},
	} {
		var e *argument.Error
		require.ErrorAs(t, q.Validate(), &e, says)
		assert.ErrorContains(t, q.Validate(), says)
	}
	// What our version doesn't know may be a plugin's or a later broker's.
	require.NoError(t, raw{Name: "q", Arguments: args("x-new", 1.5)}.Validate())
	require.NoError(t, raw{Name: "q", Arguments: map[string]any{"x-queue-type": "x-plugin", "x-delivery-limit": "2"}}.Validate())
	require.NoError(t, declare.Stream{Name: "s", Arguments: map[string]any{"x-new": 1}}.Validate())
}

type unsendable struct{}
