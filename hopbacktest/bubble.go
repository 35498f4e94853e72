package hopbacktest

import (
	"bytes"
	"runtime"

	"github.com/hopback/hopback/argument"
)

// bubble names the testing/synctest bubble of the calling goroutine, or is empty outside of any.
// Only a goroutine's trace has the name (TestABrokerOfAnotherBubble).
func bubble() string {
	var b [160]byte
	header, _, _ := bytes.Cut(b[:runtime.Stack(b[:], false)], []byte("\n"))
	_, name, ok := bytes.Cut(header, []byte("synctest bubble "))
	if !ok {
		return ""
	}
	name, _, _ = bytes.Cut(name, []byte("]"))
	name, _, _ = bytes.Cut(name, []byte(","))
	return string(name)
}

// elsewhere is the error if the broker is used outside of its bubble, or nil. Go crashes the
// process if a goroutine that waits in one bubble is woken from another one.
func (b *Broker) elsewhere() error {
	switch here := bubble(); {
	case here == b.bubble:
		return nil
	case b.bubble == "":
		return argument.New("Broker", nil, "was made outside of the testing/synctest bubble that uses it", "call hopbacktest.Start or New in the function that you pass to synctest.Test")
	default:
		return argument.New("Broker", nil, "was made in a testing/synctest bubble, and is used outside of it", "use it only in the function that you pass to synctest.Test, and start one for each bubble")
	}
}
