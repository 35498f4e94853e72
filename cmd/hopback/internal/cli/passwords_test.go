package cli_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
)

// No error shows a part of a password, however the URL is misread: a reserved character that isn't
// percent-encoded ends the password for the parser, and what comes then is a host, a port, a path,
// or a query to it.
func TestMistypedURLsShowNoPartOfThePassword(t *testing.T) {
	t.Parallel()
	commands := map[string][]string{
		"postgres": {"outbox", "migrate", "--timeout", "5s", "--database"},
		"amqp":     {"topology", "inspect", "--timeout", "5s", "--url"},
		"http":     {"doctor", "--timeout", "5s"},
		"https":    {"dlq", "survey", "--timeout", "5s", "--url", "amqp://127.0.0.1:1", "--management-url"},
	}
	passwords := []string{"hun@ter", "hun/ter", "hun?ter", "hun#ter", "hun:ter", "hun%ter", "hun ter", "1@hunter", "12/hunter", "12?hunter", "12#hunter", "hun@ter/x", "hun[ter", "a@b@hunter", "hunter\n"}
	for scheme, args := range commands {
		for _, password := range passwords {
			url := scheme + "://shop:" + password + "@127.0.0.1:1/shop"
			r := world{}.run(append(args[:len(args):len(args)], url)...)
			assert.NotEqual(t, cli.Done, r.code, url)
			for _, part := range []string{"hun", "ter/", "ter@", ":ter", "@ter", " ter", "/ter", "?ter", "#ter", "\"ter", "`ter"} {
				assert.NotContains(t, r.stdout+r.stderr, part, url)
			}
		}
	}
	for _, dsn := range []string{"host=127.0.0.1 port=1 password=hun ter", "host=127.0.0.1 port=1 password='hun ter", "password=hunter port=x"} {
		r := world{}.run("outbox", "migrate", "--timeout", "20s", "--database", dsn)
		assert.Equal(t, cli.Usage, r.code, dsn)
		assert.NotContains(t, r.stderr, "hun", dsn)
		assert.NotContains(t, r.stderr, "ter\"", dsn)
	}
}

// An interrupt is no fault of the HTTP API, of the broker, or of the database.
func TestAnInterruptBlamesNobody(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"URL":   {"doctor", "URL"},
		"flags": {"doctor", "--url", "amqp://127.0.0.1:1", "--management-url", "URL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, interrupt := context.WithCancel(t.Context())
			defer interrupt()
			asked := make(chan struct{}, 100)
			release := make(chan struct{})
			api := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				asked <- struct{}{}
				select {
				case <-r.Context().Done():
				case <-release:
				}
			}))
			t.Cleanup(api.Close)
			t.Cleanup(func() { close(release) })
			for i, a := range args {
				args[i] = strings.Replace(a, "URL", strings.Replace(api.URL, "http://", "http://guest:guest@", 1), 1)
			}
			var out, errs safe
			code := make(chan int, 1)
			go func() {
				code <- cli.Run(ctx, cli.IO{Args: args, Env: func(string) string { return "" }, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs})
			}()
			select {
			case <-asked:
			case early := <-code:
				t.Fatalf("it ended with %d: %s", early, errs.String())
			}
			interrupt()
			assert.Equal(t, cli.Interrupted, <-code)
			for _, blamed := range []string{"plugin", "port", "check"} {
				assert.NotContains(t, errs.String(), blamed)
			}
		})
	}
}
