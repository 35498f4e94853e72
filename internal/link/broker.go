package link

import (
	"strconv"
	"strings"
)

// BrokerInfo is how a broker introduced itself. Broker documents the fields.
type BrokerInfo struct {
	Product string
	Version string
	Node    string
	Cluster string
}

// AtLeast reports whether the broker's version is major.minor or later. It is false for a
// version that can't be read.
func (b BrokerInfo) AtLeast(major, minor int) bool {
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
