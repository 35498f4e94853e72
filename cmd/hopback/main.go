// Command hopback plans, applies, checks and draws RabbitMQ topologies from small
// files. "hopback topology --help" says how; package topologyfile has the files.
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
