package broker

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"
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

// login goes through the SASL layer of AMQP 1.0 (part 5.3 of the standard),
// which the broker answers when its user database is there. Written by hand,
// so that whether the broker is ready doesn't hang on the client under test.
func login(ctx context.Context, u *url.URL) error {
	conn, err := dial(ctx, u)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	return saslPlain(conn, u)
}

// dial is net.Dialer.DialContext with TLS where the URL says so.
func dial(ctx context.Context, u *url.URL) (net.Conn, error) {
	if u.Scheme == "amqps" {
		return new(tls.Dialer).DialContext(ctx, "tcp", address(u, "5671"))
	}
	return new(net.Dialer).DialContext(ctx, "tcp", address(u, "5672"))
}

func saslPlain(conn io.ReadWriter, u *url.URL) error {
	const header = "AMQP\x03\x01\x00\x00"
	if _, err := io.WriteString(conn, header); err != nil {
		return err
	}
	var answer [len(header)]byte
	if _, err := io.ReadFull(conn, answer[:]); err != nil {
		return fmt.Errorf("read the protocol header: %w", err)
	}
	if string(answer[:]) != header {
		return fmt.Errorf("it answers %q, which is not AMQP 1.0 with SASL", answer)
	}
	if _, err := saslFrame(conn); err != nil { // sasl-mechanisms: PLAIN is always tried
		return err
	}
	user, password := credentials(u)
	response := "\x00" + user + "\x00" + password
	// sasl-init: a list of the mechanism, a symbol, and the response, a binary.
	const mechanism = "PLAIN"
	fields := append([]byte{0xa3, byte(len(mechanism))}, mechanism...)
	fields = append(fields, 0xb0)
	fields = binary.BigEndian.AppendUint32(fields, uint32(len(response)))
	fields = append(fields, response...)
	body := []byte{0x00, 0x53, 0x41, 0xd0}
	body = binary.BigEndian.AppendUint32(body, uint32(len(fields)+4))
	body = binary.BigEndian.AppendUint32(body, 2)
	body = append(body, fields...)
	frame := binary.BigEndian.AppendUint32(nil, uint32(len(body)+8))
	frame = append(frame, 2, 1, 0, 0) // body from word 2 on, type SASL
	if _, err := conn.Write(append(frame, body...)); err != nil {
		return err
	}
	outcome, err := saslFrame(conn)
	if err != nil {
		return err
	}
	// sasl-outcome: a list whose first element is the code, a ubyte.
	if len(outcome) < 8 || outcome[2] != 0x44 || outcome[3] != 0xc0 || outcome[6] != 0x50 {
		return fmt.Errorf("unexpected answer to the login: % x", outcome)
	}
	if code := outcome[7]; code != 0 {
		return fmt.Errorf("login of user %q refused, SASL code %d", user, code)
	}
	return nil
}

func saslFrame(r io.Reader) ([]byte, error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("read a SASL frame: %w", err)
	}
	size := binary.BigEndian.Uint32(head[:])
	if size < 8 || size > 512 { // 512 is the standard's limit for SASL frames
		return nil, fmt.Errorf("a SASL frame of %d bytes", size)
	}
	body := make([]byte, size-8)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, fmt.Errorf("read a SASL frame: %w", err)
	}
	return body, nil
}

// overview returns the version that the HTTP API tells.
func overview(ctx context.Context, managementURL string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, managementURL+"/api/overview", nil)
	if err != nil {
		return "", err
	}
	// No proxy of the environment, and nothing that outlives the call.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("GET /api/overview: %s", resp.Status)
	}
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&overview); err != nil {
		return "", fmt.Errorf("GET /api/overview: %w", err)
	}
	if overview.Version == "" {
		return "", errors.New("GET /api/overview: no rabbitmq_version in the answer")
	}
	return overview.Version, nil
}

// credentials of a URL; guest and guest by default.
func credentials(u *url.URL) (user, password string) {
	if u.User == nil {
		return "guest", "guest"
	}
	password, _ = u.User.Password()
	return u.User.Username(), password
}

func address(u *url.URL, defaultPort string) string {
	port := u.Port()
	if port == "" {
		port = defaultPort
	}
	return net.JoinHostPort(u.Hostname(), port)
}
