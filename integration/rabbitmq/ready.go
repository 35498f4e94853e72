package rabbitmq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/Azure/go-amqp"
)

// probeTimeout bounds one try to talk to a broker.
const probeTimeout = 5 * time.Second

// probe returns the full version of a broker that serves: it lets us log in
// over AMQP 1.0, and its HTTP API answers.
func probe(ctx context.Context, amqpURL, managementURL string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	u, err := url.Parse(amqpURL)
	if err != nil {
		return "", err
	}
	if err := login(ctx, u); err != nil {
		return "", fmt.Errorf("AMQP: %w", err)
	}
	full, err := overview(ctx, managementURL)
	if err != nil {
		return "", fmt.Errorf("HTTP API: %w", err)
	}
	return full, nil
}

// login opens a connection of go-amqp and closes it, so that whether the broker is ready
// doesn't hang on the client under test.
func login(ctx context.Context, u *url.URL) error {
	vhost := strings.TrimPrefix(u.Path, "/")
	if vhost == "" {
		vhost = "/"
	}
	conn, err := amqp.Dial(ctx, u.Scheme+"://"+u.Host, &amqp.ConnOptions{SASLType: amqp.SASLTypePlain(credentials(u)), HostName: "vhost:" + vhost})
	if err != nil {
		return err
	}
	return conn.Close()
}

// overview returns the version that the HTTP API reports.
func overview(ctx context.Context, managementURL string) (string, error) {
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if err := API(ctx, http.MethodGet, managementURL, "/overview", &overview); err != nil {
		return "", err
	}
	if overview.Version == "" {
		return "", errors.New("GET /overview: no rabbitmq_version in the answer")
	}
	return overview.Version, nil
}

// API sends a request to the HTTP API at a Broker's ManagementURL, and reads the JSON of a reply
// into the value behind reply, unless that is nil.
func API[T any](ctx context.Context, method, managementURL, path string, reply *T) error {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(managementURL, "/")+"/api"+path, nil)
	if err != nil {
		return err
	}
	// No proxy of the environment, and nothing that outlives the call.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s", resp.Status, text)
	}
	if err == nil && reply != nil {
		err = json.Unmarshal(text, reply)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// credentials of a URL; guest and guest by default.
func credentials(u *url.URL) (user, password string) {
	if u.User == nil {
		return "guest", "guest"
	}
	password, _ = u.User.Password()
	return u.User.Username(), password
}
