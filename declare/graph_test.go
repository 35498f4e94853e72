package declare_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
)

func TestMermaidShowsTheRetryCycle(t *testing.T) {
	t.Parallel()
	assert.Equal(t, `flowchart LR
    subgraph work["work"]
        q6[("orders<br/>delivery limit 5")]
    end
    subgraph retry["retry"]
        x3{{"requeue<br/>topic"}}
        x4{{"retry<br/>topic"}}
        q5[("delay_10s<br/>holds for 10s")]
    end
    subgraph given_up["given up"]
        x1{{"dlx<br/>direct"}}
        x2{{"parking<br/>fanout"}}
        q7[("orders.dead")]
        q8[("parking")]
    end
    x1 -->|"orders"| q7
    x2 --> q8
    x3 -->|"*.*.orders"| q6
    x4 -->|"delay.10000.#35;"| q5
    q5 -.->|"time is up"| x3
    q6 -.->|"dead letters"| x1
    x1 -.->|"no binding"| x2
    x3 -.->|"no binding"| x2
    q6 -->|"worker retries"| x4
`, declare.Mermaid(cycle().Snapshot()))
}

func TestDOTIsWellFormed(t *testing.T) {
	t.Parallel()
	topology := cycle()
	topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "a\"b\\c", AlternateExchange: "gone"})
	text := declare.DOT(topology.Snapshot())
	assert.True(t, strings.HasPrefix(text, "digraph topology {\n"))
	assert.Contains(t, text, `label="a\"b\\c\ndirect"`)
	assert.Contains(t, text, `label="gone\nmissing!"`)
	assert.Contains(t, text, `[style=solid, label="worker retries"]`)
	assert.Equal(t, strings.Count(text, "{"), strings.Count(text, "}"))
	assert.Equal(t, text, declare.DOT(topology.Snapshot()))
}

func TestGraphOfAnImportedDocument(t *testing.T) {
	t.Parallel()
	d, err := declare.ParseDefinitions(cookbook(t))
	require.NoError(t, err)
	text := declare.Mermaid(d.Snapshot("/"))
	assert.Contains(t, text, "worker retries")
	assert.Equal(t, 2, strings.Count(text, "time is up"))
}
