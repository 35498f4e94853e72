package vocabulary

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// phrases are regular expressions of what no text says, since it reads as translated, and what to
// say instead.
var phrases = map[string]string{
	`of its own`: "separate, or nothing", `(is|are) told`: "gets, is notified",
	`anew`: "again, new", `amid`: "during", `beside`: "next to, besides", `for ever`: "permanently, never ends",
	`under way`: "in flight, running", `meanwhile`: "at the same time", `whoever`: "anyone who, if you",
	`bears`: "has, carries", `thrice`: "three times", `it is so that`: "", `comes to nothing`: "fails",
	`of which`: "a second sentence", `by way of`: "through", `holds up`: "blocks, delays", `goes on`: "continues",
	`given up on`: "abandoned, dead-lettered", `as it (is|was)`: "unchanged", `the like`: "and so on",
	`mend(s|ed|ing)?`: "fix, edit", `stints?`: "link session", `appetite|hunger`: "prefetch estimate", `ticked`: "selected",
	`crew|roster`: "worker pool", `given back|gives? back|handed back`: "requeued, returned", `looked into`: "read",
	`tells? of|told of`: "reports", `begin anew`: "start over", `hold up|held up|holding up`: "block",
	`whatever`: "any, regardless of, what",
	`(takes?|took|taken|taking) (it|them|itself|counts|(an?|the|its|each|every|one)( [\w-]+){1,2}) for (lost|dead|gone|granted|one|another|its|an?|the)`: "treats X as Y",
	`(needn|mustn|mayn)['’]t`: "doesn't need to, must not, may not",
	`so( [\w-]+){0,4} that (it|they|he|she|one|we|you|(an?|the|each|no) \w+) may`: "so that it can, to",
}

// exceptions are phrases that may stand where they stand: the file and a part of the text around
// the phrase, with the reason.
var exceptions = map[string]string{}

// A passage is text that people read, with the line at which it starts.
type passage struct {
	text string
	line int
}

var (
	banned = compiled()
	// spans are code and the targets of links: they aren't prose.
	spans = regexp.MustCompile("`[^`]*`|\\]\\([^)]*\\)|\"[^\"]*\"")
	// harmless are phrases that contain one of the others.
	harmless = regexp.MustCompile(`(?i)\bas (soon|long|far|often|much|late|early)\s+as\s+it\s+(is|was)\b`)
	actions  = regexp.MustCompile(`(?s)\{\{.*?\}\}`)
	marks    = regexp.MustCompile(`(?m)^[ \t]*(//|#|--|>|/?\*)+[ \t]?`)
)

func compiled() map[*regexp.Regexp]string {
	all := map[*regexp.Regexp]string{}
	for phrase, instead := range phrases {
		all[regexp.MustCompile(`(?i)\b(?:`+strings.ReplaceAll(phrase, " ", `\s+`)+`)\b`)] = instead
	}
	return all
}

func TestTextsReadAsSpoken(t *testing.T) {
	t.Parallel()
	var found []string
	used, files := map[string]bool{}, map[string]int{}
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name != root && strings.HasPrefix(d.Name(), ".") && d.Name() != ".ci" && d.Name() != ".github" {
				return filepath.SkipDir
			}
			return nil
		}
		read, kind := reader(name)
		if read == nil {
			return nil
		}
		files[kind]++
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		file := filepath.ToSlash(relative)
		passages, err := read(text)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		for _, p := range passages {
			found = append(found, hits(file, p, used)...)
		}
		return nil
	}))
	require.Greater(t, files[".md"], 20)
	require.Greater(t, files[".go"], 500)
	require.Greater(t, files[".html"], 3)
	slices.Sort(found)
	for _, hit := range found {
		assert.Fail(t, "a phrase that reads as translated", "%s", hit)
	}
	for exception := range exceptions {
		assert.True(t, used[exception], "an exception that nothing needs: %s", exception)
	}
}

// hits are the phrases of a passage that no exception covers.
func hits(file string, p passage, used map[string]bool) (all []string) {
	p.text = harmless.ReplaceAllStringFunc(p.text, func(text string) string {
		return strings.Map(func(r rune) rune {
			if r == '\n' {
				return r
			}
			return ' '
		}, text)
	})
	for phrase, instead := range banned {
		for _, at := range phrase.FindAllStringIndex(p.text, -1) {
			around := strings.Join(strings.Fields(p.text[max(0, at[0]-80):min(len(p.text), at[1]+80)]), " ")
			if exception := excepted(file, around); exception != "" {
				used[exception] = true
				continue
			}
			line := p.line + strings.Count(p.text[:at[0]], "\n")
			all = append(all, fmt.Sprintf("%s:%d: %q; write: %s", file, line, p.text[at[0]:at[1]], instead))
		}
	}
	slices.Sort(all)
	return all
}

