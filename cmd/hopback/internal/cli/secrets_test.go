package cli_test

import (
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
)

// A Kubernetes secret that was made with echo ends with a newline.
func TestURLsOfASecretThatEndsWithANewline(t *testing.T) {
	t.Parallel()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	target, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(broker.HTTPHandler())
	defer api.Close()
	env := map[string]string{"HOPBACK_URL": target + "\n", "HOPBACK_MANAGEMENT_URL": api.URL + "\n"}
	topology := file(t, "t.yaml", "queues: {audit: {delivery-limit: 5, dead-letter: drop}}\n")
	r := world{env: env}.run("topology", "apply", topology)
	assert.Zero(t, r.code, r.stderr)
	r = world{env: env}.run("doctor")
	assert.NotEqual(t, 64, r.code, r.stderr)
	assert.NotContains(t, r.stderr, "isn't a")

	r = world{env: map[string]string{"HOPBACK_URL": "amqp://h1:5672,h2:5672"}}.run("dlq", "survey")
	assert.Equal(t, 64, r.code)
	assert.Contains(t, r.stderr, "names several hosts")
}

func TestDoctorNamesTheVirtualHostThatItWasAskedFor(t *testing.T) {
	t.Parallel()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	target, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(broker.HTTPHandler())
	defer api.Close()
	env := map[string]string{"HOPBACK_URL": target, "HOPBACK_MANAGEMENT_URL": api.URL}
	for _, args := range [][]string{{"doctor", "--vhost", "nosuch"}, {"doctor", "--vhost", "nosuch", "http://guest:guest@" + api.Listener.Addr().String()}} {
		r := world{env: env}.run(args...)
		assert.NotZero(t, r.code)
		assert.Contains(t, r.stdout+r.stderr, `"nosuch"`)
		assert.NotContains(t, r.stdout+r.stderr, `virtual host "/"`)
	}
}
