package client

import (
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
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
func (b Broker) AtLeast(major, minor int) bool {
	return oldbroker.Version(b.Version).AtLeast(major, minor)
}

// brokerOf is the broker at the other end of a connection.
func brokerOf(w *link.Wire) Broker {
	return Broker{Product: w.Says("product"), Version: w.Version, Node: w.Node, Cluster: w.Says("cluster_name")}
}
