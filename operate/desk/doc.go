// Package desk manages dead letters: it groups and lists them, shows one with its history,
// replays, edits, and discards them, and exports and imports them. It works on the
// dead-letter and parking queues of package retry, and can read every other queue that
// isn't a stream.
//
// Use it to build your own tools. "hopback dlq" does the same from the command line, and
// package [github.com/hopback/hopback/operate/desk/web] in a browser.
//
//	d, err := desk.New(conn, desk.Config{HTTP: api})
//	survey, err := d.Survey(ctx, desk.SurveyConfig{}) // all dead letters, by group
//	group := survey.Groups[0]                         // the largest one
//	message, err := d.Show(ctx, desk.ShowConfig{Queue: group.In, ID: group.Example})
//	report, err := d.Replay(ctx, desk.ReplayConfig{
//		Queue: group.In, Filter: desk.Filter{Groups: []string{group.ID}}, By: "ada",
//	})
//
// # How a queue is read
//
// RabbitMQ can't browse or search a quorum queue. So every operation scans the queue: it
// receives the messages from the head on, holds them unsettled, and requeues them at the end
// with the outcome modified, which doesn't count as a failed delivery. Replay and Discard
// accept the messages that they select.
//
// A scan that ends normally, or because its ctx ends, changes neither the content nor the
// order of the messages, on RabbitMQ 4.0 and 4.3. It has three side effects:
//
//   - RabbitMQ counts how often each message was requeued, in the annotation
//     x-acquired-count (4.3) or x-delivery-count (4.0).
//   - Messages that were read are delivered before messages that are published later, even
//     before those of a higher priority. Among themselves they keep the order by priority.
//   - Other consumers of the queue don't get the messages while the scan holds them.
//
// # Other readers
//
// Only one operation reads a queue at a time, across all processes. To lock out the others,
// an operation declares an exclusive queue, named after the queue with ".hopback-scan"
// appended. The others wait, and report Progress.Waiting, unless they accept WarningScan.
// An operation without the configure permission for that name doesn't wait for others.
//
// An operation can't read a message that another consumer holds. At the end of the queue it
// checks for other consumers. If there are any, the report says in Unread that messages may
// be missing. It doesn't notice messages that are held without a consumer, such as those
// that an AMQP 0-9-1 client got with basic.get and hasn't acknowledged.
//
// # Hidden messages
//
// RabbitMQ delivers a message that waits for its delivery time to nobody, and shows it only in a
// count of the HTTP API. From RabbitMQ 4.4 on, a dead letter can wait, too: one whose delivery
// time was still to come when the broker dead-lettered it. A Desk can't read such messages, and
// says in Unread how many there are. Without Config.HTTP it says that it doesn't know, and no
// Replay is Complete.
//
// # Lost connections
//
// If the connection is lost or the process is killed, the broker requeues the held messages
// and counts a failed delivery for each. That is harmless in dead-letter and parking queues
// of package retry, which have no delivery limit.
//
// No message is lost or duplicated, but the order can change for a while. A queue delivers
// returned messages first, in the order of their return. So if a scan is lost after it has
// received only some of the messages that an earlier scan had returned, those messages
// end up behind the rest. The next scan notices this, restores the order, and starts over.
// It doesn't notice if the connection is lost at the very moment when the messages are
// being returned.
//
// # Warnings
//
// [Desk.SideEffects] reports what can't be guaranteed for a queue before anything is read.
// The most important case: RabbitMQ before 4.3 counts every scan toward the delivery limit
// of a queue that has one, such as a work queue. There, every operation returns a
// *SideEffectsError unless the caller accepts the warning.
//
// # Limits
//
// Held messages need no memory in this process, since they are a range of delivery numbers.
// The broker keeps a few hundred bytes for each. In this process, a scan needs up to 16 MiB
// for messages that it has received and not yet read. In addition:
//
//   - A List holds its page, without bodies.
//   - A Survey holds at most 1,000 groups for each queue.
//   - A Replay holds 16 MiB of unconfirmed copies, or one copy that is larger.
//   - An Export with Resume, and a Discard to a file, need about 60 bytes for each line that
//     the file had.
//
// Each replay adds annotations to a message: at most 9 KiB in total, however often the
// message is replayed.
//
// A scan that stops early first reads on to the end of the messages that an earlier scan
// returned, to keep the order. That takes up to 5 minutes. ListConfig.OnFound and
// ShowConfig.OnFound get the result before that.
//
// A scan holds messages for 15 minutes at most, since RabbitMQ 4.3 reclaims them after
// 30. After that time a Replay requeues its messages and scans again.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package desk
