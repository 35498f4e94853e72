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
//	       key's lane ◀── in hand, until its delay is over ◀── a failed attempt ◀── handler
//
// The exchange puts all messages of a key into one partition. Each partition is a quorum queue
// with a single active consumer, and RabbitMQ alone decides which worker that is. So two workers
// never consume a partition at the same time.
//
// # Who owns a partition
//
// Three workers are in line for each partition: its owner and two standbys. They attach to its
// queue without credit, and RabbitMQ makes one of them the active consumer. That one checks whether
// the partition is its own. If it is, it grants the whole window. If not, it detaches and attaches
// again, which puts it at the end of the line. An owner that gives up a partition does so when the
// next owner is in line.
//
// Which partitions are a worker's own follows from what the workers tell each other over a fanout
// exchange, once a second and after each change: who is there, and who has what. Every worker
// computes the same assignment from that. Shares differ by at most one, and a worker that joins or
// leaves moves only what has to move. A worker that knows too little costs moves, never order.
//
// # What is promised
//
//   - No message is lost. It can be delivered twice, as everywhere in hopback.
//   - A message is begun only after all earlier messages of its key are completed: handled,
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
//   - A worker that is connected to a node that the others lost isn't stopped either, until the node is
//     back.
//   - Order by key starts at the queue: publishers that publish a key's messages concurrently have
//     no order.
//   - Messages with a priority overtake others, and RabbitMQ drops those whose ttl is over. Publish
//     without both.
//
// # Retries
//
// A failed message stays in hand: its worker keeps it unsettled until its delay is over and calls
// the handler again. Later messages of its key wait behind it, other keys continue. What waits
// counts toward [Group.Window]. When all of the window waits, the partition stalls.
//
// The number of attempts is in memory. A worker that leaves writes it into the message; one that
// crashes can't, so its successor begins to count again, without the rest of the delay.
//
// A message that crashes its workers is found out, and dead-lettered in the end; those that the
// workers held with it are not. See docs/partitions.md.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package partition
