// Package topologyfile reads topologies from small YAML files. The hopback command
// works on these files, and a worker can take its policy from one, so both mean the
// same.
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
// Work queues get the retry topology of package retry. Queues, exchanges and bindings are
// declared as they are. The keys of queues are RabbitMQ's arguments without their "x-".
// Durations have a unit, as in 10s, 1m30s or 250ms. [Schema] has every key, for editors and
// for people.
//
// Unknown keys, repeated keys, values of another type, YAML's anchors and a second document
// are refused. An [Error] names the line and says what to write instead. Up to 20 mistakes
// are reported at once.
package topologyfile
