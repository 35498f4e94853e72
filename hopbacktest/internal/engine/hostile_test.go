package engine

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// soon fails a test whose part takes long in real time, since it holds the lock.
func soon(t *testing.T, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); do() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("it takes too long")
	}
}

// Many # in one binding have more ways to match a long key than anybody can go.
func TestManyWildcards(t *testing.T) {
	x := &exchange{kind: typeTopic, bindings: []*binding{{key: strings.Repeat("#.", 30) + "end"}, {key: strings.Repeat("#.*.", 30) + "#"}}}
	x.index()
	soon(t, func() {
		for _, key := range []string{strings.Repeat("a.", 500) + "b", strings.Repeat("a.", 500) + "end"} {
			found := map[*binding]bool{}
			x.matches(&message{keys: []string{key}}, nil, func(b *binding) { found[b] = true })
			assert.Equal(t, strings.HasSuffix(key, "end"), found[x.bindings[0]])
			assert.True(t, found[x.bindings[1]])
		}
	})
}

// Annotations are merged in a time that grows as they do.
func TestManyAnnotations(t *testing.T) {
	many := func(prefix string) frames.Map {
		all := make(frames.Map, 0, 50_000)
		for i := range cap(all) {
			all = append(all, frames.Entry{Key: frames.Symbol(fmt.Sprintf("x-opt-%s%d", prefix, i)), Value: int64(i)})
		}
		return all
	}
	soon(t, func() {
		e := entry{msg: &message{sent: many("a"), added: many("b"), keys: []string{"k"}}}
		for range 2 {
			e.mark(true, many("c"))
		}
		d := (&queue{b: &Broker{}}).delivery(&e)
		msg, err := frames.DecodeMessage(d.Append(nil))
		assert.NoError(t, err)
		assert.GreaterOrEqual(t, len(msg.Annotations), 150_000)
	})
}

// A client that grants a million credits and takes nothing has no more than a thousand
// deliveries made for it. A drain is answered when all have been taken.
func TestDeliveriesThatNobodyTakes(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		p := l.publisher("/queues/q")
		payload := encoded(t, nil, "m")
		for i := range uint32(5000) {
			require.Nil(t, p.Publish(i, true, payload))
		}
		r := l.reader("q", 0)
		l.events()
		r.c.Flow(&frames.Flow{LinkCredit: frames.Some[uint32](1_000_000), Drain: true})
		q, _ := l.b.Queue("/", "q")
		assert.Equal(t, maxUntaken, q.Unacknowledged)
		deliveries, answers := 0, 0
		for {
			events := l.events()
			if len(events) == 0 {
				break
			}
			assert.LessOrEqual(t, len(events), maxUntaken+1)
			for _, e := range events {
				switch e.Kind {
				case EventDelivered:
					assert.Zero(t, answers)
					deliveries++
				case EventFlowed:
					if e.Flow.Drain {
						answers++
						assert.Equal(t, uint32(1_000_000), e.Flow.DeliveryCount.Value)
					}
				}
			}
		}
		assert.Equal(t, 5000, deliveries)
		assert.Equal(t, 1, answers)
	})
}

func TestMessagesThatAreNone(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		header := []byte{0, 0x53, 0x70, 0x45}
		for name, payload := range map[string][]byte{
			"nothing": nil, "no body": header, "garbage": []byte("garbage"), "cut off": {0, 0x53, 0x70, 0xc0, 5},
			"annotations that are a list": {0, 0x53, 0x72, 0x45, 0, 0x53, 0x77, 0x40}, "a footer": {0, 0x53, 0x78, 0xc1, 1, 0},
		} {
			l.s = l.conn.Begin()
			fault := l.publisher("/queues/q").Publish(1, false, payload)
			require.NotNil(t, fault, name)
			assert.Equal(t, map[bool]frames.Symbol{true: "amqp:decode-error", false: "amqp:internal-error"}[l.newer()], fault.Err.Condition, name)
			assert.Equal(t, map[bool]Scope{true: ScopeLink, false: ScopeSession}[l.newer()], fault.Ends)
		}
		l.s = l.conn.Begin()
		fault := l.publisher("/queues/q").Publish(1, false, make([]byte, 17<<20))
		require.NotNil(t, fault)
		q, _ := l.b.Queue("/", "q")
		assert.Zero(t, q.Messages)
	})
}

// Calls after the end do nothing.
func TestThingsThatHaveEnded(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		l.put("q", "m")
		p, r := l.publisher("/queues/q"), l.reader("q", 1)
		d, _ := r.next()
		for _, end := range []func(){func() { r.c.Close(); p.Close() }, r.s.End, l.conn.Close, l.b.Close} {
			end()
			end()
			p.Close()
			r.c.Close()
			assert.Nil(t, p.Publish(1, false, encoded(t, nil, "m")))
			r.flow(1)
			assert.Nil(t, r.s.Settle([]*Delivery{d}, &frames.Accepted{}))
			assert.NotEmpty(t, d.Append(nil))
		}
		_, fault := r.s.OpenConsumer(&frames.Attach{Source: &frames.Source{Address: "/queues/q"}})
		assert.NotNil(t, fault)
		reply, fault := r.s.Request(&frames.Message{})
		assert.Nil(t, reply)
		assert.Nil(t, fault)
		assert.NotNil(t, l.conn.Begin())
	})
}
