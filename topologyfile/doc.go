// Package topologyfile reads topologies from small YAML files: what cmd/hopback
// works on, and what a worker can take its policy from, so that both mean the same.
//
//	retry:
//	  delays: [10s, 1m, 10m]
//	work-queues:
//	  orders:
//	    delivery-limit: 5
//	  invoices:
//	exchanges:
//	  shop: {type: topic, alternate-exchange: parking_exchange}
//	bindings:
//	  - {source: shop, queue: orders, key: order.*}
//
// Work queues get the retry topology of package retry around them; queues,
// exchanges and bindings are declared as they are. The keys of queues are
// RabbitMQ's arguments without their "x-". Times are written with their unit, as in
// 10s, 1m30s or 250ms. [Schema] has every key, for editors and for people.
//
// Nothing is guessed: unknown keys, repeated keys, values of another type, YAML's
// anchors and a second document are refused, with the line and what to write
// instead. All that is wrong is reported at once.
package topologyfile