func excepted(file, around string) string {
	for exception := range exceptions {
		in, part, _ := strings.Cut(exception, ": ")
		if in == file && strings.Contains(around, part) {
			return exception
		}
	}
	return ""
}

// reader is what finds the passages of a file, or nil for a file that isn't read.
func reader(name string) (read func([]byte) ([]passage, error), kind string) {
	kind = filepath.Ext(name)
	switch {
	case filepath.Base(filepath.Dir(name)) == "vocabulary": // the lists of what is forbidden
		return nil, ""
	case kind == ".go":
		return goPassages, kind
	case kind == ".md":
		return markdownPassages, kind
	case slices.Contains([]string{".html", ".yml", ".yaml", ".sh", ".js", ".css", ".sql", ".proto", ".py", ".conf"}, kind),
		filepath.Base(name) == "Makefile", filepath.Base(filepath.Dir(name)) == ".ci":
		return plainPassages, kind
	}
	return nil, ""
}

// goPassages are a file's comments and string literals. Strings that are added up are one passage.
func goPassages(text []byte) (all []passage, err error) {
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, "", text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	line := func(p token.Pos) int { return files.Position(p).Line }
	for _, group := range f.Comments {
		var lines []string
		for _, c := range group.List {
			lines = append(lines, c.Text)
		}
		blank := func(code string) string { return strings.Repeat("\n", strings.Count(code, "\n")) }
		lines[0] = marks.ReplaceAllString(strings.Join(lines, "\n"), "")
		all = append(all, passage{spans.ReplaceAllStringFunc(lines[0], blank), line(group.Pos())})
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BinaryExpr:
			if sum, ok := added(n); ok {
				all = append(all, passage{sum, line(n.Pos())})
				return false
			}
		case *ast.BasicLit:
			if s, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
				all = append(all, passage{s, line(n.Pos())})
			}
		}
		return true
	})
	return all, nil
}

// added is the text of string literals that are joined with +.
func added(x ast.Expr) (string, bool) {
	switch x := x.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(x.Value)
		return s, err == nil && x.Kind == token.STRING
	case *ast.BinaryExpr:
		left, ok := added(x.X)
		right, also := added(x.Y)
		return left + right, ok && also && x.Op == token.ADD
	}
	return "", false
}

// markdownPassages are a page's paragraphs without code.
func markdownPassages(text []byte) (all []passage, err error) {
	code, lines := false, strings.Split(string(text), "\n")
	for i, line := range lines {
		fence := strings.HasPrefix(strings.TrimSpace(line), "```")
		if fence || code {
			lines[i] = ""
		}
		if fence {
			code = !code
		}
		lines[i] = spans.ReplaceAllString(lines[i], "")
	}
	return paragraphs(lines), nil
}

// plainPassages are all paragraphs of a file, without the marks of comments and the actions of templates.
func plainPassages(text []byte) ([]passage, error) {
	blank := func(action []byte) []byte { return []byte(strings.Repeat("\n", strings.Count(string(action), "\n"))) }
	return paragraphs(strings.Split(marks.ReplaceAllString(string(actions.ReplaceAllFunc(text, blank)), ""), "\n")), nil
}

// paragraphs are the lines, joined up to the next empty one.
func paragraphs(lines []string) (all []passage) {
	start := 0
	for i := range len(lines) + 1 {
		if i < len(lines) && strings.TrimSpace(lines[i]) != "" {
			continue
		}
		if i > start {
			all = append(all, passage{strings.Join(lines[start:i], "\n"), start + 1})
		}
		start = i + 1
	}
	return all
}

func TestPassages(t *testing.T) {
	t.Parallel()
	of := func(read func([]byte) ([]passage, error), text string) (all []string) {
		passages, err := read([]byte(text))
		require.NoError(t, err)
		for _, p := range passages {
			all = append(all, hits("x", p, map[string]bool{})...)
		}
		return all
	}
	source := "package x\n\n// X goes\n// on, `goes on`.\nconst X = \"it \" +\n\t\"bears\" + \" it\"\n\nfunc goesOn() { print(`as\nit is`, \"bearskin\") }\n"
	assert.Equal(t, []string{`x:3: "goes\non"; write: continues`, `x:5: "bears"; write: has, carries`, `x:8: "as\nit is"; write: unchanged`},
		of(goPassages, source))
	assert.Equal(t, []string{`x:5: "takes a slow node for lost"; write: treats X as Y`},
		of(markdownPassages, "```\nwhatever\n```\n\ntakes a slow node for lost, takes `time for a` while, so that it can\n"))
	assert.Equal(t, []string{`x:2: "under\nway"; write: in flight, running`, `x:5: "so late that it may"; write: so that it can, to`},
		of(plainPassages, "a: b\n# under\n# way\n\nso late that it may {{ whatever }}\n"))
}
