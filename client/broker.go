package client

import (
	"github.com/hopback/hopback/internal/link"
)

// Broker describes a broker, as it introduced itself when the connection opened. See
// [Conn.Broker].
type Broker struct {
	Product string // "RabbitMQ"
	Version string // "4.3.6"
	Node    string // "rabbit@host"
	Cluster string // the cluster's name
}

// AtLeast reports whether the broker's version is major.minor or later. It returns false if the
// version can't be parsed.
func (b Broker) AtLeast(major, minor int) bool { return link.BrokerInfo(b).AtLeast(major, minor) }
