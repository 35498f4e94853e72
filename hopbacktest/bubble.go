package hopbacktest

import (
	"bytes"
	"runtime"

	"github.com/hopback/hopback/argument"
)

// bubble names the testing/synctest bubble of the calling goroutine. It is empty outside of
// any. Nothing but a goroutine's trace says so (TestABrokerOfAnotherBubble).
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

// elsewhere is the error of a use of the broker in another bubble than its own: Go ends the
// process over what waits in one and is woken in another.
func (b *Broker) elsewhere() error {
	switch here := bubble(); {
	case here == b.bubble:
		return nil
	case b.bubble == "":
		return argument.New("Broker", nil, "was made outside of the testing/synctest bubble that uses it", "call hopbacktest.Start or New in the function that is given to synctest.Test")
	default:
		return argument.New("Broker", nil, "was made in a testing/synctest bubble, and is used outside of it", "use it in the function that is given to synctest.Test, and make one for each bubble")
	}
}
