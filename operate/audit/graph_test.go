package audit_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
)

func TestMermaidShowsTheRetryCycle(t *testing.T) {
	t.Parallel()
	assert.Equal(t, `flowchart LR
    subgraph work["work"]
        q_orders[("orders<br/>delivery limit 5")]
        w_orders(["worker of orders"])
    end
    subgraph retry["retry"]
        x_retry{{"retry<br/>topic"}}
        q_delay_10s[("delay_10s<br/>holds for 10s")]
        x_requeue{{"requeue<br/>topic"}}
    end
    subgraph given_up["given up"]
        x_dlx{{"dlx<br/>direct"}}
        x_parking{{"parking<br/>fanout"}}
        q_orders_dead[("orders.dead")]
        q_parking[("parking")]
    end
    q_orders -->|"delivery"| w_orders
    w_orders -->|"fails: delay.10000.orders"| x_retry
    x_retry -->|"delay.10000.#"| q_delay_10s
    q_delay_10s -.->|"time is up"| x_requeue
    x_requeue -->|"*.*.orders"| q_orders
    x_dlx -->|"orders"| q_orders_dead
    x_parking --> q_parking
    q_orders -.->|"dead letters"| x_dlx
    x_requeue -.->|"no binding"| x_parking
    x_dlx -.->|"no binding"| x_parking
`, audit.Mermaid(check.FromTopology(cycle())))
}

func TestDOTIsWellFormed(t *testing.T) {
	t.Parallel()
	topology := cycle()
	topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "a\"b\\c", AlternateExchange: "gone"})
	text := audit.DOT(check.FromTopology(topology))
	assert.True(t, strings.HasPrefix(text, "digraph topology {\n"))
	assert.Contains(t, text, `label="a\"b\\c\ndirect"`)
	assert.Contains(t, text, `label="gone\nmissing!"`)
	assert.Contains(t, text, `w_orders -> x_retry [style=solid, label="fails: delay.10000.orders"]`)
	assert.Equal(t, strings.Count(text, "{"), strings.Count(text, "}"))
	assert.Equal(t, text, audit.DOT(check.FromTopology(topology)))
}

func TestGraphOfAnImportedDocument(t *testing.T) {
	t.Parallel()
	d, err := audit.ParseDefinitions(cookbook(t))
	require.NoError(t, err)
	text := audit.Mermaid(d.Snapshot("/"))
	assert.Contains(t, text, `w_my_work_queue -->|"fails"| x_`)
	assert.Equal(t, 2, strings.Count(text, "time is up"))
}

// Names can have anything in them: the ids stay distinct, and no text ends what it
// is in.
func TestGraphOfHostileNames(t *testing.T) {
	t.Parallel()
	var s check.Snapshot
	for _, name := range []string{"a.b", "a-b", "a b", "end", "\"];", "#35;<b>", strings.Repeat("x", 255), strings.Repeat("x", 254) + "y", "ü", "\x01"} {
		s.Queues = append(s.Queues, declare.QueueInfo{Name: name, Type: "quorum", Durable: true})
		s.Bindings = append(s.Bindings, declare.Binding{Source: name, Queue: name, Key: name, Headers: map[string]any{name: name}})
	}
	text := audit.Mermaid(s)
	ids := map[string]bool{}
	for line := range strings.Lines(text) {
		if id, _, ok := strings.Cut(strings.TrimSpace(line), "[("); ok {
			assert.False(t, ids[id], id)
			assert.Regexp(t, `^q_[A-Za-z0-9_]*$`, id)
			ids[id] = true
		}
	}
	assert.Len(t, ids, 10)
	assert.NotContains(t, text, `"];`)
	assert.NotContains(t, text, "<b>")
	bare := regexp.MustCompile(`"(\\.|[^"\\])*"`).ReplaceAllString(audit.DOT(s), "T")
	assert.NotContains(t, bare, `"`)
	assert.Equal(t, strings.Count(bare, "{"), strings.Count(bare, "}"), bare)
	assert.Regexp(t, `^[A-Za-z0-9_{}\[\];=,> \n-]*$`, bare)
}

// Thousands of queues are checked and drawn in a moment: nothing looks at every
// binding for every queue.
func TestManyQueues(t *testing.T) {
	t.Parallel()
	const queues = 3000
	topology := cycle()
	for i := range queues {
		name := fmt.Sprintf("queue-%d", i)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.DeadLetterTarget{Exchange: "dlx", RoutingKey: name}})
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "dlx", Queue: "orders.dead", Key: name}, declare.Binding{Source: "requeue", Queue: name, Key: "*.*." + name})
	}
	began := time.Now()
	assert.Empty(t, check.Verify(check.FromTopology(topology), topology).Findings)
	assert.Equal(t, queues, strings.Count(audit.Mermaid(check.FromTopology(topology)), "worker of queue-"))
	assert.Less(t, time.Since(began), 3*time.Minute) // of a busy machine
}
