// Package surface counts what the packages of hopback export.
package surface

import (
	"fmt"
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

// maxNames and maxMethods are how many names the packages that users import may export, and
// how many methods the types among them may have. Both only ever fall. A new name needs the
// removal of an old one, or a reason in the commit that raises the limit.
const (
	maxNames   = 645
	maxMethods = 312
)

// count is what one package exports.
type count struct{ names, methods int }

func TestExportedNamesAreFew(t *testing.T) {
	counts := map[string]count{}
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && (slices.Contains(private, d.Name()) || strings.HasPrefix(d.Name(), ".")) {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil || f.Name.Name == "main" {
			return err
		}
		in, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		c := exported(f)
		counts[in] = count{counts[in].names + c.names, counts[in].methods + c.methods}
		return nil
	}))
	var all count
	var table strings.Builder
	for _, in := range slices.Sorted(maps.Keys(counts)) {
		all.names += counts[in].names
		all.methods += counts[in].methods
		fmt.Fprintf(&table, "\n%4d names %4d methods  %s", counts[in].names, counts[in].methods, in)
	}
	require.Greater(t, len(counts), 20, "packages were found")
	t.Logf("%d names, %d methods:%s", all.names, all.methods, table.String())
	assert.LessOrEqual(t, all.names, maxNames, "exported names")
	assert.LessOrEqual(t, all.methods, maxMethods, "exported methods")
}

// private are folders whose packages no user imports.
var private = []string{"internal", "testdata", "examples", "integration", "docs"}

// exported counts a file's exported constants, variables, functions and types, and the methods
// that exported types have. Methods of interfaces and fields don't count.
func exported(f *ast.File) (c count) {
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			switch {
			case !d.Name.IsExported():
			case d.Recv == nil:
				c.names++
			case ast.IsExported(receiver(d.Recv.List[0].Type)):
				c.methods++
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					if s.Name.IsExported() {
						c.names++
					}
				case *ast.ValueSpec:
					for _, n := range s.Names {
						if n.IsExported() {
							c.names++
						}
					}
				}
			}
		}
	}
	return c
}

// receiver is the name of a method's type.
func receiver(of ast.Expr) string {
	switch of := of.(type) {
	case *ast.StarExpr:
		return receiver(of.X)
	case *ast.IndexExpr:
		return receiver(of.X)
	case *ast.IndexListExpr:
		return receiver(of.X)
	case *ast.Ident:
		return of.Name
	}
	return ""
}
