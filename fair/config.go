package fair

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// Config configures [Consume]. The zero value retries as the zero retry.Policy does, and runs 16
// handlers at once.
type Config struct {
	// Concurrency is how many handlers run at once in this worker, over the main queue and all
	// lanes, 2 to 10,000. Default: 16.
	Concurrency int
	// Reserve is how many of these slots are kept for quiet tenants, at most Concurrency-1. Slots
	// in reserve are idle while only noisy tenants have messages. Default: 0, adaptive: as many as
	// the quiet tenants use at most times, or fewer where slots become free quickly.
	Reserve int
	// Retry is the policy for failed messages, the same as for [Queue.Topology]. Don't use retry.With in
	// the handler.
	Retry retry.Policy
	// Key returns the tenant of a message. It must be fast. If it panics, the message is
	// dead-lettered with client.ReasonPanicked. RabbitMQ routes a noisy tenant's messages to a lane
	// only if they were published with the tenant as their routing key. Default: the group-id;
	// without one, the routing key.
	Key func(*client.Delivery) string
	// Weight returns how many shares a tenant has, 1 to 1,000: of the slots, before it counts as noisy, and
	// of the turns of its lane. Other results count as the nearest of these. It is called when a tenant is first
	// seen, and must be fast. Default: 1 for each.
	Weight func(tenant string) int
	// OnNoisy, if not nil, is called when this worker begins to move a tenant's messages, or sees
	// them in a lane, and with false when the tenant is quiet again. Calls come one at a time. A tenant whose
	// name is longer than 255 bytes has a hash as its name.
	OnNoisy func(tenant string, noisy bool)
	// Grace is how long running handlers may continue when ctx has ended. Then their own ctx ends.
	// Default: 30 s.
	Grace time.Duration
}

const (
	defaultConcurrency = 16
	maxConcurrency     = 10_000
	maxWeight          = 1000
)

func (c Config) withDefaults(q Queue) (Config, error) {
	at := argument.Root("Config")
	c.Concurrency = cmp.Or(c.Concurrency, defaultConcurrency)
	var errs []error
	if c.Concurrency < 2 || c.Concurrency > maxConcurrency {
		errs = append(errs, argument.At(at.Field("Concurrency"), argument.CodeOutOfRange, c.Concurrency, "is out of range", fmt.Sprintf("use 2 to %d, or 0 for the default: quiet and noisy tenants need a slot each", maxConcurrency)))
	} else if c.Reserve < 0 || c.Reserve >= c.Concurrency {
		errs = append(errs, argument.At(at.Field("Reserve"), argument.CodeOutOfRange, c.Reserve, "is out of range", fmt.Sprintf("use 1 to %d, or 0 to adapt it", c.Concurrency-1)))
	}
	if c.Grace < 0 {
		errs = append(errs, argument.At(at.Field("Grace"), argument.CodeOutOfRange, c.Grace, "is negative", "use a positive duration, or 0 for the default"))
	}
	if err := checkPolicy(at.Field("Retry"), c.Retry); err != nil {
		errs = append(errs, err)
	}
	err := c.Retry.Validate()
	if bad, ok := errors.AsType[*argument.Error](err); ok {
		here := *bad
		here.Path = append(slices.Clone(at.Field("Retry")), bad.Path[1:]...)
		err = &here
	}
	if err != nil {
		errs = append(errs, err)
	}
	if c.Key == nil {
		c.Key = func(d *client.Delivery) string { return tenantOf(q, d) }
	}
	return c, errors.Join(errs...)
}

// tenantOf is the default Key. A message without a group-id may have been moved, retried, or
// replayed: then an annotation or its history has its first routing key.
func tenantOf(q Queue, d *client.Delivery) string {
	if p := d.Message().Properties; p != nil && p.GroupID != nil {
		return *p.GroupID
	}
	if key, ok := publishedTo(q, d); ok {
		return key
	}
	if key, ok := d.Annotation(annotation.Tenant).(string); ok {
		return key
	}
	if was := retry.DeadLetterOf(d.Message()); was.Exchange == q.in() {
		return was.RoutingKey
	}
	return ""
}

// publishedTo returns the routing key of a message that came by the queue's exchanges.
func publishedTo(q Queue, d *client.Delivery) (key string, ok bool) {
	if x, _ := d.Annotation("x-exchange").(string); x != q.in() {
		return "", false
	}
	key, ok = d.Annotation("x-routing-key").(string)
	return key, ok
}
