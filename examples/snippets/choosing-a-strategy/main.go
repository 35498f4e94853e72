// Command choosing-a-strategy is the program of docs/choosing-a-strategy.md: it lists the queues that
// messages wait in, by strategy.
package main

import (
	"fmt"
	"log"
	"time"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

func main() {
	delays := retry.Delays(10*time.Second, time.Minute)
	for _, policy := range []retry.Policy{
		{Backoff: delays, Strategy: retry.StrategyRepublish}, // the default
		{Backoff: delays, Strategy: retry.StrategyRepublish, AnyDelay: &retry.Ladder{}},
		{Backoff: delays, Strategy: retry.StrategyDeadLetter},
		{Backoff: delays, Strategy: retry.StrategyNative},
		{Backoff: delays, Strategy: retry.StrategyAuto},
	} {
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
		if err != nil {
			log.Fatal(err)
		}
		var names []string
		for _, queue := range topology.Queues {
			if q, ok := queue.(declare.QuorumQueue); ok && q.MessageTTL > 0 {
				names = append(names, q.Name)
			}
		}
		if len(names) > 4 {
			names = append(names[:2], "...", names[len(names)-1])
		}
		fmt.Printf("%s, any delay %t: %v\n", policy.Strategy, policy.AnyDelay != nil, names)
	}
}
