package main_test

import (
	"bytes"
	"context"
	"go/ast"
	"go/doc"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	quickstart "github.com/hopback/hopback/examples/quickstart"
)

// The program in the README is the Example of this folder, as godoc shows it: as
// a program of its own.
func TestReadmeShowsTheExample(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(readme), "```go\n")
	require.True(t, found, "README.md has no block of Go")
	block, _, found := strings.Cut(rest, "```\n")
	require.True(t, found)

	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "example_test.go", nil, parser.ParseComments)
	require.NoError(t, err)
	examples := doc.Examples([]*ast.File{file}...)
	require.Len(t, examples, 1)
	require.NotNil(t, examples[0].Play)
	var program bytes.Buffer
	require.NoError(t, format.Node(&program, files, examples[0].Play))
	assert.Equal(t, program.String(), block, "README.md and example_test.go have drifted apart")
}

// The same program does what its comments say, and declares what the README says.
func TestReadmeProgram(t *testing.T) {
	t.Parallel()
	quickstart.OnBrokers(t, func(t *testing.T, url string, queues func() []string) {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var outcomes []error // of the one order that there is, so one handler at a time
		require.NoError(t, work(ctx, url, func(ctx context.Context, o Order) error {
			err := charge(ctx, o)
			if outcomes = append(outcomes, err); len(outcomes) == 2 {
				stop()
			}
			return err
		}))
		require.Len(t, outcomes, 2)
		require.EqualError(t, outcomes[0], "the bank timed out")
		require.NoError(t, outcomes[1])
		assert.ElementsMatch(t, []string{"orders", "orders.dead", "delay_1s", "delay_10s", "delay_60s", "parking_queue"}, queues())
	})
}
