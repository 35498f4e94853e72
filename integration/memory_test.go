package integration

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
)

// What doesn't run in memory exists, has a reason, and is the smaller part.
func TestTheListOfWhatIsNotRunInMemoryIsTrue(t *testing.T) {
	all := map[string]bool{}
	exempted, err := suite.Exempt("memory.txt")
	require.NoError(t, err)
	files, err := filepath.Glob("*/*_test.go")
	require.NoError(t, err)
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(f.Name.Name, "Test") {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok {
					if s, ok := call.Fun.(*ast.SelectorExpr); ok && strings.HasPrefix(s.Sel.Name, "ForEach") {
						all[f.Name.Name] = all[f.Name.Name] || s.Sel.Name == "ForEachBroker"
					}
				}
				return true
			})
		}
	}
	require.NotEmpty(t, all)
	cases, not := 2*len(all), 0
	for name, every := range all {
		if !every {
			not += 2 // they reconfigure a real broker
		}
		_ = name
	}
	for name, reason := range exempted {
		test, version, one := strings.Cut(name, "/")
		assert.Contains(t, all, test, "there is no such test with brokers")
		assert.Greater(t, len(reason), 10, "%s: the reason", name)
		if one {
			assert.Contains(t, []string{"4.3", "4.0"}, version)
			not++
		} else {
			not += 2
		}
	}
	share := fmt.Sprintf("%d of %d cases with brokers run in memory, too, which is %d %%", cases-not, cases, (cases-not)*100/cases)
	t.Logf("REPORT %s", share)
	assert.GreaterOrEqual(t, (cases-not)*100, 80*cases, share)
}
