package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every link between pages leads somewhere, every picture is there, and nothing comes from elsewhere.
func TestDocsSiteIsWhole(t *testing.T) {
	to := t.TempDir()
	pages, err := build(filepath.Join("..", "..", "..", "docs"), to)
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(to, "*.html"))
	if err != nil || len(files) != len(pages) {
		t.Fatalf("%d files for %d pages: %v", len(files), len(pages), err)
	}
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(to, name))
		if err != nil {
			t.Errorf("%v", err)
		}
		return string(text)
	}
	ids := regexp.MustCompile(` id="([^"]+)"`)
	anchors := map[string]map[string]bool{} // by page
	for _, file := range files {
		all := map[string]bool{"": true}
		for _, m := range ids.FindAllStringSubmatch(read(filepath.Base(file)), -1) {
			all[m[1]] = true
		}
		anchors[filepath.Base(file)] = all
	}
	links, sources := regexp.MustCompile(` href="([^"]+)"`), regexp.MustCompile(` (?:src|srcset)="([^"]+)"`)
	inner := 0
	for page := range anchors {
		text := read(page)
		if !strings.Contains(text, `http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'self'; `) {
			t.Errorf("%s has no policy", page)
		}
		for _, m := range links.FindAllStringSubmatch(text, -1) {
			name, anchor, _ := strings.Cut(m[1], "#")
			if name == "" {
				name = page
			}
			switch {
			case strings.Contains(name, "://") || strings.HasPrefix(name, "../") || name == "./" || name == "docs.css" || strings.HasPrefix(name, "mailto:"):
			case !anchors[name][anchor]:
				t.Errorf("%s has a link to %s, which doesn't exist", page, m[1])
			default:
				inner++
			}
		}
		for _, m := range sources.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				t.Errorf("%s loads %s", page, m[1])
			} else if _, err := os.Stat(filepath.Join(to, m[1])); err != nil {
				t.Errorf("%s: %v", page, err)
			}
		}
		if !strings.Contains(read("search.json"), `"at":"`+page) {
			t.Errorf("the search doesn't know %s", page)
		}
	}
	if inner < 1000 {
		t.Errorf("only %d links between pages were checked", inner)
	}
}

func TestAddress(t *testing.T) {
	d := &document{Name: "a", folder: "docs"}
	for link, want := range map[string]string{
		"b.md": "b.html", "b.md#c": "b.html#c", "#c": "#c", "https://rabbitmq.com/x.md": "https://rabbitmq.com/x.md",
		"../README.md": "index.html", "../README.md#e": "index.html#e", "../DESIGN.md#d": repository + "DESIGN.md#d", "../examples/orders": repository + "examples/orders", "desk/x.md": repository + "docs/desk/x.md",
	} {
		if got := d.address(link); got != want {
			t.Errorf("%s leads to %s, want %s", link, got, want)
		}
	}
	readme := &document{Name: "index"}
	for link, want := range map[string]string{"docs/b.md#c": "b.html#c", "DESIGN.md": repository + "DESIGN.md", "examples/README.md": repository + "examples/README.md"} {
		if got := readme.address(link); got != want {
			t.Errorf("%s of README.md leads to %s, want %s", link, got, want)
		}
	}
}

// A page runs its first program, if it is complete, shows what it prints, and needs nothing that a page can't have.
func TestFindProgram(t *testing.T) {
	const program, output = "# Page\n\n```go\npackage main\n\nfunc main() {}\n```\n", "\nIt prints `a`:\n\n```\na\n```\n"
	for name, c := range map[string]struct {
		text, arguments string
		found           bool
	}{
		"a program":           {program + output, "", true},
		"with arguments":      {program + "\n```sh\ngo mod tidy\ngo run . o-1 gift\n```\n" + output, "o-1 gift", true},
		"without any":         {program + "\n```sh\ngo run .\n```\n" + output, "", true},
		"no output":           {program, "", false},
		"another section":     {program + "\n## Next\n" + output, "", false},
		"another language":    {program + "\n```yaml\na: b\n```\n" + output, "", false},
		"another package":     {strings.Replace(program, "main", "orders_test", 1) + output, "", false},
		"a fragment":          {"# Page\n\n```go\nfunc main() {}\n```\n" + output, "", false},
		"a server":            {strings.Replace(program, "\nfunc", "\nimport \"net/http\"\nfunc", 1) + output, "", false},
		"a database":          {strings.Replace(program, "\nfunc", "\nimport \"github.com/hopback/hopback/postgres\"\nfunc", 1) + output, "", false},
		"the first, no other": {strings.Replace(program, "main", "orders_test", 1) + program + output, "", false},
	} {
		d := &document{source: []byte(c.text)}
		if d.findProgram(); d.program != "" != c.found || d.Arguments != c.arguments {
			t.Errorf("%s: program %q, arguments %q", name, d.program, d.Arguments)
		}
	}
}

func TestAProgramThatDoesNotCompile(t *testing.T) {
	root, err := filepath.Abs(filepath.Join("..", "..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	err = compile(root, t.TempDir(), []*document{{Name: "page", program: "main\n\nfunc main() { undeclared() }\n"}})
	if err == nil || !strings.Contains(err.Error(), "undefined: undeclared") {
		t.Error(err)
	}
}

func TestDocsSiteNeedsDocuments(t *testing.T) {
	if _, err := build(t.TempDir(), t.TempDir()); err == nil {
		t.Error("a folder without documents is no error")
	}
}
