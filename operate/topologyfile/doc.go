// Package topologyfile reads RabbitMQ topologies from small YAML files. Use it to share one file
// between the hopback command, which declares it, and a worker, which takes its retry policy from
// it.
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
// [Schema] returns every key with a description, also for editors. In short:
//
//   - Work queues get the retry topology of package retry.
//   - Queues, exchanges, and bindings are declared without additions.
//   - The keys of queues are RabbitMQ's arguments without their "x-".
//   - Durations have a unit, as in 10s, 1m30s, or 250ms.
//
// Unknown keys, repeated keys, values of another type, YAML's anchors, and a second document are
// errors. An [Error] contains the line and what to write instead. [Parse] reports up to 20
// mistakes at once.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package topologyfile
