package retry

import "fmt"

// noTokens refuses Policy.Claimable on a broker that parks no messages under a token.
func noTokens(version, queue string) error {
	return &GuardError{Guard: GuardStrategy, Queue: queue,
		Problem: fmt.Sprintf("Policy.Claimable needs RabbitMQ 4.4 or later; this broker is %q", version),
		Remedy:  "leave it out, or use StrategyAuto, which retries without it on earlier versions"}
}
