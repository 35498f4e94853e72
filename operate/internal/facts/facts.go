// Package facts is what only a running cluster shows: nodes, alarms, consumers, and rates. Package
// examine collects it, and the rules of package examine judge it.
package facts

import "time"

// Cluster is the state of a cluster. The zero value is a cluster about which nothing is known.
type Cluster struct {
	// Now is the time of the examination. Versions go out of support by it.
	Now     time.Time
	Version string
	Nodes   []Node
	// Deprecated are the deprecated features in use, and DisabledFlags the stable feature flags
	// that are disabled.
	Deprecated    []Deprecated
	DisabledFlags []string
	// Unread says which parts couldn't be read, and why.
	Unread map[string]string
	VHosts map[string]VHost
}

// The parts of a Cluster that may be unread, besides those of a snapshot.
const (
	Alarms    = "state of the nodes"
	Consumers = "consumers"
	Features  = "deprecated features in use"
	Flags     = "feature flags"
	// Policies are the policies themselves: what they make of a queue may be known all the same.
	Policies = "list of policies"
)

// Node is a node of the cluster.
type Node struct {
	Name, Version          string
	Running                bool
	MemoryAlarm, DiskAlarm bool
	// Partitioned are the nodes that this one lost the contact with.
	Partitioned   []string
	DiskFree      int64
	DiskFreeLimit int64
	MemoryLimit   int64
}

// Deprecated is a deprecated feature that somebody uses.
type Deprecated struct{ Name, Description string }

// VHost is what a snapshot of a virtual host doesn't have.
type VHost struct {
	Queues    map[string]Queue
	Exchanges map[string]Exchange
}

// Queue is the state of a queue.
type Queue struct {
	// Bytes are the messages' bodies.
	Bytes uint64
	// Policy is what policies set, as the broker sees it.
	Policy map[string]any
	// AckRate is the number of acknowledgements per second, and Rated whether it is known.
	AckRate float64
	Rated   bool
	// Returned is the number of redeliveries per second.
	Returned float64
	// Unlimited are consumers of AMQP 0-9-1 that have no prefetch limit, and AutoAck those that
	// don't acknowledge.
	Unlimited, AutoAck int
}

// Exchange counts the messages published to an exchange, and the copies that it routed. Both are
// 0 if the broker has no statistics.
type Exchange struct{ In, Out uint64 }
