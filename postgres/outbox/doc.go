// Package outbox publishes messages from a PostgreSQL transaction: all of them if it commits, and
// none if it rolls back. Use it if a service writes to its database and publishes a message about
// that.
//
// Write the data and the message in one transaction:
//
//	tx, err := pool.Begin(ctx)
//	...
//	_, err = tx.Exec(ctx, "INSERT INTO orders ...")
//	_, err = outbox.Publish(ctx, tx, address.Exchange("orders", "paid"), order)
//	...
//	err = tx.Commit(ctx)
//
// Run a [Relay] in the service or in a separate program:
//
//	relay, err := outbox.NewRelay(pool, conn, outbox.RelayConfig{})
//	err = relay.Run(ctx)
//
// The relay reads committed messages, publishes them, and deletes them once the broker has
// accepted them.
//
// # Guarantees
//
//   - A message is published if and only if its transaction commits, however late that is.
//   - A message is published at least once. If a relay stops between the broker's confirmation
//     and the deletion, the message is published again, with the same message-id. Package
//     middleware/dedupe recognizes it.
//   - With [OrderByKey], messages with the same key are published in order, one after the other.
//     The order is the order of writing, for transactions that exclude each other before they
//     write, for example because they lock the same row first. If two transactions run at the
//     same time, either's messages may come first.
//   - A message that can't be published, for example because it is too large or because no queue
//     has been bound for long, is moved to the table hopback_outbox_set_aside, with the reason.
//     Other messages keep flowing, however many of these there are.
//
// # Delayed messages
//
// [PublishAt] writes a message that is published when it is due, and [Cancel] cancels it. Until
// then it waits in a separate table, and delays no other message. That is so with RabbitMQ 4.4,
// too, whose queues could hold it: in the table a transaction can cancel it together with other
// changes, until the moment when it is published.
//
// # Tables
//
// [postgres.Migrate] creates the tables in the first schema of the search path. The table
// hopback_outbox has 16 partitions, which are filled in turn. A relay truncates each one when all
// its messages are published. So the table doesn't bloat while a long transaction, such as a
// report or a backup, keeps VACUUM from removing rows.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package outbox
