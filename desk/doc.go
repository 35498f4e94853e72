// Package desk shows, explains, replays, mends, discards, exports and imports the messages
// of dead-letter and parking queues.
//
//	d, err := desk.New(conn, desk.Config{HTTP: api})
//	survey, err := d.Survey(ctx, desk.SurveyConfig{})      // what is dead, by group
//	letter, err := d.Show(ctx, "orders.dead", survey.Groups[0].Example)
//	report, err := d.Replay(ctx, desk.ReplayConfig{
//		Queue: "orders.dead", Filter: desk.Filter{Groups: []string{survey.Groups[0].ID}}, By: "ada",
//	})
//
// # How a queue is looked into
//
// RabbitMQ has no browsing and no selection for quorum queues. So every operation walks the
// queue: it receives the messages from the head on, holds them unsettled, and gives them
// back at the end, by ranges, with a modified outcome that counts no failed delivery. Who
// selects accepts the selected ones in between.
//
// A walk that ends in order, or is stopped by its ctx, changes neither the messages'
// content nor their order, on 4.0 and 4.3. Some things change:
//
//   - RabbitMQ counts how often a message was given back, in the annotation
//     x-acquired-count (4.3) or x-delivery-count (4.0).
//   - What was looked at is delivered before what comes later, even if that has a higher
//     priority. Among those that were there the order by priority stays.
//   - Others that consume from the queue get none of what is held.
//
// If the connection is lost, or the process killed, the broker puts what was held back in
// order, and counts a failed delivery for each: the delivery-count rises. Dead-letter and
// parking queues of package retry have no delivery limit, so nothing comes of it there. But
// a queue delivers first what was given back before, and puts what comes back behind that.
// If a walk is lost after it was given only a part of what an earlier walk had given back,
// that part comes behind the rest of it. No message is lost by that, nor twice there.
//
// What can't be promised for a queue is told by Terms, before anybody looks: above all, on
// RabbitMQ below 4.3 each look counts towards the delivery limit of a queue that has one,
// such as a work queue. There List and all others refuse with a TermsError, unless that is
// accepted.
//
// # Bounds
//
// What a walk holds costs this process nothing, since it is a range of numbers. A walk needs
// up to 16 MiB for what is received and not looked at yet, a message while it is looked at,
// and what it is for: a List its page, without bodies; a Survey at most 1,000 groups for a
// queue; a Replay 16 MiB of copies without an answer, or one that is larger; an Export that
// is resumed some 30 bytes for each line that is in the file. The broker keeps a few hundred
// bytes for each message that is held.
//
// A walk that is stopped goes on to where what was given back before ends, for the sake of
// the order. That takes as long as looking at so many messages, and 5 minutes at most.
//
// A walk holds messages for 15 minutes at most: RabbitMQ 4.3 takes back what is held for 30.
// A Replay then gives back and walks again.
package desk
