package interop

import (
	"bufio"
	"bytes"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/internal/frames"
)

// What tests with qpid-proton share: it is an independent implementation of AMQP 1.0 in C, whose
// Python binding keeps every type apart. A script runs in a separate process, and what it is to
// do and what it has seen are lines of JSON. Values are in the notation of proton_values.py.

//go:embed proton_values.py
var protonValues string

//go:embed proton_client.py
var protonClient string

// proton is a process with a script.
type proton struct {
	in     io.WriteCloser
	out    *bufio.Reader
	stderr *bytes.Buffer
	cmd    *exec.Cmd
}

// startProton runs a script until the test ends. The test is skipped where proton can't be had.
func startProton(t *testing.T, script string, args ...string) *proton {
	t.Helper()
	python, err := service.Python(t.Context(), os.Stderr, "proton", "python3-qpid-proton")
	if err != nil {
		t.Skip("qpid-proton: ", err)
	}
	p := &proton{cmd: exec.Command(python, append([]string{"-c", protonValues + script}, args...)...), stderr: &bytes.Buffer{}}
	p.cmd.Stderr = p.stderr
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.out = bufio.NewReader(out)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.in.Close() // the script ends with its input
		killer := time.AfterFunc(5*time.Second, func() { _ = p.cmd.Process.Kill() })
		defer killer.Stop()
		_ = p.cmd.Wait()
		if t.Failed() && p.stderr.Len() > 0 {
			t.Logf("the script: %s", p.stderr)
		}
	})
	return p
}

// protonOf is a client of the site's broker.
func (s *site) protonOf(t *testing.T) *proton {
	t.Helper()
	password, _ := s.url.User.Password()
	return startProton(t, protonClient, s.url.Host, s.url.Path[1:], s.url.User.Username(), password, strconv.Itoa(int(patience.Seconds())))
}

// order is a command of the scripts, by the names of its fields.
type order map[string]any

// do gives a command and waits for its answer.
func (p *proton) do(t *testing.T, command order, answer any) {
	t.Helper()
	b, err := json.Marshal(command)
	require.NoError(t, err)
	_, err = p.in.Write(append(b, '\n'))
	require.NoError(t, err)
	p.next(t, answer)
}

// next waits for a line of the script.
func (p *proton) next(t *testing.T, answer any) {
	t.Helper()
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		_ = p.in.Close()
		_ = p.cmd.Wait()
		require.FailNow(t, "the script has ended", "%s", p.stderr)
	}
	if answer != nil {
		require.NoError(t, json.Unmarshal(line, answer), "%s", line)
	}
}

// note is a value in the notation of the scripts.
type note []any

// noted is v in the form that JSON gives it, so that notes can be compared.
func noted(v any) note {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	var n note
	if err := json.Unmarshal(b, &n); err != nil {
		panic(err)
	}
	return n
}

func digits[T int8 | int16 | int32 | int64 | int](kind string, v T) note {
	return note{kind, strconv.FormatInt(int64(v), 10)}
}

func unsigned[T uint8 | uint16 | uint32 | uint64](kind string, v T) note {
	return note{kind, strconv.FormatUint(uint64(v), 10)}
}

// noteOf is the notation of a value, which has the types of package frames or those of
// hopback's messages.
func noteOf(v any) note {
	switch v := v.(type) {
	case nil, amqp.Null:
		return note{"null"}
	case bool:
		return note{"boolean", v}
	case uint8:
		return unsigned("ubyte", v)
	case uint16:
		return unsigned("ushort", v)
	case uint32:
		return unsigned("uint", v)
	case uint64:
		return unsigned("ulong", v)
	case int8:
		return digits("byte", v)
	case int16:
		return digits("short", v)
	case int32:
		return digits("int", v)
	case int64:
		return digits("long", v)
	case int:
		return digits("long", v)
	case float32:
		return note{"float", fmt.Sprintf("%08x", math.Float32bits(v))}
	case float64:
		return note{"double", fmt.Sprintf("%016x", math.Float64bits(v))}
	case frames.Decimal32:
		return note{"decimal32", hex.EncodeToString(v[:])}
	case frames.Decimal64:
		return note{"decimal64", hex.EncodeToString(v[:])}
	case frames.Decimal128:
		return note{"decimal128", hex.EncodeToString(v[:])}
	case frames.Char:
		return note{"char", strconv.FormatUint(uint64(v), 16)}
	case frames.Timestamp:
		return digits("timestamp", int64(v))
	case time.Time:
		return digits("timestamp", v.UnixMilli())
	case frames.UUID:
		return note{"uuid", hex.EncodeToString(v[:])}
	case amqp.UUID:
		return note{"uuid", hex.EncodeToString(v[:])}
	case []byte:
		return note{"binary", hex.EncodeToString(v)}
	case string:
		return note{"string", v}
	case frames.Symbol:
		return note{"symbol", string(v)}
	case amqp.Symbol:
		return note{"symbol", string(v)}
	case frames.Described:
		return note{"described", noteOf(v.Descriptor), noteOf(v.Value)}
	}
	return noteOfMany(v)
}

