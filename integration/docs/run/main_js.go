// Command run runs the programs of the documents in a browser, on a RabbitMQ in memory: Go's network there reaches what listens in
// the same program. integration/tools/docsite compiles it, with the programs, and its run.js starts it.
package main

import (
	"log"
	"os"
	_ "os/signal" // has what interrupt is
	"syscall/js"
	_ "unsafe" // for go:linkname

	"github.com/hopback/hopback/hopbacktest"
)

// programs are the main functions, by page. Files that only docsite's build has fill it.
var programs = map[string]func(){}

// interrupt is how Go's runtime reports a signal. A browser has none.
//
//go:linkname interrupt os/signal.process
func interrupt(os.Signal)

// main runs the program that the first argument names, with the others.
func main() {
	b, err := hopbacktest.New(hopbacktest.Config{})
	if err == nil {
		_, err = b.Listen("127.0.0.1:5672")
	}
	if err != nil {
		log.Fatal(err)
	}
	js.Global().Set("interrupt", js.FuncOf(func(js.Value, []js.Value) any { interrupt(os.Interrupt); return nil }))
	os.Args = os.Args[1:]
	programs[os.Args[0]]()
}
