// Package partition shares the messages of many keys among a changing number of workers, and
// keeps their order by key, also through retries with delays.
//
//	orders := partition.Group{Name: "orders", Partitions: 16}
//	topology, err := orders.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("orders-dlq")})
//	...
//	publisher, err := client.NewPublisher[Order](ctx, conn, address.Address{}, client.PublisherConfig{})
//	err = publisher.Publish(ctx, order, client.PublishTo(orders.Address(order.Customer)))
//	...
//	err = partition.Consume(ctx, conn, orders, client.JSON(handle), partition.Config{})
//
// Use it when one queue is too slow, or when you need order by key with more than one worker.
// Otherwise use a single queue with middleware/ordered. It needs RabbitMQ 4.3 or later.
//
// # The path of a message
//
//	publisher ──key──▶ exchange ──hash of the key──▶ partition: a quorum queue ──▶ its owner
//	                                                                                  │
//	       key's lane ◀── unsettled, until the delay ends ◀─── a failed attempt ◀── handler
//
// The exchange puts all messages of a key into one partition. Each partition is a quorum queue
// with a single active consumer, and RabbitMQ alone decides which worker that is. So two workers
// never consume a partition at the same time.
//
// # Who owns a partition
//
// Three workers attach to the queue of each partition, without credit: its owner and two standbys.
// RabbitMQ makes one of them the active consumer. If that worker is the owner, it grants the whole
// window as credit. If not, it detaches and attaches again, so that RabbitMQ chooses it last. An
// owner gives up a partition only when the next owner is attached.
//
// Once a second and after each change, each worker announces itself and its partitions over a
// fanout exchange. From that, every worker computes the same assignment. Shares differ by at most
// one, and when a worker joins or leaves, only the partitions that must move do. A worker that
// misses announcements causes needless moves, but never a wrong order.
//
// # What is promised
//
//   - No message is lost. It can be delivered twice, as everywhere in hopback.
//   - A handler gets a message only after all earlier messages of its key are handled,
//     dead-lettered, or discarded. That holds while workers join, leave, crash, and lose
//     connections, and while messages wait for a retry.
//   - No key is handled by two workers at once, if handlers end when their ctx does. When a worker
//     loses its connection, the ctx of its handlers ends at once. If the network goes silent, the
//     worker notices before RabbitMQ gives its partitions to another.
//
// What isn't promised:
//
//   - A worker whose process was suspended isn't stopped: it doesn't notice that it has lost its
//     partitions before it continues.
//   - Neither is a worker whose node has lost the rest of the cluster, until the node is back.
//   - Order by key starts at the queue: publishers that publish a key's messages concurrently have
//     no order.
//   - Messages with a priority overtake others, and RabbitMQ drops those whose ttl is over. Publish
//     without both.
//
// # Retries
//
// A worker keeps a failed message unsettled until its delay is over, and then calls the handler
// again. Later messages of its key wait behind it, other keys continue. Waiting messages count
// toward [Group.Window]. When the whole window waits, the partition stalls.
//
// The number of attempts is in memory. A worker that stops writes it into the message; one that
// crashes can't, so the next worker starts to count again, without the rest of the delay.
//
// Workers detect a message that crashes them, and dead-letter it in the end, but not the messages
// that they held with it. See docs/partitions.md.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package partition
