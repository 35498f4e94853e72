package integration

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// maxFunction is how many lines a function has at most.
const maxFunction = 80

// No function of any module is longer than a reader can hold in mind. Tests and generated
// code are exempt.
func TestFunctionsAreShort(t *testing.T) {
	t.Parallel()
	functions := 0
	require.NoError(t, filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && (e.Name() == "testdata" || strings.HasPrefix(e.Name(), ".") && e.Name() != ".."):
			return fs.SkipDir
		case e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if ast.IsGenerated(file) {
			return nil
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
				functions++
				lines := files.Position(f.End()).Line - files.Position(f.Pos()).Line + 1
				assert.LessOrEqual(t, lines, maxFunction, "%s: %s has %d lines", path, f.Name.Name, lines)
			}
		}
		return nil
	}))
	assert.Greater(t, functions, 1000)
}
