package cli

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/outbox"
)

const outboxHelp = `Publish messages from a transactional outbox in PostgreSQL. A service inserts its
messages with package outbox, in the same transaction as its data. "hopback outbox
migrate" creates the tables, and "hopback outbox relay" publishes committed messages.

Exit codes:
  0    done; ^C or SIGTERM stopped the relay, after the batches in flight
  1    no: the database has no outbox, or the user lacks a privilege
  2    unknown: the database or the broker can't be reached or refuses the user, or the
       timeout expired
  64   the command line is wrong; nothing was done
  130  interrupted before it started`

const databaseVariable = "DATABASE_URL"

func (c *command) outbox() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "outbox",
		Short: "Publish messages from a transactional outbox in PostgreSQL",
		Long:  outboxHelp,
		Example: `  hopback outbox migrate --database postgres://shop@localhost/shop
  hopback outbox relay --database postgres://shop@localhost/shop --order by-key`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	var database string
	f.StringVar(&database, "database", "", "`URL` of the database (default $"+databaseVariable+", or PGHOST and the other variables of libpq)")
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command, or of the start of relay; 0 means none")
	cmd.AddCommand(c.outboxMigrate(&database), c.outboxRelay(&database))
	return cmd
}

// openDatabase returns a pool of a database that answers.
func (c *command) openDatabase(ctx context.Context, database string) (*pgxpool.Pool, error) {
	if database == "" {
		database = c.io.Env(databaseVariable)
	}
	cfg, err := pgxpool.ParseConfig(database)
	if err != nil || misread(database) {
		// pgx's error repeats the URL, without what pgx reads as the password. It may read a part
		// of the password as something else.
		return nil, usage("--database isn't the URL of a database; write it as postgres://user:password@host:5432/database, with reserved characters percent-encoded, such as %%40 for @")
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, coded(Unknown, err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		if c.interrupted() {
			return nil, context.Cause(c.ctx)
		}
		return nil, coded(Unknown, timedOut(ctx, fmt.Errorf("the database doesn't answer: %w; check --database, or $%s", err, databaseVariable)))
	}
	return pool, nil
}

// misread reports whether a URL has an @ that may be part of the password: the parser ends the
// password at a reserved character, and errors of the connection show what comes then.
func misread(database string) bool {
	scheme, rest, isURL := strings.Cut(database, "://")
	if !isURL || strings.ContainsAny(scheme, " =") {
		return false
	}
	authority := rest
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority = rest[:i]
	}
	return strings.Count(rest, "@") > 1 || strings.Contains(rest, "@") && !strings.Contains(authority, "@")
}

func (c *command) outboxMigrate(database *string) *cobra.Command {
	var print bool
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Create hopback's tables, or update them to this version",
		Long: `Create hopback's tables, or update them to this version: the outbox, the inbox, and the
offsets of stream consumers. You can run it at each start, and concurrently. --print
prints the SQL for your own migration tool, without a database.`,
		Example: `  hopback outbox migrate --database postgres://shop@localhost/shop
  hopback outbox migrate --print >migrations/007_outbox.sql`,
		Args: takes(0, 0, "[flags]"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if print {
				return fs.WalkDir(postgres.Migrations(), ".", func(path string, d fs.DirEntry, err error) error {
					if err != nil || d.IsDir() {
						return err
					}
					sql, err := fs.ReadFile(postgres.Migrations(), path)
					if err == nil {
						_, err = fmt.Fprintf(c.stdout.w, "-- %s\n%s", path, sql)
					}
					return err
				})
			}
			ctx, cancel, err := c.within(cmd)
			if err != nil {
				return err
			}
			defer cancel()
			pool, err := c.openDatabase(ctx, *database)
			if err != nil {
				return err
			}
			defer pool.Close()
			if err := postgres.Migrate(ctx, pool); err != nil {
				return coded(No, timedOut(ctx, err))
			}
			if c.structured() {
				return c.printStructured(map[string]bool{"up_to_date": true})
			}
			_, err = fmt.Fprintln(c.stdout.w, "The tables are up to date.")
			return err
		},
	}
	cmd.Flags().BoolVar(&print, "print", false, "only print the SQL")
	c.outputFlag(cmd, "the result")
	return cmd
}

func (c *command) outboxRelay(database *string) *cobra.Command {
	var cfg outbox.RelayConfig
	var order string
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Publish committed messages, until ^C or SIGTERM",
		Long: `Publish committed messages, until ^C or SIGTERM. Any number of relays can run at once. A
relay that is killed loses nothing: messages that it published and didn't delete are
published again, with the same message-id.

--order by-key publishes messages with the same key in order; one relay works, and the
others stand by. All relays of an outbox need the same order. A message that can't be
published moves to the table hopback_outbox_set_aside, with the reason.`,
		Example: `  hopback outbox relay --database postgres://shop@localhost/shop
  hopback outbox relay --order by-key --set-aside-after 10m`,
		Args: takes(0, 0, "[flags]"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Order = outbox.Order(order)
			if cfg.Order != outbox.OrderNone && cfg.Order != outbox.OrderByKey {
				return usage("--order %.80q is unknown; use %s or %s", order, outbox.OrderNone, outbox.OrderByKey)
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				b.level = slog.LevelInfo
				pool, err := c.openDatabase(ctx, *database)
				if err != nil {
					return err
				}
				defer pool.Close()
				pool.Reset() // the relay opens its connections itself
				if err := b.connect(ctx); err != nil {
					return err
				}
				log := b.logger()
				cfg.Logger = log
				relay, err := outbox.NewRelay(pool, b.conn, cfg)
				if err != nil {
					return err
				}
				log.Info("hopback: relaying", "database", pool.Config().ConnConfig.Database, "order", order)
				if err := relay.Run(c.ctx); err != nil {
					return coded(No, err)
				}
				s := relay.Stats()
				log.Info("hopback: stopped", "published", s.Published, "set_aside", s.SetAside)
				return nil
			})
		},
	}
	c.connectionFlags(cmd.Flags())
	f := cmd.Flags()
	f.StringVar(&order, "order", string(outbox.OrderNone), "`order` in which messages are published: unordered or by-key")
	f.IntVar(&cfg.Batch, "batch", 0, "messages per batch (default 1000)")
	f.IntVar(&cfg.Workers, "workers", 0, "batches in flight at once, if unordered (default 2)")
	durationVar(f, &cfg.PollInterval, "poll", 0, "how often to query the table without a notification (default 1s)")
	durationVar(f, &cfg.SetAsideAfter, "set-aside-after", 0, "how long to retry a message that the broker refuses (default 1h)")
	_ = cmd.RegisterFlagCompletionFunc("order", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return []string{string(outbox.OrderNone), string(outbox.OrderByKey)}, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}
