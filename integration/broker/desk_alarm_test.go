package broker_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
)

// A survey that only counts works during an alarm, and names it. So does what only reads and discards.
func TestASurveyNamesTheAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		d, err := desk.New(conn, desk.Config{HTTP: s.API(t)})
		require.NoError(t, err)
		left := 5
		pub := suite.Publisher[int](t, conn, address.Queue("orders"))
		for i := range left {
			suite.Publish(t, pub, i)
		}
		accept := []desk.WarningCode{desk.WarningLimit}
		survey := func() []desk.Alarm {
			found, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders"}, CountsOnly: true})
			require.NoError(t, err)
			require.Len(t, found.Queues, 1)
			return found.Alarms
		}
		assert.Empty(t, survey())
		for _, alarm := range alarms {
			s.EvalOK(t, alarm.set)
			suite.Poll(t, "there is an alarm", func() bool { return alarmed(t, s) })
			suite.Poll(t, "the survey names it", func() bool { // the API's list of nodes is some seconds old
				found := survey()
				return len(found) == 1 && found[0].Resource == alarm.name && found[0].Node != ""
			})
			// Messages can be read and discarded during it. Replaying them needs publishing.
			p, err := os.CreateTemp(t.TempDir(), "")
			require.NoError(t, err)
			defer p.Close()
			exported, err := d.Export(t.Context(), p, desk.ExportConfig{Queue: "orders", Accept: accept})
			require.NoError(t, err)
			assert.EqualValues(t, left, exported.Exported)
			discarded, err := d.Discard(t.Context(), desk.DiscardConfig{Queue: "orders", All: true, Max: 1, Destroy: true, Accept: accept})
			require.NoError(t, err)
			assert.EqualValues(t, 1, discarded.Discarded)
			left--
			_, err = d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders", All: true, Address: address.Queue("other"), Accept: accept})
			require.ErrorIs(t, err, client.ErrNotSent)
			require.ErrorContains(t, err, "alarm")
			s.EvalOK(t, alarm.clear)
			suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
			assert.Empty(t, survey())
		}
	})
}
