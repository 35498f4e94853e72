// Package oldbroker says what brokers before RabbitMQ 4.3 lack or do otherwise. All code of
// hopback that only an old broker needs depends on a field of [Quirks]: delete the field with
// the support for the broker, and the compiler names the rest. See "Old brokers" in DESIGN.md.
package oldbroker

// Quirks are those of one broker. They are chosen once for a connection, or when a consumer
// starts. The zero value is a broker of today.
type Quirks struct {
	Before42
	Before43
	Before44
}

// Of returns the quirks of a broker. atLeast is the method of a client.Broker. A broker whose
// version can't be read is as old as can be.
func Of(atLeast func(major, minor int) bool) Quirks {
	return Quirks{before42(atLeast), before43(atLeast), before44(atLeast)}
}
