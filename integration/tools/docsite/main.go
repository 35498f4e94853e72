// Command docsite makes a static site of docs/, with a search that runs in the browser. "make site" runs it. The
// playground's style sheet has to be in the folder above the site.
package main

import (
	"bytes"
	"embed"
	"encoding/json"
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

// pictures finds the files of <picture> elements.
var pictures = regexp.MustCompile(`(?:src|srcset)="([a-z][a-z./-]*)"`)

// document is a page of docs/.
type document struct {
	Name, Title string // of the file, without .md; the first heading
	source      []byte
	root        ast.Node
	images      map[string]bool // below docs/
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
	pages, err := build(*from, *to)
	if err != nil {
		log.Fatal("docsite: ", err)
	}
	fmt.Printf("%s: %d pages\n", *to, pages)
}

// build writes the site, and returns how many pages it has.
func build(from, to string) (pages int, err error) {
	names, err := filepath.Glob(filepath.Join(from, "*.md"))
	if err != nil {
		return 0, err
	}
	if len(names) == 0 {
		return 0, fmt.Errorf("there are no documents in %s", from)
	}
	// The policy of the pages forbids styles in elements.
	table := extension.NewTable(extension.WithTableCellAlignMethod(extension.TableCellAlignAttribute))
	// The documents' HTML is ours: pictures for light and dark, and comments.
	markdown := goldmark.New(goldmark.WithRendererOptions(html.WithUnsafe()), goldmark.WithExtensions(table, extension.Linkify), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
	var all []*document
	for _, name := range names {
		source, err := os.ReadFile(name)
		if err != nil {
			return 0, err
		}
		d := &document{Name: strings.TrimSuffix(filepath.Base(name), ".md"), source: source, root: markdown.Parser().Parse(text.NewReader(source), parser.WithContext(parser.NewContext(parser.WithIDs(anchors{})))), images: map[string]bool{}}
		all = append(all, d)
	}
	var index []section
	if err := os.MkdirAll(to, 0o755); err != nil {
		return 0, err
	}
	for _, d := range all {
		index = append(index, d.sections()...)
	}
	for _, d := range all {
		d.link()
		var body, page bytes.Buffer
		if err := markdown.Renderer().Render(&body, d.source, d.root); err != nil {
			return 0, err
		}
		data := map[string]any{"Page": d, "All": all, "Body": template.HTML(body.String())}
		if err := layout.Execute(&page, data); err != nil {
			return 0, err
		}
		if err := os.WriteFile(filepath.Join(to, d.Name+".html"), page.Bytes(), 0o644); err != nil {
			return 0, err
		}
		for _, m := range pictures.FindAllSubmatch(d.source, -1) {
			d.images[string(m[1])] = true
		}
		for image := range d.images {
			if err := copyFile(filepath.Join(from, image), filepath.Join(to, image)); err != nil {
				return 0, err
			}
		}
	}
	return len(all), finish(to, index)
}

// finish writes the first page, the index of the search, and the assets.
func finish(to string, index []section) error {
	found, err := json.Marshal(index)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(to, "search.json"), found, 0o644); err != nil {
		return err
	}
	for _, name := range []string{"docs.css", "docs.js"} {
		content, err := assets.ReadFile("assets/" + name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, name), content, 0o644); err != nil {
			return err
		}
	}
	return copyFile(filepath.Join(to, "getting-started.html"), filepath.Join(to, "index.html"))
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, content, 0o644)
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
		switch n := n.(type) {
		case *ast.Text:
			if entering {
				b.Write(n.Segment.Value(source))
				b.WriteByte(' ')
			}
		case *ast.FencedCodeBlock:
			for i := range n.Lines().Len() {
				if entering {
					segment := n.Lines().At(i)
					b.Write(segment.Value(source))
				}
			}
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// link makes the document's links lead to the site, or to the repository.
func (d *document) link() {
	_ = ast.Walk(d.root, func(n ast.Node, entering bool) (ast.WalkStatus, error) { // the function returns no error
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Link:
			n.Destination = []byte(d.address(string(n.Destination)))
		case *ast.Image:
			if !bytes.Contains(n.Destination, []byte("://")) {
				d.images[string(n.Destination)] = true
			}
		}
		return ast.WalkContinue, nil
	})
}

func (d *document) address(to string) string {
	if strings.Contains(to, "://") || strings.HasPrefix(to, "#") || strings.HasPrefix(to, "mailto:") {
		return to
	}
	file, anchor, anchored := strings.Cut(to, "#")
	file = path.Clean(path.Join("docs", file))
	name, page := strings.CutSuffix(strings.TrimPrefix(file, "docs/"), ".md")
	if page && strings.HasPrefix(file, "docs/") && !strings.Contains(name, "/") {
		to = name + ".html"
	} else {
		to = repository + file
	}
	if anchored {
		to += "#" + anchor
	}
	return to
}
