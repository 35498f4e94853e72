package broker_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/partition"
)

// RabbitMQ closes a connection on which nothing has come for two to three times its setting heartbeat
// (60 s by default), regardless of the idle-time-out that the client asked for. So a worker whose host
// has lost its power keeps its partitions until then. If such a worker is alive, it has noticed earlier,
// even with a long IdleTimeout, so no two workers have a partition.
func TestASilentWorkerHasItsPartitionsUntilRabbitMQNotices(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return // partitions need 4.3
		}
		const heartbeat = 6 * time.Second
		s.EvalOK(t, "ok = application:set_env(rabbit, heartbeat, 6).")
		defer s.EvalOK(t, "ok = application:set_env(rabbit, heartbeat, 60).")
		admin, _ := s.Connect(t)
		g := partition.Group{Name: "orders", Partitions: 4}
		suite.ApplyGroup(t, admin, g, declare.QuorumQueue{})

		check := partitionrig.NewCheck(1, g.Partitions)
		ctx, stop := context.WithCancel(t.Context())
		var workers sync.WaitGroup
		defer workers.Wait()
		defer stop()
		start := func(worker, url string) {
			conn, _ := suite.ConnectTo(t, url, func(c *client.Config) { c.IdleTimeout = 10 * time.Minute })
			h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
			cfg := partition.Config{Worker: worker, OnAssigned: func(p int, owned bool) { check.Assigned(worker, p, owned) }}
			workers.Go(func() { assert.NoError(t, partition.Consume(ctx, conn, g, h, cfg)) })
		}
		shares := func(silent, other int) bool {
			all := check.Shares()
			return all["silent"] == silent && all["other"] == other
		}
		wire, through := s.Through(t)
		start("silent", through)
		suite.Poll(t, "the first worker has all partitions", func() bool { return shares(4, 0) })
		start("other", s.AMQPURL())
		suite.Poll(t, "they share them", func() bool { return shares(2, 2) })

		began := time.Now()
		wire.Drop()
		wire.Refuse()
		suite.Poll(t, "the other one has all partitions", func() bool { return shares(0, 4) })
		took := time.Since(began)
		assert.Greater(t, took, 2*heartbeat-heartbeat/2, "it sends a sign of life more often than that")
		report := check.Report()
		assert.Zero(t, report.DoubleOwned, "%v", report.First)
		suite.Report(t, s, "a partition of a worker that went silent had another owner after %.1f times heartbeat", float64(took)/float64(heartbeat))

		require.NoError(t, wire.Admit())
		suite.Poll(t, "they share them again", func() bool { return shares(2, 2) })
	})
}
