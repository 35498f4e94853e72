package link

import (
	"context"
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// at is an address as a connection has it.
type at string

func (at) Network() string  { return "tcp" }
func (a at) String() string { return string(a) }

// Addresses that have failed take turns when no other accepts a connection.
func TestAddressesThatFailedTakeTurns(t *testing.T) {
	t.Parallel()
	a := &addresses{}
	a.fail(at("a"), nil)
	a.fail(at("b"), nil)
	a.fail(at("elsewhere"), nil)
	a.fail(at("c"), nil)
	a.fail(at("a"), nil)
	require.Equal(t, []string{"b", "elsewhere", "c", "a"}, a.snapshot())
	assert.Equal(t, []string{"a"}, a.again([]string{"a", "b", "c"}), "all but the last get another chance")
	assert.Equal(t, []string{"elsewhere", "a"}, a.snapshot())
	assert.Empty(t, a.again([]string{"a"}), "an only one gets it, too")
	a.work(at("a"))
	assert.Equal(t, []string{"elsewhere"}, a.snapshot())
	for i := range 10 * maxFailed {
		a.fail(at(strconv.Itoa(i)), nil)
	}
	assert.Len(t, a.snapshot(), maxFailed)
}

// An address that has failed is dialed if it's the only one.
func TestAnOnlyAddressIsDialedAgain(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	for _, a := range []*addresses{nil, {}, {failed: []string{l.Addr().String()}}, {failed: []string{"127.0.0.9:1", l.Addr().String()}}} {
		c, err := a.dial(context.Background(), net.Dialer{}, l.Addr().String(), false)
		require.NoError(t, err)
		assert.Equal(t, l.Addr().String(), c.RemoteAddr().String())
		_ = c.Close()
	}
	failed := &addresses{failed: []string{l.Addr().String()}}
	_, err = failed.dial(context.Background(), net.Dialer{}, l.Addr().String(), true)
	require.ErrorIs(t, err, errPassedOver)
}
