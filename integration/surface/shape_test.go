package surface

import (
	"go/types"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sdk returns the packages of ours that a program with package hopback has in it.
func sdk(t *testing.T) []*types.Package {
	t.Helper()
	var ours []string
	for _, path := range strings.Fields(string(list(t, "-deps", "."))) {
		if strings.HasPrefix(path, module) {
			ours = append(ours, path)
		}
	}
	return load(t, ours...)
}

// structs calls do with each struct type of p that isn't an alias.
func structs(p *types.Package, do func(name string, s *types.Struct)) {
	for _, name := range p.Scope().Names() {
		if o, ok := p.Scope().Lookup(name).(*types.TypeName); ok && !o.IsAlias() {
			if s, ok := o.Type().Underlying().(*types.Struct); ok {
				do(p.Path()+"."+name, s)
			}
		}
	}
}

// A type with many methods is several types with one name: nobody sees which of its fields belong together.
func TestTypesHaveFewMethods(t *testing.T) {
	for _, p := range sdk(t) {
		for _, name := range p.Scope().Names() {
			o, ok := p.Scope().Lookup(name).(*types.TypeName)
			if !ok || o.IsAlias() {
				continue
			}
			if named, ok := o.Type().(*types.Named); ok {
				assert.LessOrEqual(t, named.NumMethods(), 40, "methods of %s.%s", p.Path(), name)
			}
		}
	}
}

// maxFunctionFields is how many exported fields of structs in internal packages are functions. It only ever falls:
// who reads the package doesn't see what such a field does, and an interface's methods have names and comments. Not
// counted is what only carries a function of the user's, from a public struct with the same field (Config.Dial): its
// name and comment are there.
const maxFunctionFields = 8 // one is internal/rules.Entry.Check: the table of rules is of functions, and serves two packages

func TestPackagesHandEachOtherFewFunctions(t *testing.T) {
	var found []string
	users := map[string]bool{}
	functions := func(private bool, do func(owner string, f *types.Var)) {
		for _, p := range sdk(t) {
			if isPrivate(p.Path()) != private {
				continue
			}
			structs(p, func(name string, s *types.Struct) {
				for f := range s.Fields() {
					if _, ok := f.Type().Underlying().(*types.Signature); ok && f.Exported() {
						do(name, f)
					}
				}
			})
		}
	}
	key := func(f *types.Var) string { return f.Name() + " " + types.TypeString(f.Type(), nil) }
	functions(false, func(_ string, f *types.Var) { users[key(f)] = true })
	functions(true, func(owner string, f *types.Var) {
		if !users[key(f)] {
			found = append(found, strings.TrimPrefix(owner, module+"/")+"."+f.Name())
		}
	})
	t.Log(strings.Join(found, "\n"))
	assert.LessOrEqual(t, len(found), maxFunctionFields)
}

// Two packages have no struct with the same fields: values would be copied from one into the other, and a new field
// is forgotten in one of them.
func TestNoStructHasATwin(t *testing.T) {
	seen := map[string]string{}
	n := 0
	for _, p := range sdk(t) {
		structs(p, func(name string, s *types.Struct) {
			fields := map[string]bool{}
			for f := range s.Fields() {
				fields[strings.ToLower(f.Name())+" "+types.TypeString(f.Type().Underlying(), nil)] = true
			}
			if len(fields) < 2 {
				return
			}
			n++
			key := strings.Join(slices.Sorted(maps.Keys(fields)), "; ")
			assert.Empty(t, seen[key], "%s has the fields of %s: %s", name, seen[key], key)
			seen[key] = name
		})
	}
	require.Greater(t, n, 100)
}
