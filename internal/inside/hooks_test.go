package inside

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/hopback/hopback/"

// The compiler sees which package uses which: no package sets a variable of another, and no
// init sets a function variable.
func TestNoPackageSetsHooksInAnother(t *testing.T) {
	t.Parallel()
	inits := 0
	forEachPackage(t, func(dir string, fset *token.FileSet, files []*ast.File) {
		functions := functionVariables(files)
		for _, f := range files {
			imported := importsOf(f)
			for _, d := range f.Decls {
				in, _ := d.(*ast.FuncDecl)
				isInit := in != nil && in.Recv == nil && in.Name.Name == "init"
				if isInit {
					inits++
				}
				ast.Inspect(d, func(n ast.Node) bool {
					a, ok := n.(*ast.AssignStmt)
					if !ok {
						return true
					}
					for _, to := range a.Lhs {
						switch to := to.(type) {
						case *ast.SelectorExpr:
							of, ok := to.X.(*ast.Ident)
							assert.False(t, ok && imported[of.Name], "%s sets %s of another package", fset.Position(a.Pos()), to.Sel.Name)
						case *ast.Ident:
							assert.False(t, isInit && functions[to.Name], "%s sets the function variable %s in an init", fset.Position(a.Pos()), to.Name)
						}
					}
					return true
				})
			}
		}
	})
	assert.Positive(t, inits)
}

// values are the exported functions for which any is an AMQP value, an argument of a queue, or that of a panic, not a
// type of hopback.
var values = map[string]bool{
	"internal/frames.Get": true, "internal/frames.Set": true, "internal/frames.ReadValue": true, "internal/frames.ReadValues": true, "internal/frames.AppendValue": true,
	"internal/frames.Value": true, "internal/userid.Value": true,
	"internal/outcome.Catch": true, "internal/message.ID": true, "internal/message.BoxedKey": true,
	"internal/rules.SettingOf": true, "internal/rules.JSONValue": true, "internal/rules.Get": true, "internal/rules.DecodeJSON": true, // what encoding/json parses into
	"internal/queuearg.Argument": true, "internal/queuearg.Wrong": true, "internal/queuearg.TypeName": true, "internal/values.JSON": true, "internal/values.Describe": true,
}

// The compiler sees what packages hand each other, too.
func TestInternalFunctionsNameTheirTypes(t *testing.T) {
	t.Parallel()
	seen := 0
	forEachPackage(t, func(dir string, fset *token.FileSet, files []*ast.File) {
		if !strings.HasPrefix(dir, "internal/") {
			return
		}
		check := func(name string, n ast.Node) {
			ast.Inspect(n, func(n ast.Node) bool {
				f, ok := n.(*ast.FuncType)
				if !ok {
					_, body := n.(*ast.BlockStmt)
					return !body
				}
				seen++
				fields := f.Params.List
				if f.Results != nil {
					fields = append(fields[:len(fields):len(fields)], f.Results.List...)
				}
				for _, field := range fields {
					of, _ := field.Type.(*ast.Ident)
					assert.False(t, of != nil && of.Name == "any" && !values[dir+"."+name], "%s: %s takes or returns any", fset.Position(field.Pos()), name)
				}
				return true
			})
		}
		for _, f := range files {
			for _, d := range f.Decls {
				switch d := d.(type) {
				case *ast.FuncDecl:
					if d.Name.IsExported() {
						check(d.Name.Name, d)
					}
				case *ast.GenDecl:
					for _, s := range d.Specs {
						switch s := s.(type) {
						case *ast.TypeSpec:
							if s.Name.IsExported() {
								check(s.Name.Name, s.Type)
							}
						case *ast.ValueSpec:
							if s.Names[0].IsExported() {
								check(s.Names[0].Name, s)
							}
						}
					}
				}
			}
		}
	})
	assert.Greater(t, seen, 100)
}

// forEachPackage calls do with the sources of each package, without tests.
func forEachPackage(t *testing.T, do func(dir string, fset *token.FileSet, files []*ast.File)) {
	const root = "../.."
	fset := token.NewFileSet()
	packages := map[string][]*ast.File{}
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if strings.HasPrefix(d.Name(), ".") && path != root {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		dir = filepath.ToSlash(dir)
		packages[dir] = append(packages[dir], f)
		return err
	}))
	for dir, files := range packages {
		do(dir, fset, files)
	}
}

// functionVariables are the names of a package's variables that are functions.
func functionVariables(files []*ast.File) map[string]bool {
	names := map[string]bool{}
	for _, f := range files {
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.VAR {
				continue
			}
			for _, s := range g.Specs {
				s := s.(*ast.ValueSpec)
				_, is := s.Type.(*ast.FuncType)
				for i, name := range s.Names {
					literal := false
					if i < len(s.Values) {
						_, literal = s.Values[i].(*ast.FuncLit)
					}
					if is || literal {
						names[name.Name] = true
					}
				}
			}
		}
	}
	return names
}

// importsOf are the names by which a file knows other packages of this module.
func importsOf(f *ast.File) map[string]bool {
	names := map[string]bool{}
	for _, i := range f.Imports {
		path, _ := strconv.Unquote(i.Path.Value)
		switch {
		case !strings.HasPrefix(path, module):
		case i.Name != nil:
			names[i.Name.Name] = true
		default:
			names[path[strings.LastIndex(path, "/")+1:]] = true
		}
	}
	return names
}
