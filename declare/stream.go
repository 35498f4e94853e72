package declare

import (
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/queuearg"
)

// Stream is a replicated log: messages stay after they were read, until they are too old or too
// many. It has no dead letters, no delivery limit, and no time to live of single messages, so it
// can't be a work queue with retries. Package stream consumes it.
type Stream struct {
	// Name is the name of the stream, with the rules of [QuorumQueue.Name]. Required.
	Name string

	// MaxAge is how long a message is kept, in whole seconds. MaxLengthBytes is how many bytes
	// are kept. The broker deletes whole segments, so it keeps a little more. Default: no limit,
	// until the disk is full.
	MaxAge         time.Duration
	MaxLengthBytes int64

	// MaxSegmentSize is the size of one segment file in bytes, at most 3,000,000,000. Default:
	// 500,000,000.
	MaxSegmentSize int64

	// FilterSize is the size of the filter in each chunk, 16 to 255 bytes. Default: 16.
	FilterSize int

	// InitialClusterSize is the number of replicas at first. Default: one on each node.
	InitialClusterSize int

	// LeaderLocator chooses the node that leads the stream. Default: [LeaderClientLocal].
	LeaderLocator LeaderLocator

	// Arguments are further arguments, with the rules of [QuorumQueue.Arguments].
	Arguments map[string]any
}

var _ Queue = Stream{}

// Address returns the address for publishing to the stream and consuming from it.
func (s Stream) Address() address.Address { return address.Queue(s.Name) }

// Validate returns all errors in s, joined; each one is an *[argument.Error].
func (s Stream) Validate() error {
	_, errs := s.declaration()
	return errors.Join(errs...)
}

func (s Stream) path() argument.Path { return names.Label("Stream", s.Name) }

func (s Stream) declaration() (map[string]any, []error) {
	c := &collector{at: s.path(), args: map[string]any{"x-queue-type": queuearg.Stream}}
	c.fail(names.CheckOwn(c.at.Field("Name"), s.Name, "choose another name"))
	switch {
	case s.MaxAge < 0:
		c.bad("MaxAge", argument.CodeOutOfRange, s.MaxAge, "is negative", "use a duration above zero, or leave it out")
	case s.MaxAge%time.Second != 0:
		c.bad("MaxAge", argument.CodeNotWhole, s.MaxAge, "isn't a whole number of seconds, the broker's smallest unit", "round it with Round(time.Second)")
	case s.MaxAge > 0:
		c.args["x-max-age"] = fmt.Sprintf("%ds", s.MaxAge/time.Second)
	}
	c.positive("MaxLengthBytes", "x-max-length-bytes", s.MaxLengthBytes)
	c.within("MaxSegmentSize", "x-stream-max-segment-size-bytes", s.MaxSegmentSize, 1, queuearg.MaxSegmentSize)
	c.within("FilterSize", "x-stream-filter-size-bytes", int64(s.FilterSize), queuearg.MinFilterSize, queuearg.MaxFilterSize)
	c.positive("InitialClusterSize", "x-initial-cluster-size", int64(s.InitialClusterSize))
	c.leader(s.LeaderLocator)
	c.further(queuearg.Stream, s.Arguments)
	return map[string]any{"durable": true, "exclusive": false, "auto_delete": false, "arguments": c.args}, c.errs
}
