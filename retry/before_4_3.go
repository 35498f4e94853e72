package retry

import "fmt"

// noNative refuses StrategyNative on a broker that ignores x-opt-delivery-time.
func noNative(version, queue string) error {
	return &GuardError{Guard: GuardStrategy, Queue: queue,
		Problem: fmt.Sprintf("StrategyNative needs RabbitMQ 4.3 or later; this broker is %q and would deliver each message again at once", version),
		Remedy:  "use StrategyAuto, StrategyDeadLetter, or StrategyRepublish"}
}
