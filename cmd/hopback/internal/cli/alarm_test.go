package cli_test

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
)

// dlq survey reports the broker's alarms: while there is one, nothing can be replayed.
func TestASurveyReportsAlarms(t *testing.T) {
	t.Parallel()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	target, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(broker.HTTPHandler())
	t.Cleanup(api.Close)
	w := world{env: map[string]string{"HOPBACK_URL": target, "HOPBACK_MANAGEMENT_URL": strings.Replace(api.URL, "http://", "http://guest:guest@", 1)}}
	calm := w.run("dlq", "survey", "--counts")
	require.Zero(t, calm.code, calm.stderr)
	assert.NotContains(t, calm.stdout, "ALARM")
	broker.SetDiskAlarm(true)
	alarm := w.run("dlq", "survey", "--counts")
	require.Zero(t, alarm.code, alarm.stderr)
	assert.Contains(t, alarm.stdout, "ALARM: disk on ")
	assert.Contains(t, w.run("dlq", "survey", "--counts", "--json").stdout, `"resource": "disk"`)
}
