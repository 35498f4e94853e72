package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/doctor"
)

const ailing = `{"queues": [{"name": "orders", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 3}}], "policies": [], "parameters": []}`

func TestDoctorOfAFile(t *testing.T) {
	t.Parallel()
	path := file(t, "definitions.json", ailing)
	page := filepath.Join(t.TempDir(), "report.html")
	r := world{}.run("doctor", path, "--html", page)
	assert.Equal(t, 1, r.code, r.stderr)
	assert.Contains(t, r.stdout, "error    dead-letter: 1 place")
	assert.Contains(t, r.stdout, `queue "orders" ──rejected`)
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	assert.Contains(t, string(text), "dead-letter: 1 place")

	r = world{stdin: ailing}.run("doctor", "-", "--json")
	assert.Equal(t, 1, r.code, r.stderr)
	var report doctor.Report
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &report))
	assert.Equal(t, 1, report.Count("error"))
	assert.NotEmpty(t, report.Unseen)

	assert.Zero(t, world{}.run("doctor", path, "--waive", "dead-letter").code)
	assert.Zero(t, world{stdin: `{}`}.run("doctor", "-", "--fail-on", "note").code)
}

func TestDoctorExplainsItsRules(t *testing.T) {
	t.Parallel()
	assert.Contains(t, world{}.run("doctor", "--rules").stdout, "dead-letter-cycle")
	r := world{}.run("doctor", "--explain", "dead-letter-cycle")
	assert.Zero(t, r.code)
	for _, part := range []string{"What happens:", "How to reproduce it:", "Fix:", "https://www.rabbitmq.com/"} {
		assert.Contains(t, r.stdout, part)
	}
}

func TestMistakesWithDoctor(t *testing.T) {
	t.Parallel()
	const secret = "t0p-secret"
	for _, tt := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"doctor", "--explain", "dead-leter"}, 64, `did you mean "dead-letter"`},
		{[]string{"doctor", "-", "--fail-on", "worst"}, 64, "isn't a severity"},
		{[]string{"doctor", "a", "b"}, 64, "one broker or file"},
		{[]string{"doctor", "guest:" + secret + "@localhost:15672"}, 64, "neither a file nor a URL"},
		{[]string{"doctor", "localhost:15672"}, 64, "neither a file nor a URL"},
		{[]string{"doctor", "localhost"}, 64, "neither a file nor a URL"},
		{[]string{"doctor", "ftp://guest:" + secret + "@localhost"}, 64, "isn't an http or https URL"},
		{[]string{"doctor", "http://guest:" + secret + "@127.0.0.1:1"}, 2, "check that the management plugin is enabled"},
		{[]string{"doctor", "none.json"}, 64, "there is no file"},
		{[]string{"doctor", "--url", "amqp://guest:" + secret + "@h:5673"}, 64, "needs the HTTP API or a definitions file"},
	} {
		r := world{}.run(tt.args...)
		assert.Equal(t, tt.code, r.code, "%s: %s", tt.args, r.stderr)
		assert.Contains(t, r.stderr, tt.says)
		assert.NotContains(t, r.stdout+r.stderr, secret)
	}
}
