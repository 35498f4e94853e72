package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/hopbacktest"
)

// YAML has the values of JSON: no text becomes a number, a boolean, or a time.
func TestYAMLHasTheValuesOfJSON(t *testing.T) {
	t.Parallel()
	texts := []string{"", "true", "no", "null", "~", "1", "0x10", "1e3", "2026-01-02", "2026-01-02T03:04:05Z", "- a", "a: b", "#", "'", "\"", "\x7f", "\u2028", "a\nb\n", "\u00e9\U0001f600", " x ", "{", "*a", "&a", "!!int 1", "1:20", "|", "=", "<<"}
	value := map[string]any{"texts": texts, "true": nil, "1": 1, "float": 1.5, "big": uint64(1<<64 - 1), "bool": true, "empty": []int{}, "none": map[string]int{}, "exponent": 1e30}
	text, err := json.Marshal(value)
	require.NoError(t, err)
	converted, err := yamlOf(text)
	require.NoError(t, err)
	assert.Equal(t, fromJSON(t, text), fromYAML(t, converted), "%s", converted)
	assert.Contains(t, string(converted), "\n  - \"no\"\n", "YAML 1.1 reads it as false")

	ordered, err := yamlOf([]byte(`{"b": 1, "a": [{"c": "x"}]}`))
	require.NoError(t, err)
	assert.Equal(t, "b: 1\na:\n  - c: x\n", string(ordered))
}

func fromJSON(t *testing.T, text []byte) any {
	t.Helper()
	var v any
	require.NoError(t, json.Unmarshal(text, &v), "%s", text)
	return v
}

// fromYAML is the value with the types that JSON has.
func fromYAML(t *testing.T, text []byte) any {
	t.Helper()
	var v any
	require.NoError(t, yaml.Unmarshal(text, &v), "%s", text)
	again, err := json.Marshal(v)
	require.NoError(t, err)
	return fromJSON(t, again)
}

// Every command has --output, except those that print a document or a log, and what cobra defines.
func TestEveryCommandWithAResultHasOutput(t *testing.T) {
	t.Parallel()
	without := map[string]string{
		"topology export": "a document", "topology import": "a document", "topology graph": "a document", "topology schema": "a document",
		"retry run": "a log", "schedule serve": "a log", "outbox relay": "a log", "connection": "a text", "help": "a text",
	}
	root := (&command{io: IO{Env: func(string) string { return "" }}}).root()
	root.InitDefaultHelpCmd()
	var visit func(*cobra.Command)
	seen := 0
	visit = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
		name := strings.TrimPrefix(cmd.CommandPath(), "hopback ")
		if cmd.HasSubCommands() {
			return
		}
		seen++
		flag := cmd.Flags().Lookup("output")
		assert.Equal(t, without[name] == "", flag != nil, name)
		if flag != nil {
			assert.Equal(t, "o", flag.Shorthand)
			assert.Equal(t, formatText, flag.DefValue)
		}
	}
	visit(root)
	assert.Greater(t, seen, 25)
}

// JSON and YAML have the same content, with names in snake case.
func TestOutputInJSONAndYAML(t *testing.T) {
	t.Parallel()
	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	run := func(format string, args ...string) (int, []byte, string) {
		var stdout, stderr bytes.Buffer
		env := map[string]string{"HOPBACK_URL": url, "HOPBACK_MANAGEMENT_URL": "none"}
		code := Run(context.Background(), IO{
			Args: append(args, "-o", format), Env: func(k string) string { return env[k] }, Stdout: &stdout, Stderr: &stderr,
			Stdin: strings.NewReader("work-queues: {orders: }\n"),
		})
		return code, stdout.Bytes(), stderr.String()
	}
	code, _, stderr := run("json", "topology", "apply", "-")
	require.Zero(t, code, stderr)
	snake := regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	for _, args := range [][]string{
		{"topology", "plan", "-"}, {"topology", "verify", "-"}, {"topology", "verify", "--rules"}, {"topology", "delete", "-", "--dry-run", "--force"},
		{"dlq", "survey", "orders.dead"}, {"dlq", "list", "orders.dead"}, {"dlq", "list", "nosuch"}, {"doctor", "--rules"}, {"doctor", "--explain", "dead-letter"},
		{"publish", "orders", "--body", "1"}, {"version"}, {"partition", "show", "nosuch"},
	} {
		codeJSON, inJSON, stderr := run("json", args...)
		codeYAML, inYAML, _ := run("yaml", args...)
		assert.Equal(t, codeJSON, codeYAML, "%v: %s", args, stderr)
		assert.False(t, bytes.HasPrefix(inYAML, []byte("{")), args)
		value := fromJSON(t, inJSON)
		assert.Equal(t, value, fromYAML(t, inYAML), args)
		for _, name := range namesIn(value) {
			assert.Regexp(t, snake, name, args)
		}
	}
	code, stdout, stderr := run("xml", "version")
	assert.Equal(t, Usage, code)
	assert.Empty(t, stdout)
	assert.Contains(t, stderr, "use one of text, json, yaml")
}

// namesIn are the names of all members of a JSON value.
func namesIn(v any) (names []string) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			names = append(names, namesIn(e)...)
		}
	case map[string]any:
		for name, e := range v {
			names = slices.Concat(names, []string{name}, namesIn(e))
		}
	}
	return names
}
