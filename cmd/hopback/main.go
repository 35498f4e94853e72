// Command hopback plans, applies, checks, and draws RabbitMQ topologies from small
// files. "hopback topology --help" says how; package topologyfile has the files.
// "hopback dlq" shows and replays dead letters, and "hopback desk" serves a web page that
// does. "hopback broker" serves a RabbitMQ in memory, for tests and for development.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The second signal ends the program at once.
	context.AfterFunc(ctx, stop)
	os.Exit(cli.Run(ctx, cli.Process()))
}
