package broker_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/schedule"
)

// The broker is killed five times while 100,000 messages wait, are published and come: none
// is lost, and none is early. With RabbitMQ 4.4, where queues hold them, it's 1,000,000.
// TestMessagesOutliveTheBroker in package schedule is the small one, in memory.
func TestScheduledMessagesOutliveFiveKillsOfTheBroker(t *testing.T) {
	if !suite.Long() {
		t.Skip("it takes minutes: set HOPBACK_LONG=1")
	}
	suite.NeedPrivate(t)
	for _, version := range suite.Versions() {
		t.Run(version, func(t *testing.T) {
			messages := 100_000
			if version >= "4.4" {
				messages = *million
			}
			outliveFiveKills(t, version, messages)
		})
	}
}

// tally counts what comes of numbered messages.
type tally struct {
	mu           sync.Mutex
	late         []time.Duration
	came         []bool
	n, twice     int
	early, other int
	earliest     time.Duration // below 0 if one came early
	all          chan struct{}
}

func (c *tally) Handle(_ context.Context, d *client.Delivery) error {
	now := time.Now()
	due, _ := d.Annotation(annotation.Due).(int64)
	n, ok := d.Property("n").(int64)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !ok || n >= int64(len(c.came)) {
		c.other++
		return nil
	}
	if c.came[n] {
		c.twice++
		return nil
	}
	late := now.Sub(time.UnixMilli(due))
	if late < 0 {
		c.early++
		c.earliest = min(c.earliest, late)
	}
	c.came[n], c.late = true, append(c.late, late)
	if c.n++; c.n == len(c.came) {
		close(c.all)
	}
	return nil
}

func outliveFiveKills(t *testing.T, version string, messages int) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	own, err := rabbitmq.Own(ctx, os.Stderr, version)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
	conn, _ := suite.ConnectTo(t, own.URL, suite.Soon)
	topology, ladder := declare.Topology{}, version < "4.4"
	if ladder {
		topology, err = schedule.Topology(schedule.Names{}, "bound")
		require.NoError(t, err)
	}
	topology.Queues = append(topology.Queues, suite.Quorum("bound", declare.Drop()), suite.Quorum("unbound", declare.Drop()))
	suite.Apply(t, conn, topology)
	time.Sleep(5 * time.Second) // 4.0.5 can lose a queue that is younger when it is killed: see integration/rabbitmq-notes.md

	c := &tally{came: make([]bool, messages), all: make(chan struct{})}
	began := time.Now()
	for _, queue := range []string{"bound", "unbound"} {
		suite.Consume(t, conn, queue, c, client.ConsumerConfig{Concurrency: 64})
	}
	if ladder {
		suite.Dispatch(t, conn, schedule.DispatchConfig{})
	}
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		for range 5 {
			time.Sleep(20 * time.Second)
			assert.NoError(t, own.Kill(ctx))
			for own.Start(ctx) != nil { // a busy machine may take longer than a start has
				if ctx.Err() != nil {
					return
				}
			}
		}
	}()
	publishNumbered(ctx, t, conn, messages)
	published := time.Since(began)
	<-killed
	select {
	case <-c.all:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	assert.Equal(t, messages, c.n, "none is lost")
	assert.Zero(t, c.early, "came early, by up to %v", -c.earliest)
	assert.Zero(t, c.other)
	if ladder {
		assert.Zero(t, suite.Ready(t, conn, schedule.Names{}.UndeliverableQueue()))
	}
	slices.Sort(c.late)
	part := func(p float64) time.Duration {
		return c.late[int(p*float64(len(c.late)-1))].Round(time.Millisecond)
	}
	fmt.Printf("REPORT %s: %d messages, published in %v, all there after %v, 5 kills: %d twice, %d early, late by %v (half), %v (99 %%), %v (the last)\n",
		t.Name(), c.n, published.Round(time.Second), time.Since(began).Round(time.Second), c.twice, c.early, part(0.5), part(0.99), part(1))
}

// publishNumbered schedules messages for the next two minutes, one in ten for a queue that
// isn't bound.
func publishNumbered(ctx context.Context, t *testing.T, conn *client.Conn, messages int) {
	t.Helper()
	random := rand.New(rand.NewPCG(5, 6))
	var publishers []*schedule.Publisher[int]
	for _, queue := range []string{"bound", "unbound"} {
		p, err := schedule.NewPublisher[int](ctx, conn, address.Queue(queue), schedule.PublisherConfig{})
		require.NoError(t, err)
		publishers = append(publishers, p)
	}
	const batch = 500
	for from := 0; from < messages; from += batch {
		var vs []int
		for i := from; i < min(from+batch, messages); i++ {
			vs = append(vs, i)
		}
		p := publishers[0]
		if from/batch%10 == 9 {
			p = publishers[1]
		}
		_, err := p.PublishAll(ctx, vs,
			func(int) schedule.When {
				return schedule.After(time.Second + time.Duration(random.Int64N(int64(2*time.Minute))))
			},
			func(n int, m *client.Message) { m.ApplicationProperties = map[string]any{"n": int64(n)} })
		require.NoError(t, err)
	}
}
