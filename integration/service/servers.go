package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Postgres returns a PostgreSQL. The user postgres needs no password, and is a superuser.
func Postgres(ctx context.Context, out io.Writer) (*Service, error) {
	return start(ctx, out, kind{
		name: "PostgreSQL", variable: "HOPBACK_POSTGRES_URL", pkg: "postgresql",
		program: "postgres", places: []string{"/usr/lib/postgresql/*/bin/postgres"}, user: "postgres",
		dying: "pre-existing shared memory block",
		url: func(port int) string {
			return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port)
		},
		arguments: func(ctx context.Context, s *Service, program string, port int) ([]string, error) {
			data := filepath.Join(s.Dir, "data")
			cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(program), "initdb"), "--pgdata="+data, "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
			cmd.SysProcAttr, cmd.Dir = s.user.credential(), s.Dir
			if output, err := cmd.CombinedOutput(); err != nil {
				return nil, fmt.Errorf("initdb: %w: %s", err, lastLine(output))
			}
			return []string{program, "-D", data, "-k", s.Dir, "-h", "127.0.0.1", "-p", strconv.Itoa(port),
				// A crash of the server loses nothing without these. Only one of the machine does.
				"-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=200"}, nil
		},
		ready: func(ctx context.Context, s *Service) error {
			// A startup packet of protocol 3.0 is answered by an authentication request (R)
			// once the server accepts connections, and by an error (E) before.
			conn, err := dial(ctx, s.URL)
			if err != nil {
				return err
			}
			defer conn.Close()
			packet := "\x00\x03\x00\x00user\x00postgres\x00database\x00postgres\x00\x00"
			n := len(packet) + 4
			_, _ = conn.Write(append([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, packet...))
			answer := make([]byte, 1)
			if _, err := io.ReadFull(conn, answer); err != nil {
				return err
			}
			if answer[0] != 'R' {
				return errors.New("it accepts no connections yet")
			}
			return nil
		},
	})
}

// Redis returns a Redis that writes each command to its file before it answers.
func Redis(ctx context.Context, out io.Writer) (*Service, error) {
	return start(ctx, out, kind{
		name: "Redis", variable: "HOPBACK_REDIS_URL", pkg: "redis-server", program: "redis-server",
		url: func(port int) string { return fmt.Sprintf("redis://127.0.0.1:%d/0", port) },
		arguments: func(_ context.Context, s *Service, program string, port int) ([]string, error) {
			return []string{program, "--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", s.Dir,
				"--save", "", "--appendonly", "yes", "--appendfsync", "always"}, nil
		},
		ready: func(ctx context.Context, s *Service) error {
			conn, err := dial(ctx, s.URL)
			if err != nil {
				return err
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, "PING\r\n")
			answer := make([]byte, 7)
			if _, err := io.ReadFull(conn, answer); err != nil {
				return err
			}
			if string(answer) != "+PONG\r\n" && !strings.HasPrefix(string(answer), "-NOAUTH") {
				return fmt.Errorf("it answers %q", answer)
			}
			return nil
		},
	})
}

// Prometheus returns a Prometheus with the given configuration, in Prometheus' own YAML.
// files holds further files by name, such as rules, which the configuration names by
// that name. A Prometheus of the environment keeps its own configuration.
func Prometheus(ctx context.Context, out io.Writer, config string, files map[string]string) (*Service, error) {
	return start(ctx, out, kind{
		name: "Prometheus", variable: "HOPBACK_PROMETHEUS_URL", pkg: "prometheus", program: "prometheus",
		url: func(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) },
		arguments: func(_ context.Context, s *Service, program string, port int) ([]string, error) {
			if err := os.WriteFile(filepath.Join(s.Dir, "prometheus.yml"), []byte(config), 0o600); err != nil {
				return nil, err
			}
			for name, text := range files {
				if err := os.WriteFile(filepath.Join(s.Dir, filepath.Base(name)), []byte(text), 0o600); err != nil {
					return nil, err
				}
			}
			return []string{program, "--config.file=" + filepath.Join(s.Dir, "prometheus.yml"), "--storage.tsdb.path=" + filepath.Join(s.Dir, "data"),
				"--web.listen-address=127.0.0.1:" + strconv.Itoa(port), "--web.enable-lifecycle", "--log.level=warn"}, nil
		},
		ready: func(ctx context.Context, s *Service) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/-/ready", nil)
			if err != nil {
				return err
			}
			answer, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
			if err != nil {
				return err
			}
			defer answer.Body.Close()
			if answer.StatusCode != http.StatusOK {
				return errors.New("it answers " + answer.Status)
			}
			return nil
		},
	})
}

// Nginx returns an nginx that passes every request on to the URL backend, by proxy_pass and
// with no other setting of a proxy. One of the environment keeps its own configuration.
func Nginx(ctx context.Context, out io.Writer, backend string) (*Service, error) {
	return start(ctx, out, kind{
		name: "nginx", variable: "HOPBACK_NGINX_URL", pkg: "nginx", program: "nginx", places: []string{"/usr/sbin/nginx"},
		url: func(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) },
		arguments: func(_ context.Context, s *Service, program string, port int) ([]string, error) {
			config := fmt.Sprintf(`daemon off; worker_processes 1; pid nginx.pid; error_log stderr;
events {}
http {
	access_log access.log;
	client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
	server {
		listen %d;
		location / { proxy_pass %s; }
	}
}
`, port, backend)
			path := filepath.Join(s.Dir, "nginx.conf")
			return []string{program, "-p", s.Dir, "-c", path}, os.WriteFile(path, []byte(config), 0o600)
		},
		ready: func(ctx context.Context, s *Service) error {
			conn, err := dial(ctx, s.URL)
			if err != nil {
				return err
			}
			return conn.Close()
		},
	})
}

// dial connects to the host and port of a URL, with the deadline of ctx.
func dial(ctx context.Context, raw string) (net.Conn, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, errors.New("its URL can't be read")
	}
	host := u.Host
	if u.Port() == "" {
		host = net.JoinHostPort(u.Hostname(), map[string]string{"postgres": "5432", "postgresql": "5432", "redis": "6379"}[u.Scheme])
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", host)
	if err != nil {
		return nil, err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(5 * time.Second)
	}
	return conn, conn.SetDeadline(deadline)
}
