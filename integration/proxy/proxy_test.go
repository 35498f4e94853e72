package proxy_test

import (
	"bufio"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/integration/proxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo is a server that sends back what it gets.
func echo(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return ln.Addr().String()
}

func dial(t *testing.T, p *proxy.Proxy) net.Conn {
	c, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	return c
}

func say(t *testing.T, c net.Conn, line string) {
	_, err := io.WriteString(c, line+"\n")
	require.NoError(t, err)
	got, err := bufio.NewReader(c).ReadString('\n')
	require.NoError(t, err)
	assert.Equal(t, line+"\n", got)
}

func start(t *testing.T) *proxy.Proxy {
	p, err := proxy.New(echo(t))
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return p
}

func TestPassesBothWays(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	say(t, c, "one")
	say(t, c, "two")
	assert.EqualValues(t, 8, p.Sent())
	assert.EqualValues(t, 8, p.Received())
	assert.Equal(t, 1, p.Accepted())
	assert.Equal(t, 1, p.Open())
}

func TestCutResetsOpenConnections(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	say(t, c, "one")
	assert.Equal(t, 1, p.Cut())
	_, err := c.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	say(t, dial(t, p), "a new one works")
}

func TestStallHoldsBytesUntilResume(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	say(t, c, "one")
	p.Stall()
	_, err := io.WriteString(c, "two\n")
	require.NoError(t, err)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err = c.Read(make([]byte, 1))
	assert.ErrorIs(t, err, os.ErrDeadlineExceeded, "nothing may come")
	p.Resume()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	got, err := bufio.NewReader(c).ReadString('\n')
	require.NoError(t, err)
	assert.Equal(t, "two\n", got)
}

func TestCloseEndsStalledConnections(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	p.Stall()
	_, err := io.WriteString(c, "one\n")
	require.NoError(t, err)
	p.Close()
	_, err = c.Read(make([]byte, 1))
	assert.Error(t, err)
}

func TestRefuseAndAdmit(t *testing.T) {
	p := start(t)
	open := dial(t, p)
	say(t, open, "one")
	p.Refuse()
	_, err := net.Dial("tcp", p.Addr())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	say(t, open, "open ones go on")
	require.NoError(t, p.Admit())
	say(t, dial(t, p), "and new ones are let in again")
}

func TestDropLeavesConnectionsHalfOpen(t *testing.T) {
	p := start(t)
	client := dial(t, p)
	say(t, client, "one")
	require.Equal(t, 1, p.Drop())
	_, err := io.WriteString(client, "two\n")
	require.NoError(t, err, "the sender doesn't notice")
	require.NoError(t, client.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err = client.Read(make([]byte, 1))
	assert.ErrorIs(t, err, os.ErrDeadlineExceeded, "nothing may come, and no end either")
	say(t, dial(t, p), "a new one works")
}

func TestDroppedEndIsNotPassedOn(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = ln.Close() }()
	p, err := proxy.New(ln.Addr().String())
	require.NoError(t, err)
	t.Cleanup(p.Close)
	client := dial(t, p)
	server, err := ln.Accept()
	require.NoError(t, err)
	defer func() { _ = server.Close() }()
	for p.Open() == 0 {
		time.Sleep(time.Millisecond)
	}
	p.Drop()
	require.NoError(t, client.Close())
	require.NoError(t, server.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err = server.Read(make([]byte, 1))
	assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestSlowHoldsEachPiece(t *testing.T) {
	p := start(t)
	c := dial(t, p)
	p.Slow(50*time.Millisecond, 0)
	began := time.Now()
	say(t, c, "one")
	assert.GreaterOrEqual(t, time.Since(began), 100*time.Millisecond, "there and back")
	p.Slow(0, 100)
	began = time.Now()
	say(t, c, "123456789")
	assert.GreaterOrEqual(t, time.Since(began), 200*time.Millisecond, "ten bytes at 100 a second, twice")
	p.Slow(0, 0)
	say(t, c, "at once")
}

func TestDeafenLosesOneDirectionOnly(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = ln.Close() }()
	p, err := proxy.New(ln.Addr().String())
	require.NoError(t, err)
	t.Cleanup(p.Close)
	p.Deafen()
	client := dial(t, p)
	server, err := ln.Accept()
	require.NoError(t, err)
	defer func() { _ = server.Close() }()
	_, err = io.WriteString(client, "lost")
	require.NoError(t, err)
	_, err = io.WriteString(server, "heard")
	require.NoError(t, err)
	got := make([]byte, 5)
	_, err = io.ReadFull(client, got)
	require.NoError(t, err)
	assert.Equal(t, "heard", string(got))
	require.NoError(t, server.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err = server.Read(got)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)

	p.Hear()
	_, err = io.WriteString(client, "again")
	require.NoError(t, err)
	require.NoError(t, server.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err = io.ReadFull(server, got)
	require.NoError(t, err)
	assert.Equal(t, "again", string(got))
}
