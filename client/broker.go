package client

import (
	"strconv"
	"strings"
)

// Broker describes a broker, as it introduced itself when the connection opened.
type Broker struct {
	Product string // "RabbitMQ"
	Version string // "4.3.6"
	Node    string // "rabbit@host"
	Cluster string // the cluster's name
}

// AtLeast reports whether the broker's version is major.minor or later. It is false
// for a version that can't be read.
func (b Broker) AtLeast(major, minor int) bool {
	parts := strings.SplitN(b.Version, ".", 3)
	if len(parts) < 2 {
		return false
	}
	have, err1 := strconv.Atoi(parts[0])
	haveMinor, err2 := strconv.Atoi(parts[1])
	if err1 != nil || err2 != nil {
		return false
	}
	return have > major || have == major && haveMinor >= minor
}
