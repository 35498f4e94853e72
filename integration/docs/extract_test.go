// Package docs compiles and runs the Go code of the documents, and follows their links.
package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const root = "../.."

// page is the Go package that the code of a document makes.
//
// A block of Go with a package clause is a file. All other blocks are fragments; they go into one more file of the package. A
// comment that isn't rendered adds what a fragment lacks:
//
//	<!-- go: var errBankDown = errors.New("the bank is down") -->
//	<!-- go: func pauses() client.Middleware { … } -->
//
// If the comment has a "…", the next block replaces it. Imports are added if a program of any document has them; a comment names the others,
// each on a line.
type page struct {
	document string            // its path
	files    map[string]string // the programs, by the name of the file
	clause   string            // the package clause
	imports  map[string]bool   // of the comments, as "import …"
	text     string            // the fragments
	kind     string            // ends the name of the fragments' file

	program, output string   // the first program, and what the document shows as its output
	arguments       []string // it is run with these
}

var (
	goCode      = regexp.MustCompile("(?ms)^<!-- go: (.*?) -->$|^```go\n(.*?)^```$")
	goFence     = regexp.MustCompile("(?m)^[ \t]*```go")
	importLine  = regexp.MustCompile(`(?m)^import .*$`)
	importSpec  = regexp.MustCompile(`(?m)^\t"([^"\s]+)"$`)
	testPackage = regexp.MustCompile(`(?m)^\t"testing"$`)
)

// readPage extracts the code of a document.
func readPage(document, text string) (page, error) {
	p := page{document: document, files: map[string]string{}, clause: "package main", imports: map[string]bool{}, kind: ".go"}
	const alone = "…"
	around, from, blocks := alone, 0, 0 // a comment with a "…", its line, and how many blocks there were
	unused := func() error { return fmt.Errorf("%s:%d: no fragment follows this comment", document, from) }
	for _, at := range goCode.FindAllStringSubmatchIndex(text, -1) {
		line := 1 + strings.Count(text[:at[0]], "\n")
		if at[2] >= 0 {
			comment := p.addImports(text[at[2]:at[3]])
			switch {
			case !strings.Contains(comment, "…"):
				p.add(line, comment)
			case around != alone:
				return p, unused()
			default:
				around, from = comment, line
			}
			continue
		}
		blocks++
		line++
		block := text[at[4]:at[5]]
		if strings.HasPrefix(block, "package ") {
			if around != alone {
				return p, unused()
			}
			p.addProgram(line, block, text[at[1]:])
			continue
		}
		before, after, _ := strings.Cut(around, "…")
		p.add(from, before)
		p.add(line, block)
		p.add(from+strings.Count(before, "\n"), after)
		around = alone
	}
	if around != alone {
		return p, unused()
	}
	if fences := len(goFence.FindAllString(text, -1)); fences != blocks {
		return p, fmt.Errorf("%s: %d of %d blocks of Go weren't read: one is indented, has no end, or names more than its language", document, fences-blocks, fences)
	}
	if len(p.files) == 0 && p.text != "" {
		p.text += "\nfunc main() {}\n"
	}
	return p, nil
}

// addImports adds the imports of a comment, and returns the rest.
func (p *page) addImports(comment string) (rest string) {
	for _, spec := range importLine.FindAllString(comment, -1) {
		p.imports[spec] = true
	}
	return importLine.ReplaceAllString(comment, "")
}

// add adds to the fragments. The compiler reports mistakes by the document's lines.
func (p *page) add(line int, text string) {
	if text != "" {
		p.text += at(p.document, line) + text + "\n"
	}
}

func (p *page) addProgram(line int, block, rest string) {
	kind := ".go"
	if testPackage.MatchString(block) {
		kind = "_test.go"
	}
	if len(p.files) == 0 {
		p.clause, _, _ = strings.Cut(block, "\n")
		p.kind, p.program = kind, block
		p.output, p.arguments = shown(rest)
	}
	p.files[fmt.Sprintf("line%d%s", line, kind)] = at(p.document, line) + block
}

func at(document string, line int) string { return fmt.Sprintf("//line %s:%d\n", document, line) }

func (p page) name() string { return filepath.Base(p.document) }

func (p page) folder() string { return strings.TrimSuffix(p.name(), ".md") }

// fragments returns the file with the fragments. imports are those of the programs of all documents, by name.
func (p page) fragments(imports map[string]string) (string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), "", p.clause+"\n"+p.text, 0)
	if err != nil {
		return "", err
	}
	used := maps.Clone(p.imports)
	ast.Inspect(file, func(n ast.Node) bool {
		if s, is := n.(*ast.SelectorExpr); is {
			if x, is := s.X.(*ast.Ident); is && x.Obj == nil && imports[x.Name] != "" {
				used[imports[x.Name]] = true
			}
		}
		return true
	})
	return p.clause + "\n" + strings.Join(slices.Sorted(maps.Keys(used)), "\n") + "\n\n" + p.text, nil
}

