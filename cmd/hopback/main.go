// Command hopback works with RabbitMQ topologies and dead letters from the command line:
//
//   - "hopback topology" plans, applies, checks, converts, and draws topologies from YAML files.
//     Package operate/topologyfile describes the files.
//   - "hopback dlq" surveys, lists, shows, replays, edits, discards, exports, and imports dead
//     letters. "hopback desk" serves a web page for them.
//   - "hopback retry" adds delayed retries to workers in any language.
//   - "hopback outbox" publishes messages from a transactional outbox in PostgreSQL.
//   - "hopback playground" serves a web page with RabbitMQ in the browser.
//   - "hopback broker" serves a RabbitMQ in memory, for tests and for development.
//
// "hopback --help" starts with an example, and each command has --help.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
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
	// A second signal kills the program.
	context.AfterFunc(ctx, stop)
	os.Exit(cli.Run(ctx, cli.Process()))
}
