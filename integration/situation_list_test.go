package integration

import (
	_ "embed"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The functions of hopback that publish messages or make copies of them, and the test that
// runs each in all situations, or the reason why none does.
//
//go:embed situations.txt
var inSituations string

// A function that publishes is run in every situation, or is listed with a reason.
func TestWhatPublishesRunsInEverySituation(t *testing.T) {
	t.Parallel()
	publishing := publishing(t)
	tests := callersOf(t, "ForEachSituation")
	listed := map[string]bool{}
	for line := range strings.Lines(inSituations) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, how, _ := strings.Cut(line, " ")
		assert.False(t, listed[name], "%s is listed twice", name)
		listed[name] = true
		assert.Contains(t, publishing, name, "situations.txt lists a function that doesn't publish")
		if reason, without := strings.CutPrefix(how, "- "); without {
			assert.Greater(t, len(reason), 20, "%s: the reason", name)
		} else {
			assert.True(t, tests[how], "%s: %q isn't a test that calls forEachSituation", name, how)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(publishing)) {
		assert.True(t, listed[name], "%s publishes messages (%s). Test it with suite.ForEachSituation and add it to situations.txt with the name of the test, or with \"-\" and a reason", name, publishing[name])
	}
}

// publishing finds the functions that publish or copy messages, and by what.
func publishing(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel("..", path)
		if d.IsDir() {
			switch rel {
			case ".git", "bin", "client", "docs", "examples", "integration", "postgres/internal/pgtest":
				// client has the means itself; the others aren't hopback.
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Body != nil {
				if by := publishesBy(f.Body); by != "" {
					found[filepath.ToSlash(filepath.Dir(rel))+"."+f.Name.Name] = by
				}
			}
		}
		return nil
	}))
	require.Greater(t, len(found), 10)
	return found
}

// publishesBy returns what a function publishes or copies messages with, or "".
func publishesBy(body *ast.BlockStmt) (by string) {
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if call, ok := n.X.(*ast.CallExpr); ok && n.Sel.Name == "Copy" {
				if f, ok := call.Fun.(*ast.Ident); ok && f.Name == "evidence" {
					by = "retry's Copy"
				}
			}
			of, ok := n.X.(*ast.Ident)
			if !ok {
				break
			}
			switch name := of.Name + "." + n.Sel.Name; name {
			case "client.Copy", "client.Forward", "client.NewPublisher":
				by = name
			}
		case *ast.CallExpr:
			// dedicated.Conn.Send.
			if s, ok := n.Fun.(*ast.SelectorExpr); ok && s.Sel.Name == "Send" && len(n.Args) == 4 {
				by = "dedicated"
			}
		case *ast.CaseClause:
			// A case of a type switch doesn't publish.
			for _, s := range n.Body {
				if inner := publishesBy(&ast.BlockStmt{List: []ast.Stmt{s}}); inner != "" {
					by = inner
				}
			}
			return false
		}
		return true
	})
	return by
}

// callersOf are the tests of the packages below that call a function of package suite.
func callersOf(t *testing.T, name string) map[string]bool {
	t.Helper()
	tests := map[string]bool{}
	files, err := filepath.Glob("*/*_test.go")
	require.NoError(t, err)
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(f.Name.Name, "Test") {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok {
					if s, ok := call.Fun.(*ast.SelectorExpr); ok && s.Sel.Name == name {
						tests[f.Name.Name] = true
					}
				}
				return true
			})
		}
	}
	return tests
}
