package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/retry"
)

// program is the Go program that the settings stand for. Its places are an import, the policy, and the
// handler's body.
const program = `package main

import (
	"context"
%s	"log"
	"os"
	"os/signal"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	conn, err := client.Connect(ctx, os.Getenv("HOPBACK_URL"), client.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())

	policy := retry.Policy{
%s	}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
	if err != nil {
		return err
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return err
	}
	return conn.Consume(ctx, "orders", retry.With(policy)(client.HandlerFunc(handle)), client.ConsumerConfig{})
}

func handle(ctx context.Context, d *client.Delivery) error {
%s
}
`

// code returns the program. Bad settings are an *argument.Error.
func (s settings) code() (string, error) {
	_, delays, steps, err := s.parse()
	if err != nil {
		return "", err
	}
	body, policy, errorsImport := indented(scriptCode(steps)), "", ""
	if name := map[retry.Strategy]string{retry.StrategyDeadLetter: "StrategyDeadLetter", retry.StrategyNative: "StrategyNative"}[s.Strategy]; name != "" {
		policy = "\t\tStrategy:   retry." + name + ",\n"
	}
	if strings.Contains(body, "errors.") {
		errorsImport = "\t\"errors\"\n"
	}
	retries := strconv.Itoa(s.MaxRetries)
	if s.MaxRetries == 0 {
		retries = "retry.NoRetries"
	}
	var list []string
	for _, d := range delays {
		list = append(list, goDuration(d))
	}
	policy += fmt.Sprintf("\t\tMaxRetries: %s,\n\t\tBackoff:    retry.Delays(%s),\n", retries, strings.Join(list, ", "))
	return fmt.Sprintf(program, errorsImport, policy, body), nil
}

// goDuration is a duration as Go code.
func goDuration(d time.Duration) string {
	for i, unit := range []time.Duration{time.Hour, time.Minute, time.Second, time.Millisecond, time.Microsecond} {
		name := []string{"Hour", "Minute", "Second", "Millisecond", "Microsecond"}[i]
		if d == unit {
			return "time." + name
		}
		if d%unit == 0 {
			return fmt.Sprintf("%d*time.%s", d/unit, name)
		}
	}
	return fmt.Sprintf("%d*time.Nanosecond", d)
}
