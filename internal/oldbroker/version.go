package oldbroker

import (
	"strconv"
	"strings"
)

// Version is a broker's version as it introduces itself, such as "4.3.6"; "" if it doesn't.
type Version string

// AtLeast reports whether the version is major.minor or later. It is false for one that can't be read.
func (v Version) AtLeast(major, minor int) bool {
	parts := strings.SplitN(string(v), ".", 3)
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
