// Package vocabulary holds the words that no identifier may have, so that one thing keeps one name.
package vocabulary

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// forbidden are words, in lower case, and what to say instead. A word of an identifier is one of
// its parts in camel case: newLinkSession has new, link, and session.
var forbidden = map[string]string{
	"afresh": "fresh", "anew": "fresh", "thrice": "threeTimes", "meanwhile": "inParallel",
	"amid": "during", "beside": "nextTo, together", "forever": "permanently", "whatever": "any", "whoever": "anyone",
	"appetite": "prefetchEstimate", "hunger": "starvation", "hungry": "starving", "larder": "stock",
	"booking": "slot", "bookings": "slots", "seat": "slot", "seats": "slots",
	"buried": "discarded", "burier": "drainer", "bury": "discard", "doomed": "failing", "grave": "deadLetterTarget", "morgue": "deadLetterQueue",
	"caveat": "warning", "caveats": "warnings", "terms": "sideEffects",
	"crew": "workers", "crews": "workers", "roster": "workerSet",
	"hop": "historyEvent, delay, retry", "hops": "history", "story": "history", "stories": "histories", "rung": "level", "rungs": "levels",
	"hurried": "expedited", "hurry": "expedite",
	"letter": "deadLetter, message", "letters": "deadLetters, messages",
	"look": "read, peek, check", "looked": "read, peeked", "looking": "peeking", "looks": "peeks",
	"mend": "fix", "mended": "fixed", "mending": "fixing", "mends": "fixes",
	"quarantine": "isolation", "quarantined": "isolated",
	"said": "logged", "saying": "logging",
	"stint": "linkSession", "stints": "linkSessions",
	"successor": "retryCopy", "successors": "retryCopies",
	"suspect": "poison", "suspected": "isolated", "suspects": "poisons",
	"tell": "notify, log, report", "teller": "notifier", "telling": "notifying", "tells": "notifies", "told": "notified", "untold": "unnotified",
	"ticked": "selected",
	"unsure": "unknown",
	"walk":   "scan", "walked": "scanned", "walking": "scanning", "walks": "scans",
	"wear": "exhaust", "worn": "exhausted",
}

// joined are words that are forbidden where they come together.
var joined = map[string]string{
	"take back": "revoke", "taken back": "revoked", "give back": "requeue", "given back": "requeued", "hand back": "requeue", "put back": "requeue",
	"ways out": "remedies", "hold up": "block", "holds up": "blocks", "held up": "blocked", "go on": "resume", "goes on": "resumes", "under way": "inFlight, running",
	"handed back": "requeued", "gives back": "requeues",
}

// allowed are exceptions: the folder, or "*" for all, and the identifier, with the reason.
var allowed = map[string]string{
	"internal/frames walk":             "it visits the fields of a value, not the messages of a queue",
	"operate/topologyfile walk":        "it visits a YAML document",
	"hopbacktest/internal/engine walk": "it visits the bindings of an exchange",
	"retry HandBack":                   "the command hopback retry hand-back: it undoes TakeOver",
	"integration/bench nHop":           "the retry cycle that the product is named for",
	"examples/quickstart hop":          "the retry cycle that the product is named for",
	"examples/quickstart hops":         "the retry cycle that the product is named for",
}

// words cuts an identifier into its words, in lower case.
func words(name string) []string {
	var all []string
	r := []rune(name)
	start := 0
	for i := 1; i < len(r); i++ {
		upper, was := unicode.IsUpper(r[i]), unicode.IsUpper(r[i-1])
		if r[i] == '_' || r[i-1] == '_' || upper && (!was || i+1 < len(r) && unicode.IsLower(r[i+1])) {
			all = append(all, strings.ToLower(string(r[start:i])))
			start = i
		}
	}
	return append(all, strings.ToLower(string(r[start:])))
}

// wrong is what is wrong with an identifier, or "".
func wrong(name string) string {
	all := words(name)
	for i, w := range all {
		if i > 0 {
			pair := all[i-1] + " " + w
			if all[i-1] == "dead" && (w == "letter" || w == "letters") {
				continue
			}
			if better, ok := joined[pair]; ok {
				return pair + ": say " + better
			}
		}
		if better, ok := forbidden[w]; ok {
			return w + ": say " + better
		}
	}
	return ""
}

// testFunction reports whether a function is a test, whose name is a sentence.
func testFunction(name string) bool {
	for _, kind := range []string{"Test", "Benchmark", "Example", "Fuzz"} {
		if strings.HasPrefix(name, kind) {
			return true
		}
	}
	return false
}

func TestIdentifiersHaveNoForbiddenWords(t *testing.T) {
	root := filepath.Join("..", "..")
	found := map[string]token.Position{}
	used := map[string]bool{}
	files := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && (d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".")) {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		files++
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		in, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, id := range declared(f) {
			what := wrong(id.Name)
			if what == "" {
				continue
			}
			key := filepath.ToSlash(in) + " " + id.Name
			if _, ok := allowed[key]; ok {
				used[key] = true
				continue
			}
			found[key+" has "+what] = fset.Position(id.Pos())
		}
		return nil
	}))
	require.Greater(t, files, 500, "files were read")
	for _, key := range slices.Sorted(maps.Keys(found)) {
		assert.Fail(t, "a forbidden word", "%s (%s)", key, found[key])
	}
	for key := range allowed {
		assert.True(t, used[key], "an exception that nothing needs: %s", key)
	}
}

// keys are the names that the fields of a struct have in JSON.
func keys(l *ast.FieldList) (ids []*ast.Ident) {
	for _, x := range l.List {
		if x.Tag == nil {
			continue
		}
		tag, err := strconv.Unquote(x.Tag.Value)
		if err != nil {
			continue
		}
		key, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		ids = append(ids, &ast.Ident{NamePos: x.Tag.Pos(), Name: key})
	}
	return ids
}

// declared are the identifiers that a file declares, but for tests and imports, and the keys of
// its JSON.
func declared(f *ast.File) (ids []*ast.Ident) {
	add := func(all ...*ast.Ident) { ids = append(ids, all...) }
	fields := func(l *ast.FieldList) {
		if l != nil {
			for _, x := range l.List {
				add(x.Names...)
			}
		}
	}
	add(f.Name)
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if !testFunction(n.Name.Name) {
				add(n.Name)
			}
			fields(n.Recv)
		case *ast.FuncType:
			fields(n.Params)
			fields(n.Results)
			fields(n.TypeParams)
		case *ast.StructType:
			fields(n.Fields)
			add(keys(n.Fields)...)
		case *ast.InterfaceType:
			fields(n.Methods)
		case *ast.TypeSpec:
			add(n.Name)
		case *ast.ValueSpec:
			add(n.Names...)
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE {
				add(names(n.Lhs)...)
			}
		case *ast.RangeStmt:
			if n.Tok == token.DEFINE {
				add(names([]ast.Expr{n.Key, n.Value})...)
			}
		case *ast.LabeledStmt:
			add(n.Label)
		}
		return true
	})
	return ids
}

func names(all []ast.Expr) (ids []*ast.Ident) {
	for _, x := range all {
		if id, ok := x.(*ast.Ident); ok {
			ids = append(ids, id)
		}
	}
	return ids
}

func TestWords(t *testing.T) {
	assert.Equal(t, []string{"new", "http", "link"}, words("newHTTPLink"))
	assert.Empty(t, wrong("newDeadLetter"))
	assert.Empty(t, wrong("storyboard"))
	assert.Equal(t, "letter: say deadLetter, message", wrong("letterOf"))
	assert.Equal(t, "taken back: say revoked", wrong("errTakenBack"))
}
