package client

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// maxUpward is how many pairs of files there may be of which the lower uses what the
// upper declares. It only ever falls.
const maxUpward = 3

// Files are in the order in which DESIGN.md lists them: each uses what is declared in
// those before it, with few exceptions.
func TestFilesUseWhatLiesBelowThem(t *testing.T) {
	order := filesOfDesign(t)
	place := map[string]int{}
	for i, f := range order {
		require.NotContains(t, place, f, "listed twice")
		place[f] = i
	}
	uses := usesBetweenFiles(t)
	for _, f := range order {
		assert.FileExists(t, f+".go")
	}
	var upward []string
	for _, u := range slices.SortedFunc(maps.Keys(uses), func(a, b use) int { return strings.Compare(a.by+a.of, b.by+b.of) }) {
		require.Contains(t, place, u.by, "DESIGN.md lists all files")
		require.Contains(t, place, u.of, "DESIGN.md lists all files")
		if place[u.of] > place[u.by] {
			slices.Sort(uses[u])
			upward = append(upward, fmt.Sprintf("%s uses of %s: %s", u.by, u.of, strings.Join(slices.Compact(uses[u]), ", ")))
		}
	}
	require.Greater(t, len(uses), 100, "uses were found")
	t.Logf("%d of %d uses between files are upward:\n%s", len(upward), len(uses), strings.Join(upward, "\n"))
	assert.LessOrEqual(t, len(upward), maxUpward)
}

// maxLines is how long a function may be: what is longer does several things.
const maxLines = 80

func TestFunctionsAreShort(t *testing.T) {
	fset, files := sources(t)
	for _, f := range files {
		for _, d := range f.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				n := fset.Position(f.End()).Line - fset.Position(f.Pos()).Line + 1
				assert.LessOrEqual(t, n, maxLines, "%s: %s", fset.Position(f.Pos()), f.Name.Name)
			}
		}
	}
}

// sources are this package's files, without tests.
func sources(t *testing.T) (*token.FileSet, []*ast.File) {
	fset := token.NewFileSet()
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		files = append(files, f)
	}
	require.NotEmpty(t, files)
	return fset, files
}

// filesOfDesign is the list in DESIGN.md: a block whose lines are a room and its files.
func filesOfDesign(t *testing.T) (files []string) {
	design, err := os.ReadFile("../DESIGN.md")
	require.NoError(t, err)
	_, list, found := strings.Cut(string(design), "\n```\nfailure ")
	require.True(t, found)
	list, _, found = strings.Cut("failure "+list, "\n```")
	require.True(t, found)
	for line := range strings.Lines(list) {
		words := strings.Fields(line)
		if !strings.HasPrefix(line, " ") {
			words = words[1:]
		}
		files = append(files, words...)
	}
	return files
}

// use says that one file uses what another declares.
type use struct{ by, of string }

// usesBetweenFiles returns what each file uses of each other file of this package.
// Imported packages aren't looked at: what they declare is unknown here, and its uses
// don't count.
func usesBetweenFiles(t *testing.T) map[use][]string {
	fset, files := sources(t)
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	check := types.Config{Importer: nothingImported{}, Error: func(error) {}}
	pkg, _ := check.Check("client", fset, files, info)
	in := func(p token.Pos) string { return strings.TrimSuffix(filepath.Base(fset.Position(p).Filename), ".go") }
	uses := map[use][]string{}
	for id, obj := range info.Uses {
		local := obj.Parent() != nil && obj.Parent() != pkg.Scope()
		if obj.Pkg() != pkg || local {
			continue
		}
		if u := (use{in(id.Pos()), in(obj.Pos())}); u.by != u.of {
			uses[u] = append(uses[u], obj.Name())
		}
	}
	return uses
}

// nothingImported makes empty packages of all imports.
type nothingImported struct{}

func (nothingImported) Import(of string) (*types.Package, error) {
	p := types.NewPackage(of, strings.TrimPrefix(path.Base(of), "go-"))
	p.MarkComplete()
	return p, nil
}
