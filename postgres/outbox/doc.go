// Package outbox publishes what a PostgreSQL transaction has committed, and nothing that
// it has rolled back.
//
// A service writes its data and its messages in one transaction:
//
//	tx, err := pool.Begin(ctx)
//	...
//	_, err = tx.Exec(ctx, "INSERT INTO orders ...")
//	_, err = outbox.Publish(ctx, tx, address.Exchange("orders", "paid"), order)
//	...
//	err = tx.Commit(ctx)
//
// A [Relay] reads committed messages, publishes them with the message-id that they got
// when they were written, and deletes them when the broker has accepted them. It runs in
// the service, or in a program of its own.
//
// # What is certain
//
//   - A message is published if and only if its transaction commits, however late it
//     commits.
//   - A message is published at least once. A relay that ends between the broker's answer
//     and the commit of its deletion publishes the message again, with the same
//     message-id. A consumer recognises that by package middleware/dedupe.
//   - With [OrderByKey], messages with the same key are published in order, one after another.
//     The order is that in which they were written, by transactions that exclude each
//     other before they write: those that lock the same row first, for instance. If two
//     transactions run side by side, either's messages may come first.
//   - A relay moves a message that can't be published to the table hopback_outbox_set_aside
//     with the reason: one that is too large, for instance, or has had no queue for long.
//     Other messages keep flowing, however many of these there are.
//
// # Later
//
// [PublishAt] writes a message that is published when it is due, and [Cancel] takes it
// back. Until it is due it waits in a table of its own, and holds up nothing.
//
// # Tables
//
// [postgres.Migrate] creates the tables in the first schema of the search path. The rows of
// hopback_outbox live in 16 partitions. The ids of messages go round these, and a relay
// truncates each partition once it is past and empty. So the table doesn't bloat while an
// old snapshot, such as that of a long report or a backup, holds VACUUM back.
package outbox
