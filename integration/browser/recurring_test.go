package browser

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/schedule"
)

// A person finds a recurring message, pauses it with a reason by the keyboard, resumes it, and runs it now. What hostile
// messages are named is text.
func TestTheRecurringPageCanBeUsed(t *testing.T) {
	forEachBroker(t, func(s *site, c *chromium) {
		topology, err := schedule.GroupTopology(schedule.Names{}, "billing")
		require.NoError(s.t, err)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()})
		_, err = declare.Apply(s.t.Context(), s.conn.Management(), topology)
		require.NoError(s.t, err)
		g := schedule.Group{Conn: s.conn, Name: "billing"}
		message := func(name, spec string) schedule.Recurring {
			return schedule.Recurring{Name: name, Times: schedule.Every(time.Hour), Spec: spec, To: address.Queue("orders")}
		}
		hostileName := hostile
		ctx, stop := context.WithCancel(context.WithoutCancel(s.t.Context()))
		ended := make(chan error, 1)
		go func() {
			ended <- g.Run(ctx, schedule.RunConfig{Recurring: []schedule.Recurring{message("report", ""), message("a-message-with-a-very-long-name-that-no-phone-has-room-for", ""), message(hostileName, hostile)}})
		}()
		defer func() { stop(); assert.NoError(s.t, <-ended) }()
		require.Eventually(s.t, func() bool { _, err := g.List(s.t.Context(), schedule.ListConfig{}); return err == nil }, patience, 50*time.Millisecond)
		require.NoError(s.t, g.Pause(s.t.Context(), schedule.PauseConfig{Names: []string{hostileName}, By: hostile, Why: hostile}))

		b := c.tab(s.t)
		b.size(1120, 820)
		b.open(s.page)
		b.follow("Recurring")
		b.sees("billing")
		b.fits("recurring-groups")
		b.follow("billing")
		b.sees("3 messages, 1 paused by name")
		b.sees("every 1h0m0s")
		b.fits("recurring")
		b.follow("report")
		b.sees("The message isn't paused.")
		b.fits("recurring-message")
		b.eval(`document.querySelector("[name=why]").focus()`)
		for _, key := range "printer" {
			b.press(string(key))
		}
		b.press("Tab")
		b.press("5")
		b.press("Tab")
		assert.Equal(s.t, "Pause", b.eval("document.activeElement.textContent"))
		b.press("Enter")
		b.sees("The message is paused")
		b.sees("by ada")
		b.fits("recurring-paused")
		b.follow("Resume")
		b.sees("The message is resumed.")
		b.eval(`document.querySelector("[name=sure]").click()`)
		b.follow("Run now")
		b.sees("with the message-id report@")
		assert.Equal(s.t, nil, b.eval("window.hacked || null"))
		b.calm()
	})
}

// A person pauses a group of partitions with one click, and resumes it.
func TestAGroupIsPausedInTheBrowser(t *testing.T) {
	forEachBroker(t, func(s *site, c *chromium) {
		g := partition.Group{Name: "changes", Partitions: 2}
		topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")})
		require.NoError(s.t, err)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()})
		_, err = declare.Apply(s.t.Context(), s.conn.Management(), topology)
		require.NoError(s.t, err)
		changes := make(chan *pause.State, 10)
		h := pause.With(pause.Config{OnChange: func(s *pause.State) { changes <- s }})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
		ctx, stop := context.WithCancel(context.WithoutCancel(s.t.Context()))
		ended := make(chan error, 1)
		go func() { ended <- partition.Consume(ctx, s.conn, g, h, partition.Config{}) }()
		defer func() { stop(); assert.NoError(s.t, <-ended) }()
		notified := func() *pause.State {
			select {
			case p := <-changes:
				return p
			case <-time.After(patience):
				require.Fail(s.t, "the worker hasn't noticed")
				return nil
			}
		}
		b := c.tab(s.t)
		b.size(1120, 820)
		b.open(s.page + "partitions?group=changes")
		b.sees("The group isn't paused.")
		b.fits("partitions")
		b.eval(`document.querySelector("[name=why]").value = "the bank is down"`)
		b.eval(`document.querySelector("button[value=pause]").click()`)
		b.sees("The group is paused.")
		b.fits("partitions-paused")
		p := notified()
		require.NotNil(s.t, p)
		assert.Equal(s.t, "changes ada the bank is down", p.Group+" "+p.By+" "+p.Why)
		b.follow("Resume")
		b.sees("The group is resumed.")
		assert.Nil(s.t, notified())
		b.calm()
	})
}
