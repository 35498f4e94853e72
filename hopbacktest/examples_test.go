package hopbacktest_test

import "testing"

// The examples of the documentation are run as the tests that they are.
func TestExamples(t *testing.T) {
	t.Run("republish", ordersRepublished)
	t.Run("dead letter", ordersDeadLettered)
	t.Run("native", ordersNative)
	t.Run("auto", ordersAuto)
}
