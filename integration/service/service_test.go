package service_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/integration/service"
)

// holder makes the test binary a process that starts a Redis, prints its address, and waits.
const holder = "HOPBACK_TEST_SERVICE_HOLDER"

func TestMain(m *testing.M) {
	if os.Getenv(holder) != "" {
		s, err := service.Redis(context.Background(), os.Stderr)
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(os.Stdout, s.URL+"\n"+s.Dir+"\n")
		select {}
	}
	goleak.VerifyTestMain(m)
}

func TestServersServeAndComeBackWithTheirData(t *testing.T) {
	rabbitmq.NeedsStart(t)
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		s, err := service.Postgres(t.Context(), os.Stderr)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, s.Close()) })
		ours(t, s)
		psql := func(statement string) string {
			out, err := exec.Command("psql", "-qtA", "-d", s.URL, "-c", statement).CombinedOutput()
			require.NoError(t, err, "%s", out)
			return strings.TrimSpace(string(out))
		}
		psql("CREATE TABLE kept AS SELECT 42 AS answer")
		require.NoError(t, s.Kill())
		require.NoError(t, s.Kill(), "a killed server is killed again")
		require.NoError(t, s.Start(t.Context()))
		require.NoError(t, s.Start(t.Context()), "a server that runs is left alone")
		assert.Equal(t, "42", psql("SELECT answer FROM kept"))
	})
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		s, err := service.Redis(t.Context(), os.Stderr)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, s.Close()) })
		ours(t, s)
		assert.Equal(t, "+OK", redis(t, s.URL, "SET kept 42"))
		require.NoError(t, s.Kill())
		require.NoError(t, s.Start(t.Context()))
		assert.Equal(t, "$2", redis(t, s.URL, "GET kept"))
	})
	t.Run("Prometheus", func(t *testing.T) {
		t.Parallel()
		s, err := service.Prometheus(t.Context(), os.Stderr, "rule_files: [rules.yml]\n", map[string]string{
			"rules.yml": "groups: [{name: one, rules: [{record: answer, expr: vector(42)}]}]\n",
		})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, s.Close()) })
		ours(t, s)
		answer, err := http.Get(s.URL + "/api/v1/rules")
		require.NoError(t, err)
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		assert.Contains(t, string(text), `"name":"answer"`)
		http.DefaultClient.CloseIdleConnections()
	})
}

// ours skips what needs a server of our own.
func ours(t *testing.T, s *service.Service) {
	if s.Dir == "" {
		t.Skip("the server comes from the environment")
	}
}

func TestServerEndsWithTheProcessThatStartedIt(t *testing.T) {
	rabbitmq.NeedsStart(t)
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holder+"=1")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	url := lines.Text()
	require.True(t, lines.Scan())
	dir := lines.Text()
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if dir == "" {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		t.Skip("the server comes from the environment")
	}
	assert.Equal(t, "+PONG", redis(t, url, "PING"))
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", hostOf(t, url))
		if err == nil {
			conn.Close()
		}
		return err != nil
	}, 20*time.Second, 20*time.Millisecond, "it still listens")
}

func TestBadServersAreTold(t *testing.T) {
	rabbitmq.NeedsStart(t)
	t.Setenv("HOPBACK_REDIS_URL", "redis://127.0.0.1:1/0")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := service.Redis(ctx, nil)
	require.ErrorContains(t, err, "HOPBACK_REDIS_URL")

	_, err = service.Prometheus(t.Context(), nil, "nonsense: [", nil)
	require.ErrorContains(t, err, "it doesn't serve: it has ended")
}

func redis(t *testing.T, url, command string) string {
	t.Helper()
	conn, err := net.Dial("tcp", hostOf(t, url))
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, command+"\r\n")
	require.NoError(t, err)
	line, err := bufio.NewReader(conn).ReadString('\n')
	require.NoError(t, err)
	return strings.TrimSpace(line)
}

func hostOf(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	require.NoError(t, err)
	return u.Host
}
