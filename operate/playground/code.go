package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/retry"
)

// program is the Go program that the settings stand for. Its places are the imports, the policy, and the
// handler's body.
const program = `package main

import (
%s)

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
	body := indented(scriptCode(steps))
	var policy strings.Builder
	if name := map[retry.Strategy]string{retry.StrategyDeadLetter: "StrategyDeadLetter", retry.StrategyNative: "StrategyNative"}[s.Strategy]; name != "" {
		fmt.Fprintf(&policy, "\t\tStrategy:   retry.%s,\n", name)
	}
	retries := strconv.Itoa(s.MaxRetries)
	if s.MaxRetries == 0 {
		retries = "retry.NoRetries"
	}
	fmt.Fprintf(&policy, "\t\tMaxRetries: %s,\n", retries)
	var list []string
	for _, d := range delays {
		list = append(list, goDuration(d))
	}
	fmt.Fprintf(&policy, "\t\tBackoff:    retry.Delays(%s),\n", strings.Join(list, ", "))

	var imports strings.Builder
	for _, name := range []string{"context", "errors", "log", "os", "os/signal", "time"} {
		if name != "errors" || strings.Contains(body, "errors.") {
			fmt.Fprintf(&imports, "\t%q\n", name)
		}
	}
	imports.WriteByte('\n')
	for _, name := range []string{"client", "declare", "retry"} {
		fmt.Fprintf(&imports, "\t%q\n", "github.com/hopback/hopback/"+name)
	}
	return fmt.Sprintf(program, imports.String(), policy.String(), body), nil
}

// goDuration is a duration as Go code.
func goDuration(d time.Duration) string {
	for _, u := range []struct {
		unit time.Duration
		name string
	}{{time.Hour, "Hour"}, {time.Minute, "Minute"}, {time.Second, "Second"}, {time.Millisecond, "Millisecond"}, {time.Microsecond, "Microsecond"}} {
		if d%u.unit == 0 {
			if d == u.unit {
				return "time." + u.name
			}
			return fmt.Sprintf("%d*time.%s", d/u.unit, u.name)
		}
	}
	return fmt.Sprintf("%d*time.Nanosecond", d)
}
