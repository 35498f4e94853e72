package doctor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/doctor"
)

// shapes are large definitions. For each there is a way to analyze it that takes forever. n is their
// size.
var shapes = map[string]func(n int) object{
	"plain queues": func(n int) object {
		return object{"queues": repeated(n, func(i int) object { return defined(i, object{}) })}
	},
	"one dead-letter exchange for queues without keys": func(n int) object {
		return object{
			"queues":    append(repeated(n, func(i int) object { return defined(i, object{"x-dead-letter-exchange": "dlx"}) }), repeated(n, func(i int) object { return named("dead", i, object{"x-delivery-limit": 5}) })...),
			"exchanges": []object{definedX("dlx", 0, "direct", object{})},
			"bindings":  repeated(n, func(i int) object { return bound("dlx0", fmt.Sprint("dead", i), "queue", fmt.Sprint("q", i)) }),
		}
	},
	"one topic exchange for queues with keys": func(n int) object {
		return object{
			"queues": repeated(n, func(i int) object {
				return defined(i, object{"x-dead-letter-exchange": "dlx0", "x-dead-letter-routing-key": fmt.Sprint("q.", i)})
			}),
			"exchanges": []object{definedX("dlx", 0, "topic", object{})},
			"bindings":  repeated(n, func(i int) object { return bound("dlx0", fmt.Sprint("q", i), "queue", fmt.Sprintf("*.%d", i)) }),
		}
	},
	"a cycle of delay queues": func(n int) object {
		return object{"queues": repeated(n, func(i int) object {
			return defined(i, object{"x-message-ttl": 1000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": fmt.Sprint("q", (i+1)%n)})
		})}
	},
	"queues that dead-letter to each other": func(n int) object {
		return object{
			"queues":    repeated(n, func(i int) object { return defined(i, object{"x-dead-letter-exchange": "dlx0", "x-delivery-limit": 5}) }),
			"exchanges": []object{definedX("dlx", 0, "fanout", object{})},
			"bindings":  repeated(n, func(i int) object { return bound("dlx0", fmt.Sprint("q", i), "queue", "") }),
		}
	},
	"a mesh of fanout exchanges":       mesh("fanout", ""),
	"a mesh of topic exchanges":        mesh("topic", "#"),
	"a mesh of direct exchanges":       mesh("direct", "k"),
	"a mesh of headers exchanges":      mesh("headers", ""),
	"a mesh of modulus-hash exchanges": mesh("x-modulus-hash", ""),
	"a chain of alternate exchanges": func(n int) object {
		return object{
			"exchanges": repeated(n, func(i int) object {
				return definedX("x", i, "direct", object{"alternate-exchange": fmt.Sprint("x", i+1)})
			}),
			"queues": repeated(n, func(i int) object { return defined(i, object{"x-dead-letter-exchange": fmt.Sprint("x", i)}) }),
		}
	},
	"many policies": func(n int) object {
		return object{
			"queues": repeated(n, func(i int) object { return defined(i, object{}) }),
			"policies": repeated(n/25, func(i int) object {
				return object{"vhost": "/", "name": fmt.Sprint("p", i), "pattern": fmt.Sprintf("^(?!amq\\.)q%d", i), "apply-to": "all", "priority": i % 7, "definition": object{"max-length": i + 1}}
			}),
		}
	},
	"many findings about delays": func(n int) object {
		return object{
			"queues": repeated(n, func(i int) object {
				return defined(i, object{"x-message-ttl": 1000, "x-dead-letter-exchange": "amq.fanout"})
			}),
			"exchanges": []object{definedX("retry", 0, "topic", object{})},
			"bindings":  repeated(n, func(i int) object { return bound("retry0", fmt.Sprint("q", i), "queue", "delay.2000.#") }),
			"policies":  []object{{"vhost": "/", "name": "p", "pattern": ".", "apply-to": "all", "priority": 0, "definition": object{"message-ttl": 500}}},
		}
	},
}

// mesh is exchanges that are bound to each other, and to which queues dead-letter with many keys.
func mesh(kind, key string) func(n int) object {
	return func(n int) object {
		var bindings []object
		for i := range n {
			for j := range n {
				bindings = append(bindings, bound(fmt.Sprint("x", i), fmt.Sprint("x", j), "exchange", key))
			}
			bindings = append(bindings, bound(fmt.Sprint("x", i), fmt.Sprint("q", i), "queue", key))
		}
		return object{
			"exchanges": repeated(n, func(i int) object { return definedX("x", i, kind, object{}) }),
			"bindings":  bindings,
			"queues": repeated(n, func(i int) object {
				return defined(i, object{"x-dead-letter-exchange": fmt.Sprint("x", i), "x-dead-letter-routing-key": fmt.Sprint("key.", i)})
			}),
		}
	}
}

func repeated(n int, one func(i int) object) []object {
	list := make([]object, n)
	for i := range list {
		list[i] = one(i)
	}
	return list
}

func defined(i int, a object) object { return named("q", i, a) }

func named(prefix string, i int, a object) object {
	a["x-queue-type"] = "quorum"
	return object{"vhost": "/", "name": fmt.Sprint(prefix, i), "durable": true, "auto_delete": false, "arguments": a}
}

func definedX(prefix string, i int, kind string, a object) object {
	return object{"vhost": "/", "name": fmt.Sprint(prefix, i), "type": kind, "durable": true, "auto_delete": false, "internal": false, "arguments": a}
}

func bound(source, to, kind, key string) object {
	return object{"vhost": "/", "source": source, "destination": to, "destination_type": kind, "routing_key": key, "arguments": object{}}
}

func shaped(t testing.TB, name string, n int) string {
	t.Helper()
	d := shapes[name](n)
	d["rabbitmq_version"] = "4.3.6"
	text, err := json.Marshal(d)
	require.NoError(t, err)
	return string(text)
}

// size is the size of a shape: a mesh has its square of bindings.
func size(name string, n, mesh int) int {
	if strings.HasPrefix(name, "a mesh") {
		return mesh
	}
	return n
}

// The analysis takes time in proportion to the definitions, and not to a product of queues,
// exchanges, bindings, and policies.
func TestLargeDefinitionsTakeLittleTime(t *testing.T) {
	notUnderRace(t)
	for name := range shapes {
		text := shaped(t, name, size(name, 4_000, 100))
		began := cpuSeconds()
		_, err := doctor.FromDefinitions(t.Context(), strings.NewReader(text), doctor.Options{})
		require.NoError(t, err)
		took := cpuSeconds() - began
		t.Logf("%-50s %.2f s of CPU", name, took)
		assert.Less(t, took, 30.0, "%s: seconds of CPU: a bound for what grows faster than the definitions, not a measurement", name)
	}
}

// countdown is a ctx that ends when it was asked often enough.
type countdown struct {
	context.Context
	left, after atomic.Int64
}

func (c *countdown) Err() error {
	if c.left.Add(-1) >= 0 {
		return nil
	}
	c.after.Add(1)
	return context.DeadlineExceeded
}

// The time limit holds for the analysis, wherever it is.
func TestTheAnalysisEndsWithItsTime(t *testing.T) {
	notUnderRace(t)
	t.Parallel()
	for name := range shapes {
		text := shaped(t, name, size(name, 300, 20))
		late := 0
		for _, calls := range []int64{0, 1, 10, 100, 1_000, 5_000, 10_000} {
			ctx := &countdown{Context: t.Context()}
			ctx.left.Store(calls)
			_, err := doctor.FromDefinitions(ctx, strings.NewReader(text), doctor.Options{})
			if ctx.after.Load() == 0 {
				require.NoError(t, err)
				continue // it was ready before
			}
			late++
			require.Error(t, err, "%s after %d", name, calls)
			assert.Less(t, ctx.after.Load(), int64(1_000), "%s after %d: it continues", name, calls)
		}
		assert.Greater(t, late, 3, name)
	}
}
