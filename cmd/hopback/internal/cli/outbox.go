package cli

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/outbox"
)

const outboxHelp = `Publish what PostgreSQL transactions have written to the outbox. A service writes
its messages by package outbox, in the transaction with its data. "hopback outbox
migrate" creates the tables, and "hopback outbox relay" publishes what was committed.

Exit codes:
  0    done; the relay was ended by ^C or SIGTERM, after the batches under way
  1    no: the database has no outbox, or the user no right to it
  2    unknown: the database or the broker can't be reached or refuses the user, or the
       time is over
  64   the command line is wrong; nothing was done
  130  interrupted before it began`

const databaseVariable = "DATABASE_URL"

func (c *command) outbox() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "outbox",
		Short: "Publish what PostgreSQL transactions have written",
		Long:  outboxHelp,
		Example: `  hopback outbox migrate --database postgres://shop@localhost/shop
  hopback outbox relay --database postgres://shop@localhost/shop --order by-key`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	var database string
	f.StringVar(&database, "database", "", "`URL` of the database (default $"+databaseVariable+", or what PGHOST and its like say)")
	f.Duration("timeout", time.Minute, "how long the command, or the start of relay, may take; 0 means no limit")
	cmd.AddCommand(c.outboxMigrate(&database), c.outboxRelay(&database))
	return cmd
}

// openDatabase returns a pool that has been reached.
func (c *command) openDatabase(ctx context.Context, database string) (*pgxpool.Pool, error) {
	if database == "" {
		database = c.io.Env(databaseVariable)
	}
	cfg, err := pgxpool.ParseConfig(database)
	if err != nil {
		return nil, usage("--database: %w", err)
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, coded(Unknown, err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, coded(Unknown, timedOut(ctx, fmt.Errorf("the database: %w", err)))
	}
	return pool, nil
}

func (c *command) outboxMigrate(database *string) *cobra.Command {
	var print bool
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Create hopback's tables, or bring them up to this version",
		Long: `Create hopback's tables, or bring them up to this version: those of the outbox, of the
inbox, and for the positions of stream consumers. It may be run at each start, and by
several at once. --print prints the SQL instead, for a tool of your own; no database is
asked then.`,
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
			_, err = fmt.Fprintln(c.stdout.w, "The tables are up to date.")
			return err
		},
	}
	cmd.Flags().BoolVar(&print, "print", false, "print the SQL, and do nothing")
	return cmd
}

func (c *command) outboxRelay(database *string) *cobra.Command {
	var cfg outbox.RelayConfig
	var order string
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Publish what was committed, until ^C or SIGTERM",
		Long: `Publish what was committed, until ^C or SIGTERM. Any number may run side by side, and
one that is killed loses nothing: what it had published without deleting it is published
again, with the same message-id.

--order by-key publishes messages with the same key in order; then one relay works, and
the others stand by. All relays of one outbox need the same order. What can't be
published is moved to the table hopback_outbox_set_aside with the reason.`,
		Example: `  hopback outbox relay --database postgres://shop@localhost/shop
  hopback outbox relay --order by-key --set-aside-after 10m`,
		Args: takes(0, 0, "[flags]"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Order = outbox.Order(order)
			if cfg.Order != outbox.Unordered && cfg.Order != outbox.ByKey {
				return usage("--order %s is unknown; use %s or %s", order, outbox.Unordered, outbox.ByKey)
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				b.level = slog.LevelInfo
				pool, err := c.openDatabase(ctx, *database)
				if err != nil {
					return err
				}
				defer pool.Close()
				pool.Reset() // the relay opens connections by itself, and the command's end waits for no other
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
				log.Info("hopback: ended", "published", s.Published, "set_aside", s.SetAside)
				return nil
			})
		},
	}
	c.connectionFlags(cmd.Flags())
	f := cmd.Flags()
	f.StringVar(&order, "order", string(outbox.Unordered), "`order` in which messages are published: unordered or by-key")
	f.IntVar(&cfg.Batch, "batch", 0, "how many messages are read and published together (default 1000)")
	f.IntVar(&cfg.Workers, "workers", 0, "how many batches are published at once, unordered (default 2)")
	f.DurationVar(&cfg.PollInterval, "poll", 0, "how often it looks where no notification wakes it (default 1s)")
	f.DurationVar(&cfg.SetAsideAfter, "set-aside-after", 0, "how long a message is tried that the broker doesn't take (default 1h)")
	_ = cmd.RegisterFlagCompletionFunc("order", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return []string{string(outbox.Unordered), string(outbox.ByKey)}, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}
