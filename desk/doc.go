// Package desk shows, explains, replays, mends, discards, exports and imports the messages
// of dead-letter and parking queues.
//
//	d, err := desk.New(conn, desk.Config{HTTP: api})
//	survey, err := d.Survey(ctx, desk.SurveyConfig{})      // what is dead, by group
//	letter, err := d.Show(ctx, desk.ShowConfig{Queue: "orders.dead", ID: survey.Groups[0].Example})
//	report, err := d.Replay(ctx, desk.ReplayConfig{
//		Queue: "orders.dead", Filter: desk.Filter{Groups: []string{survey.Groups[0].ID}}, By: "ada",
//	})
//
// # How a queue is looked into
//
// RabbitMQ has no browsing and no selection for quorum queues. So every operation walks the
// queue. It receives the messages from the head on and holds them unsettled. At the end it
// gives them back with the outcome modified, which counts no failed delivery. Replay and
// Discard accept the messages that they select.
//
// A walk that ends normally, or when its ctx ends, changes neither the messages' content
// nor their order, on 4.0 and 4.3. It has three side effects:
//
//   - RabbitMQ counts how often a message was given back, in the annotation
//     x-acquired-count (4.3) or x-delivery-count (4.0).
//   - Messages that were read are delivered before messages that are published later, even
//     before those of a higher priority. Among themselves they keep the order by priority.
//   - Other consumers of the queue don't get the messages that are held.
//
// One operation at a time reads a queue, across all processes. To keep the others away it
// declares an exclusive queue, whose name is the queue's with ".hopback-scan" behind it. The
// other operations wait, and Progress.Waiting says so, unless they accept WarningScan.
// Without the configure permission for that name operations don't wait for each other.
//
// A message that another consumer holds can't be read. At the queue's end an operation checks
// whether there are other consumers, and if so the report says in Unread that messages may be
// missing. It doesn't notice messages that are held without a consumer, such as those that an
// AMQP 0-9-1 client got with basic.get and hasn't acknowledged.
//
// If the connection is lost or the process is killed, the broker puts the held messages
// back and counts a failed delivery for each. Dead-letter and parking queues of package
// retry have no delivery limit, so the count does no harm there. The order can change for a
// while: a queue delivers returned messages first, and puts newly returned ones behind
// them. So if a walk is lost after it has received only some of the messages that an
// earlier walk gave back, those come behind the rest. The next walk notices that, puts them
// back in order, and begins again. It can't where the connection is lost in the moment in
// which the messages are given back. No message is lost or duplicated by that.
//
// Terms reports what can't be promised for a queue, before anything is read. The main case:
// RabbitMQ below 4.3 counts each walk toward the delivery limit of a queue that has one,
// such as a work queue. There every operation returns a SideEffectsError unless the caller
// accepts the caveat.
//
// # Bounds
//
// Messages that are held take no memory in this process, because they are a range of
// numbers. A walk needs up to 16 MiB for messages that are received and not yet read, and
// one message while it is read. Beyond that a List needs its page, without bodies. A Survey
// needs at most 1,000 groups for a queue. A Replay needs 16 MiB of unconfirmed copies, or
// one larger copy. An Export with Resume, and a Discard to a file, need some 60 bytes for
// each line that the file had. The
// broker keeps a few hundred bytes for each held message.
//
// A replay adds at most 9 KiB to a message, however often it is replayed.
//
// A walk that is stopped early first reads on to the end of the messages that an earlier
// walk gave back, to keep the order. That takes 5 minutes at most. ListConfig.OnFound and
// ShowConfig.OnFound get what is wanted before that.
//
// A walk holds messages for 15 minutes at most, because RabbitMQ 4.3 takes a message back
// after 30. A Replay then gives its messages back and walks again.
package desk