// newModule makes a module that has nothing but the code of the pages, each in a folder.
func newModule(t *testing.T, pages []page) (dir string, err error) {
	t.Helper()
	dir = t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	work := workspace(t)
	write("go.mod", "module docs\n\n"+goVersion.FindString(work)+"\n")
	write("go.work", work)
	sums, err := os.ReadFile(filepath.Join(root, "go.work.sum"))
	require.NoError(t, err)
	write("go.work.sum", string(sums))
	imports := map[string]string{}
	for _, p := range pages {
		for name, text := range p.files {
			write(filepath.Join(p.folder(), name), text)
			for _, m := range importSpec.FindAllStringSubmatch(text, -1) {
				imports[path.Base(m[1])] = `import "` + m[1] + `"`
			}
		}
	}
	for _, p := range pages {
		if p.text == "" {
			continue
		}
		text, err := p.fragments(imports)
		if err != nil {
			return "", err
		}
		write(filepath.Join(p.folder(), "fragments"+p.kind), text)
	}
	return dir, nil
}

var (
	goVersion         = regexp.MustCompile(`(?m)^go \S+$`)
	folderInWorkspace = regexp.MustCompile(`(?m)(^\t|=> )\.(\S*)$`)
)

// workspace returns go.work of this checkout, for another folder and with a module there. So packages are compiled once for the
// documents and all other tests, and have the same dependencies.
func workspace(t *testing.T) string {
	t.Helper()
	checkout, err := filepath.Abs(root)
	require.NoError(t, err)
	text, err := os.ReadFile(filepath.Join(checkout, "go.work"))
	require.NoError(t, err)
	return folderInWorkspace.ReplaceAllString(string(text), "${1}"+checkout+"$2") + "\nuse .\n"
}

// flags are those of GOFLAGS that decide what the build cache has: without the flag with which this test was built, all packages
// would be compiled a second time.
var flags = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-trimpath", Value: "true"}) {
		return "GOFLAGS=-trimpath"
	}
	return "GOFLAGS="
})

func goCommand(t *testing.T, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK="+filepath.Join(dir, "go.work"), flags())
	return cmd
}

// A mistake in a document is found, and reported by the document's line.
func TestMistakesInDocumentsAreFound(t *testing.T) {
	t.Parallel()
	block := func(code string) string { return "# Page\n\n```go\n" + code + "```\n" }
	for name, c := range map[string]struct{ text, want string }{
		"a program":          {block("package main\n\nfunc main() { undeclared() }\n"), "page.md:6: undefined: undeclared"},
		"a test":             {block("package main\n\nimport (\n\t\"testing\"\n)\n\nfunc TestX(t *testing.T) { t.Errorf(\"%d\", \"x\") }\n"), "page.md:10:"},
		"a declaration":      {block("var n int = \"text\"\n"), "page.md:4: cannot use"},
		"a name":             {block("var b = strings.Builder{}\n"), "page.md:4: undefined: strings"},
		"statements":         {"<!-- go: func f() error { … } -->\n" + block("\treturn 5\n"), "page.md:5: cannot use 5"},
		"a comment":          {"\n<!-- go: var n int = \"text\" -->\n" + block("var m = n\n"), "page.md:2: cannot use"},
		"a comment's end":    {"<!-- go: func f() { …; undeclared() } -->\n" + block("\tprintln()\n"), "page.md:1: undefined: undeclared"},
		"an import too many": {"<!-- go: import \"time\" -->\n" + block("var n = 5\n"), `"time" imported and not used`},
		"not Go":             {block("this isn't Go\n"), "page.md:4: expected declaration"},
		"unused comment":     {block("var n = 5\n") + "<!-- go: func f() { … } -->\n", "page.md:6: no fragment follows this comment"},
		"two comments":       {"<!-- go: func f() { … } -->\n<!-- go: func g() { … } -->\n" + block("println()\n"), "page.md:1: no fragment follows this comment"},
		"before a program":   {"<!-- go: func f() { … } -->\n" + block("package main\n"), "page.md:1: no fragment follows this comment"},
		"indented":           {"- item\n\n  ```go\n  var n = 5\n  ```\n", "1 of 1 blocks of Go weren't read"},
		"without an end":     {"```go\nvar n = 5\n", "1 of 1 blocks of Go weren't read"},
		"nothing":            {"<!-- go: var n, m int -->\n" + block("var k = n + m\n"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := readPage("/docs/page.md", c.text)
			if err == nil {
				var dir string
				if dir, err = newModule(t, []page{p}); err == nil {
					var out []byte
					if out, err = goCommand(t, dir, "vet", "./...").CombinedOutput(); err != nil {
						err = fmt.Errorf("%s", out)
					}
				}
			}
			if c.want == "" {
				require.NoError(t, err)
				return
			}
			assert.ErrorContains(t, err, c.want)
		})
	}
}
