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
	if err != nil || len(files) != pages+1 {
		t.Fatalf("%d files for %d pages: %v", len(files), pages, err)
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
		if !strings.Contains(read("search.json"), `"at":"`+page) && page != "index.html" {
			t.Errorf("the search doesn't know %s", page)
		}
	}
	if inner < 1000 {
		t.Errorf("only %d links between pages were checked", inner)
	}
}

func TestAddress(t *testing.T) {
	d := &document{Name: "a"}
	for link, want := range map[string]string{
		"b.md": "b.html", "b.md#c": "b.html#c", "#c": "#c", "https://rabbitmq.com/x.md": "https://rabbitmq.com/x.md",
		"../DESIGN.md#d": repository + "DESIGN.md#d", "../examples/orders": repository + "examples/orders", "desk/x.md": repository + "docs/desk/x.md",
	} {
		if got := d.address(link); got != want {
			t.Errorf("%s leads to %s, want %s", link, got, want)
		}
	}
}

func TestDocsSiteNeedsDocuments(t *testing.T) {
	if _, err := build(t.TempDir(), t.TempDir()); err == nil {
		t.Error("a folder without documents is no error")
	}
}
