package cli_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A server that answers everything with null, as some proxies and mocks do, isn't a broker without
// faults.
func TestDoctorOfAnAPIThatSaysNothing(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("null")) }))
	defer s.Close()
	for _, args := range [][]string{nil, {"--vhost", "/"}, {"--json"}, {"--fail-on", "note"}} {
		r := world{}.run(append([]string{"doctor", strings.Replace(s.URL, "http://", "http://guest:guest@", 1)}, args...)...)
		assert.Equal(t, 2, r.code, "%s: %s%s", args, r.stdout, r.stderr)
		assert.Contains(t, r.stderr, "it is null", "%s", args)
	}
}

// The time limit holds for a file, too.
func TestDoctorOfAFileInNoTime(t *testing.T) {
	t.Parallel()
	r := world{stdin: ailing}.run("doctor", "-", "--timeout", "1ns")
	assert.Equal(t, 2, r.code, "%s%s", r.stdout, r.stderr)
	assert.Contains(t, r.stderr, "--timeout")
	assert.Empty(t, r.stdout)
}
