package surface

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A comment that begins with an identifier names what it stands above: after a rename, search and a
// reader find neither otherwise. Linters check that of exported names only. Tests and examples are
// described by sentences.
func TestCommentsNameWhatTheyDescribe(t *testing.T) {
	files, found := 0, 0
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		files++
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil || ast.IsGenerated(f) {
			return err
		}
		for _, c := range described(f) {
			found++
			assert.Equal(t, c.name, identifier(c.comment), "%v", set.Position(c.at))
		}
		return nil
	}))
	require.Greater(t, files, 500)
	require.Greater(t, found, 3000)
}

func TestWhatACommentNames(t *testing.T) {
	for comment, want := range map[string]string{
		"open opens it.\n":       "open",
		"isOpen's result.\n":     "isOpen",
		"Open: see close.\n":     "Open",
		"RabbitMQ closes it.\n":  "",
		"The one that is open\n": "",
		"wasOpen says\nso.":      "wasOpen",
		"":                       "",
	} {
		assert.Equal(t, want, identifier(comment), comment)
	}
}

type comment struct {
	at            token.Pos
	name, comment string
}

// described are a file's comments above one function, type, constant, or variable that begin with
// an identifier.
func described(f *ast.File) (all []comment) {
	add := func(doc *ast.CommentGroup, name string) {
		if doc != nil && identifier(doc.Text()) != "" {
			all = append(all, comment{doc.Pos(), name, doc.Text()})
		}
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if !strings.HasPrefix(d.Name.Name, "Test") && !strings.HasPrefix(d.Name.Name, "Example") {
				add(d.Doc, d.Name.Name)
			}
		case *ast.GenDecl:
			if len(d.Specs) != 1 || d.Lparen.IsValid() {
				continue // a comment in a group may be about several
			}
			switch s := d.Specs[0].(type) {
			case *ast.TypeSpec:
				add(d.Doc, s.Name.Name)
			case *ast.ValueSpec:
				if len(s.Names) == 1 {
					add(d.Doc, s.Names[0].Name)
				}
			}
		}
	}
	return all
}

var firstWord = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*`)

// products are words that look like identifiers.
var products = map[string]bool{"RabbitMQ": true, "NServiceBus": true, "PostgreSQL": true, "MassTransit": true, "StatefulSet": true}

// identifier returns the first word of a comment if it can't be the first word of a sentence: it begins
// with a small letter, or has a capital letter behind a small one. A name alone that is followed by a
// colon is one as well.
func identifier(comment string) string {
	word := firstWord.FindString(comment)
	if word == "" || products[word] {
		return ""
	}
	if strings.HasPrefix(comment[len(word):], ":") {
		return word
	}
	small := false
	for i, c := range word {
		if i == 0 && unicode.IsLower(c) || small && unicode.IsUpper(c) {
			return word
		}
		small = unicode.IsLower(c)
	}
	return ""
}
