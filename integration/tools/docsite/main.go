// Command docsite makes a static site of README.md and docs/, with a search and programs that run in the browser. "make site"
// runs it. The playground's style sheet and its clock have to be in the folder above the site.
package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"html/template"
	"log"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/renderer/html"
	"github.com/yuin/goldmark/text"
)

// repository is where files are that the site doesn't have.
const repository = "https://github.com/hopback/hopback/blob/main/"

//go:embed assets
var assets embed.FS

var layout = template.Must(template.ParseFS(assets, "assets/page.html"))

// pictures finds the files of pictures.
var pictures = regexp.MustCompile(`(?:src|srcset)="([a-z][a-z./-]*)"`)

// document is README.md or a page of docs/.
type document struct {
	Name, Title string // of the file, without .md, or "index"; the first heading
	folder      string // of the file, "docs" or ""
	source      []byte
	root        ast.Node
	program     string // that the page can run, without "package ", or ""
	Arguments   string // of its command line
}

// anchors are the headings' IDs of a document: those of GitHub, which the documents' links have.
type anchors map[string]bool

func (a anchors) Generate(value []byte, _ ast.NodeKind) []byte {
	id := strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, strings.TrimSpace(string(value)))
	unique := id
	for i := 1; a[unique]; i++ {
		unique = fmt.Sprintf("%s-%d", id, i)
	}
	a[unique] = true
	return []byte(unique)
}

func (a anchors) Put(value []byte) { a[string(value)] = true }

// section is what a search finds.
type section struct {
	Page  string `json:"page"`
	Title string `json:"title"`
	Text  string `json:"text"`
	At    string `json:"at"` // the address, with an anchor
}

func main() {
	log.SetFlags(0)
	from := flag.String("docs", filepath.Join("..", "..", "docs"), "`folder` of the documents")
	to := flag.String("o", filepath.Join("..", "..", "bin", "site", "docs"), "`folder` to write")
	flag.Parse()
	docs, _ := filepath.Abs(*from) // fails only in a folder that was deleted, and so does the build
	site, _ := filepath.Abs(*to)
	pages, err := build(docs, site)
	if err == nil {
		fmt.Printf("%s: %d pages\n", *to, len(pages))
		err = compile(filepath.Dir(docs), site, pages)
	}
	if err != nil {
		log.Fatal("docsite: ", err)
	}
}

// build writes the pages, the index of the search, and the assets. It returns the pages.
func build(from, to string) (all []*document, err error) {
	names, err := filepath.Glob(filepath.Join(from, "*.md"))
	if err != nil || len(names) == 0 {
		return nil, fmt.Errorf("there are no documents in %s", from)
	}
	// The policy of the pages forbids styles in elements.
	table := extension.NewTable(extension.WithTableCellAlignMethod(extension.TableCellAlignAttribute))
	// The documents' HTML is ours: pictures for light and dark, and comments.
	markdown := goldmark.New(goldmark.WithRendererOptions(html.WithUnsafe()), goldmark.WithExtensions(table, extension.Linkify), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
	var index []section
	for _, name := range append([]string{filepath.Join(from, "..", "README.md")}, names...) {
		source, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		d := &document{Name: strings.TrimSuffix(filepath.Base(name), ".md"), folder: "docs", source: source}
		if d.Name == "README" {
			d.Name, d.folder = "index", ""
		}
		d.root = markdown.Parser().Parse(text.NewReader(source), parser.WithContext(parser.NewContext(parser.WithIDs(anchors{}))))
		d.findProgram()
		all, index = append(all, d), append(index, d.sections()...)
	}
	err = os.MkdirAll(to, 0o755)
	for _, d := range all {
		d.link()
		var body, page bytes.Buffer
		err = errors.Join(err, markdown.Renderer().Render(&body, d.source, d.root))
		content := strings.ReplaceAll(body.String(), `="docs/`, `="`) // the pictures of README.md
		data := map[string]any{"Page": d, "Runs": d.program != "", "All": all, "Body": template.HTML(content)}
		err = errors.Join(err, layout.Execute(&page, data), os.WriteFile(filepath.Join(to, d.Name+".html"), page.Bytes(), 0o644))
		for _, m := range pictures.FindAllStringSubmatch(content, -1) {
			err = errors.Join(err, copyFile(filepath.Join(from, m[1]), filepath.Join(to, m[1])))
		}
	}
	found, _ := json.Marshal(index) // texts can be encoded
	err = errors.Join(err, os.WriteFile(filepath.Join(to, "search.json"), found, 0o644))
	for _, name := range []string{"docs.css", "docs.js", "run.js"} {
		content, failed := assets.ReadFile("assets/" + name)
		err = errors.Join(err, failed, os.WriteFile(filepath.Join(to, name), content, 0o644))
	}
	return all, err
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, content, 0o644))
}

// sections cuts the document at its headings, and finds its title.
func (d *document) sections() (all []section) {
	current := section{At: d.Name + ".html"}
	var words strings.Builder
	end := func() {
		current.Text = strings.Join(strings.Fields(words.String()), " ")
		if current.Title != "" {
			all = append(all, current)
		}
		words.Reset()
	}
	for n := d.root.FirstChild(); n != nil; n = n.NextSibling() {
		h, ok := n.(*ast.Heading)
		if !ok {
			words.WriteString(" " + plain(n, d.source))
			continue
		}
		end()
		title := strings.TrimSpace(plain(n, d.source))
		if d.Title == "" {
			d.Title = title
		}
		current = section{Page: d.Title, Title: title, At: d.Name + ".html"}
		if id, ok := h.AttributeString("id"); ok && h.Level > 1 {
			current.At += "#" + string(id.([]byte))
		}
	}
	end()
	return all
}

// plain is the text of a node.
func plain(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) { // the function returns no error
		if t, ok := n.(*ast.Text); ok && entering {
			b.WriteString(string(t.Segment.Value(source)) + " ")
		} else if c, ok := n.(*ast.FencedCodeBlock); ok && entering {
			b.Write(c.Lines().Value(source))
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// link makes the document's links lead to the site, or to the repository.
func (d *document) link() {
	_ = ast.Walk(d.root, func(n ast.Node, entering bool) (ast.WalkStatus, error) { // the function returns no error
		if l, ok := n.(*ast.Link); ok && entering {
			l.Destination = []byte(d.address(string(l.Destination)))
		}
		return ast.WalkContinue, nil
	})
}

func (d *document) address(to string) string {
	if strings.Contains(to, "://") || strings.HasPrefix(to, "#") || strings.HasPrefix(to, "mailto:") {
		return to
	}
	file, _, _ := strings.Cut(to, "#")
	anchor := to[len(file):]
	file = path.Join(d.folder, file)
	name, page := strings.CutSuffix(strings.TrimPrefix(file, "docs/"), ".md")
	switch {
	case file == "README.md":
		return "index.html" + anchor
	case page && strings.HasPrefix(file, "docs/") && !strings.Contains(name, "/"):
		return name + ".html" + anchor
	}
	return repository + file + anchor
}
