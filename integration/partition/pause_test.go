package partition_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/partition"
)

// A worker with the permissions of docs/partitions.md, and one to read hopback.pauses, notices the pause of its group; without the
// latter it doesn't start. The messages of each key are handled in their order afterwards. verify has nothing to say about it.
func TestAGroupIsPausedForItsWorkers(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		operator, _ := s.Connect(t)
		g := partition.Group{Name: "changes", Partitions: 4}
		suite.ApplyGroup(t, operator, g, declare.QuorumQueue{})
		require.NoError(t, pause.PauseGroup(t.Context(), operator, "changes", pause.PauseConfig{By: "ada", Why: "the bank is down"}))

		var mu sync.Mutex
		handled := map[string][]string{}
		count := func() (n int) {
			mu.Lock()
			defer mu.Unlock()
			for _, all := range handled {
				n += len(all)
			}
			return n
		}
		changes := make(chan *pause.State, 10)
		h := pause.With(pause.Config{OnChange: func(p *pause.State) { changes <- p }})(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			key, _ := d.Annotation("x-routing-key").(string)
			handled[key] = append(handled[key], string(d.Message().GetData()))
			return nil
		}))
		blind, _ := suite.ConnectTo(t, s.User(t, `^changes\.`, `^changes\.`, `^changes\.`))
		require.ErrorIs(t, partition.Consume(t.Context(), blind, g, h, partition.Config{}), client.ErrUnauthorized)
		worker, _ := suite.ConnectTo(t, s.User(t, `^changes\.`, `^changes\.`, `^(changes\..*|hopback\.pauses)$`))
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- partition.Consume(ctx, worker, g, h, partition.Config{}) }()
		shown := suite.Await(t, changes, "the pause")
		require.NotNil(t, shown)
		assert.Equal(t, []string{"changes", "ada", "the bank is down"}, []string{shown.Group, shown.By, shown.Why})
		d, err := desk.New(operator, desk.Config{HTTP: s.API(t)})
		require.NoError(t, err)
		survey, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: g.Queues(), CountsOnly: true})
		require.NoError(t, err)
		for _, q := range survey.Queues {
			assert.Equal(t, shown, q.Paused)
		}
		p, err := client.NewPublisher[string](t.Context(), operator, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		want := map[string][]string{}
		for i := range 200 {
			key, text := fmt.Sprint("key", i%10), fmt.Sprintf("%q", fmt.Sprint(i))
			want[key] = append(want[key], text)
			require.NoError(t, p.Publish(t.Context(), fmt.Sprint(i), client.PublishTo(g.Address(key))))
		}
		suite.Poll(t, "the worker holds some, and shows as paused", func() bool {
			held, paused := 0, 0
			for _, c := range worker.Stats().Consumers {
				if c.Partition && c.Paused {
					held, paused = held+c.Unsettled, paused+1
				}
			}
			return held == 200 && paused == 4
		})
		assert.Zero(t, count())
		require.NoError(t, pause.PauseGroup(t.Context(), operator, "changes", pause.PauseConfig{For: time.Hour}))
		shown = suite.Await(t, changes, "the other pause")
		require.NotNil(t, shown)
		assert.Equal(t, time.Hour, shown.Until.Sub(shown.Since))
		topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: declare.Unlimited})
		require.NoError(t, err)
		v, err := suite.Verified(t.Context(), s.Sources(t, operator), topology)
		require.NoError(t, err)
		for _, f := range v.Findings {
			assert.NotContains(t, fmt.Sprint(f), "changes.now")
			assert.NotContains(t, fmt.Sprint(f), "hopback.pauses")
		}
		require.NoError(t, pause.ResumeGroup(t.Context(), operator, "changes"))
		require.Nil(t, suite.Await(t, changes, "the end of the pause"))
		suite.Poll(t, "all are handled", func() bool { return count() == 200 })
		mu.Lock()
		assert.Equal(t, want, handled)
		mu.Unlock()
		stop()
		require.NoError(t, <-done)
	})
}
