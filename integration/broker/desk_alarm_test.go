package broker_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/integration/internal/suite"
)

// A survey that only counts works during an alarm, and names it.
func TestASurveyNamesTheAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		d, err := desk.New(conn, desk.Config{HTTP: s.API(t)})
		require.NoError(t, err)
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
			s.EvalOK(t, alarm.clear)
			suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
			assert.Empty(t, survey())
		}
	})
}
