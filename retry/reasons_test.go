package retry_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// A program that imports this package alone has all reasons.
func TestEveryReasonIsHere(t *testing.T) {
	t.Parallel()
	all := map[string]client.Reason{
		"Exhausted": retry.ReasonExhausted, "Permanent": retry.ReasonPermanent, "Rejected": retry.ReasonRejected, "Panicked": retry.ReasonPanicked,
		"Undecodable": retry.ReasonUndecodable, "TooLarge": retry.ReasonTooLarge, "Unforwardable": retry.ReasonUnforwardable, "Unparkable": retry.ReasonUnparkable,
		"DeliveryLimit": retry.ReasonDeliveryLimit, "Expired": retry.ReasonExpired, "MaxLength": retry.ReasonMaxLength, "NoDelayQueue": retry.ReasonNoDelayQueue,
		"Unroutable": retry.ReasonUnroutable, "UnknownQueue": retry.ReasonUnknownQueue, "UnknownType": retry.ReasonUnknownType, "Unsendable": retry.ReasonUnsendable,
		"Undeliverable": retry.ReasonUndeliverable, "FailureLimit": retry.ReasonFailureLimit,
	}
	source, err := os.ReadFile("reasons.go")
	require.NoError(t, err)
	table := map[string]client.Reason{}
	for _, row := range regexp.MustCompile(`(?m)^//\tReason(\w+) +([\w-]+)  `).FindAllStringSubmatch(string(source), -1) {
		table[row[1]] = client.Reason(row[2])
	}
	assert.Equal(t, all, table, "the table in the package's documentation")

	elsewhere := map[string]bool{
		"Replayed":  true, // no dead letter
		"Discarded": true, // of a call, in package rpc
	}
	for _, pattern := range []string{"../*/*.go", "../*/*/*.go", "../*.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "../examples") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			for _, d := range f.Decls {
				g, ok := d.(*ast.GenDecl)
				if !ok || g.Tok != token.CONST {
					continue
				}
				for _, s := range g.Specs {
					for _, name := range s.(*ast.ValueSpec).Names {
						if reason, ok := strings.CutPrefix(name.Name, "Reason"); ok && reason != "" && !elsewhere[reason] {
							assert.Contains(t, all, reason, "%s has a reason that package retry lacks", file)
						}
					}
				}
			}
		}
	}
}