func noteOfMany(v any) note {
	switch v := v.(type) {
	case frames.List:
		return note{"list", notesOf(v)}
	case []any:
		return note{"list", notesOf(v)}
	case frames.Array:
		n := note{"array", arrayTypes[v.Type], notesOf(v.Elements)}
		if v.Descriptor != nil {
			n = append(n, noteOf(v.Descriptor))
		}
		return n
	case []bool:
		return arrayOf("bool", v)
	case []int8:
		return arrayOf("byte", v)
	case []int16:
		return arrayOf("short", v)
	case []int32:
		return arrayOf("int", v)
	case []int64:
		return arrayOf("long", v)
	case []uint16:
		return arrayOf("ushort", v)
	case []uint32:
		return arrayOf("uint", v)
	case []uint64:
		return arrayOf("ulong", v)
	case []float32:
		return arrayOf("float", v)
	case []float64:
		return arrayOf("double", v)
	case []string:
		return arrayOf("string", v)
	case []amqp.Symbol:
		return arrayOf("symbol", v)
	case []time.Time:
		return arrayOf("timestamp", v)
	case []amqp.UUID:
		return arrayOf("uuid", v)
	case [][]byte:
		return arrayOf("binary", v)
	case frames.Map:
		pairs := [][2]note{}
		for _, e := range v {
			pairs = append(pairs, [2]note{noteOf(e.Key), noteOf(e.Value)})
		}
		return mapping(pairs)
	case map[string]any:
		return mapOf(v, func(k string) note { return noteOf(k) })
	case map[any]any:
		return mapOf(v, noteOf)
	case amqp.Annotations:
		return mapOf(v, noteOf)
	}
	panic(fmt.Sprintf("%T has no notation", v))
}

// arrayTypes are proton's names for the types of arrays, by their constructors.
var arrayTypes = map[byte]string{
	0x40: "null", 0x56: "bool", 0x50: "ubyte", 0x51: "byte", 0x60: "ushort", 0x61: "short", 0x70: "uint", 0x71: "int", 0x73: "char",
	0x80: "ulong", 0x81: "long", 0x83: "timestamp", 0x72: "float", 0x82: "double", 0x74: "decimal32", 0x84: "decimal64",
	0x94: "decimal128", 0x98: "uuid", 0xb0: "binary", 0xb1: "string", 0xb3: "symbol", 0xd0: "list", 0xd1: "map", 0xf0: "array",
}

func notesOf(all []any) []note {
	notes := make([]note, len(all))
	for i, e := range all {
		notes[i] = noteOf(e)
	}
	return notes
}

func arrayOf[T any](kind string, all []T) note {
	notes := make([]note, len(all))
	for i, e := range all {
		notes[i] = noteOf(e)
	}
	return note{"array", kind, notes}
}

func mapOf[K comparable](m map[K]any, key func(K) note) note {
	pairs := make([][2]note, 0, len(m))
	for k, v := range m {
		pairs = append(pairs, [2]note{key(k), noteOf(v)})
	}
	return mapping(pairs)
}

// mapping is the note of a map, in the order of its keys' notes.
func mapping(pairs [][2]note) note {
	slices.SortFunc(pairs, func(a, b [2]note) int { return strings.Compare(fmt.Sprint(a[0]), fmt.Sprint(b[0])) })
	return note{"map", pairs}
}

// section is one of a message's, by its code.
type section struct {
	code  int
	value any
}

func (s section) MarshalJSON() ([]byte, error) { return json.Marshal([]any{s.code, noteOf(s.value)}) }

// sortPairs brings the pairs of a map's note into an order.
func sortPairs(pairs []any) {
	slices.SortFunc(pairs, func(a, b any) int {
		return strings.Compare(fmt.Sprint(a.([]any)[0]), fmt.Sprint(b.([]any)[0]))
	})
}
