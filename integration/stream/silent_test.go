package stream_test

import (
	neturl "net/url"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/stream"
)

// Codes of performatives.
const (
	codeAttach   = 0x12
	codeFlow     = 0x13
	codeTransfer = 0x14
)

// silenced is a way to a broker on which the broker's performatives of one kind are lost while it is
// set.
func silenced(t *testing.T, s *suite.Site) (lost *atomic.Uint32, url string) {
	lost = &atomic.Uint32{}
	addr := suite.Between(t, s.Host(), nil, func(code byte, _ []byte) bool { return uint32(code) != lost.Load() })
	return lost, s.AMQPURLWith(func(u *neturl.URL) { u.Host = addr })
}

// RabbitMQ can forget a stream's reader without ending its link. The consumer notices that messages
// are ready, and reads on over another endpoint.
func TestAStreamThatFallsSilentIsReadOn(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		direct, _ := s.Connect(t)
		for name, filter := range map[string]stream.Filter{"all": {}, "some": {Values: []string{"even"}}} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				lost, url := silenced(t, s)
				parity := func(i int, m *client.Message) { stream.FilterValue([]string{"even", "odd"}[i%2])(m) }
				suite.StreamOf(t, direct, name, 10, parity)
				conn, _ := suite.ConnectTo(t, url, suite.Soon, func(c *client.Config) { c.Endpoints = []string{s.AMQPURL()} })
				r := readStream(t, conn, name, stream.Config{Filter: filter, Consumer: "c", Offsets: &stream.MemoryStore{}})
				want := func(first, end int) (all []int) {
					for i := first; i < end; i++ {
						if len(filter.Values) == 0 || i%2 == 0 {
							all = append(all, i)
						}
					}
					return all
				}
				assert.Equal(t, want(0, 10), r.Until(want(0, 10)[len(want(0, 10))-1]))
				lost.Store(codeTransfer)
				suite.FillStream(t, direct, name, 10, 20, parity)
				assert.Equal(t, want(10, 20), r.Until(want(10, 20)[len(want(10, 20))-1]))
				assert.NotEmpty(t, r.Log.With("messages are ready in the stream, and the broker sends none"))
				require.NoError(t, r.Stop())
			})
		}
	})
}

// A broker that answers nothing while a consumer attaches is tried again.
func TestAnAttachToAStreamIsTriedAgainWithoutAnAnswer(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, code := range map[string]uint32{"no attach": codeAttach, "no end of a drain": codeFlow} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				direct, _ := s.Connect(t)
				suite.StreamOf(t, direct, "log", 10)
				lost, url := silenced(t, s)
				conn, _ := suite.ConnectTo(t, url, suite.Soon)
				store := &stream.MemoryStore{}
				require.NoError(t, store.Save(t.Context(), "c", "log", 5))
				_, err := declare.Inspect(t.Context(), conn.Management(), "log") // its links are attached
				require.NoError(t, err)
				lost.Store(code)
				r := readStream(t, conn, "log", stream.Config{Consumer: "c", Offsets: store})
				suite.Poll(t, "it notices", func() bool { return len(r.Log.With("hasn't answered")) > 0 })
				lost.Store(0)
				assert.Equal(t, span(5, 10), r.Until(9))
				require.NoError(t, r.Stop())
			})
		}
	})
}
