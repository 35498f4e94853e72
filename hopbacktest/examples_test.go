package hopbacktest_test

import "testing"

// The examples of the documentation run as tests.
func TestExamples(t *testing.T) {
	t.Run("start", orderIsRetriedAfterAnHour)
	t.Run("republish", ordersRepublished)
	t.Run("dead letter", ordersDeadLettered)
	t.Run("native", ordersNative)
	t.Run("auto", ordersAuto)
	t.Run("settled", ordersAreSettled)
	t.Run("duplicates", duplicatesAreDropped)
}
