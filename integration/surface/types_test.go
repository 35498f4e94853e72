package surface

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/hopback/hopback"

// list is go list, in the workspace.
func list(t *testing.T, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...)
	cmd.Dir = filepath.Join("..", "..")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	return out
}

// load returns packages of ours. It reads what the compiler has written about each, so nothing is parsed again.
func load(t *testing.T, packages ...string) []*types.Package {
	t.Helper()
	out := list(t, append([]string{"-export", "-deps", "-json=ImportPath,Export,DepOnly,Name"}, packages...)...)
	exports := map[string]string{}
	var ours []string
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Export, Name string
			DepOnly                  bool
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		exports[p.ImportPath] = p.Export
		if !p.DepOnly && p.Name != "main" && p.Export != "" {
			ours = append(ours, p.ImportPath)
		}
	}
	imp := importer.ForCompiler(token.NewFileSet(), "gc", func(of string) (io.ReadCloser, error) { return os.Open(exports[of]) })
	var all []*types.Package
	for _, of := range ours {
		p, err := imp.Import(of)
		require.NoError(t, err, of)
		all = append(all, p)
	}
	return all
}

// isPrivate reports whether users can't import a package of ours.
func isPrivate(of string) bool {
	rest, ours := strings.CutPrefix(of, module)
	return ours && slices.ContainsFunc(strings.Split(rest, "/"), func(part string) bool { return slices.Contains(private, part) })
}

// exempt are what TestUsersCanNameEachType leaves out, by the last part of the package's path.
var exempt = map[string]string{
	"hopbacktest.Start": "takes a testing.TB, or what has the same few methods, so that package testing isn't imported",
	"postgres.SQL":      "takes a *sql.Tx, a *sql.Conn, or a *sql.DB",
}

// Users can name each type in the signatures and fields that they see: it is exported by a package that they can
// import, under its own name or by an alias. Otherwise they can neither write a function that takes it nor
// declare a variable, and its documentation is nowhere to be found.
func TestUsersCanNameEachType(t *testing.T) {
	s := seen{t: t, named: map[*types.TypeName]bool{}}
	paths := slices.DeleteFunc(strings.Fields(string(list(t, "work"))), isPrivate)
	public := load(t, paths...)
	require.Greater(t, len(public), 30)
	forEach := func(do func(o types.Object)) {
		for _, p := range public {
			for _, name := range p.Scope().Names() {
				if o := p.Scope().Lookup(name); o.Exported() {
					do(o)
				}
			}
		}
	}
	forEach(func(o types.Object) {
		if n, ok := o.(*types.TypeName); ok {
			s.named[n] = true
			if of, ok := types.Unalias(n.Type()).(*types.Named); ok {
				s.named[of.Obj()] = true
			}
		}
	})
	forEach(func(o types.Object) {
		at := o.Pkg().Path() + "." + o.Name()
		if n, ok := o.(*types.TypeName); ok {
			s.declared(at, types.Unalias(n.Type()))
			return
		}
		s.use(at, o.Type())
	})
	assert.Greater(t, s.uses, 1000)
}

type seen struct {
	t     *testing.T
	named map[*types.TypeName]bool // those that users can name
	uses  int
}

// declared checks what users see of a type of theirs: its fields, and its methods.
func (s *seen) declared(at string, t types.Type) {
	named, ok := t.(*types.Named)
	if !ok {
		s.use(at, t)
		return
	}
	s.use(at, named.Underlying())
	for m := range types.NewMethodSet(types.NewPointer(named)).Methods() {
		if m.Obj().Exported() {
			s.use(at+"."+m.Obj().Name(), m.Type())
		}
	}
}

// use checks t and the types in it.
func (s *seen) use(at string, t types.Type) {
	switch t := t.(type) {
	case *types.Alias:
		if !s.named[t.Obj()] {
			s.use(at, types.Unalias(t))
		}
	case *types.Named:
		s.uses++
		for a := range t.TypeArgs().Types() {
			s.use(at, a)
		}
		o := t.Origin().Obj()
		if _, ok := exempt[path.Base(at)]; !ok && o.Pkg() != nil && strings.HasPrefix(o.Pkg().Path(), module) && !s.named[o] {
			assert.Fail(s.t, fmt.Sprintf("%s has the type %v, which users can't name", at, t))
		}
	case *types.Signature:
		for p := range t.Params().Variables() {
			s.use(at, p.Type())
		}
		for r := range t.Results().Variables() {
			s.use(at, r.Type())
		}
	case *types.Struct:
		for f := range t.Fields() {
			if f.Exported() {
				s.use(at+"."+f.Name(), f.Type())
			}
		}
	case *types.Interface:
		for m := range t.Methods() {
			if m.Exported() {
				s.use(at+"."+m.Name(), m.Type())
			}
		}
	case *types.Map:
		s.use(at, t.Key())
		s.use(at, t.Elem())
	case interface{ Elem() types.Type }: // pointers, slices, arrays, and channels
		s.use(at, t.Elem())
	}
}
