package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// runs is the package below which the programs are packages, which only this build has.
const runs = "integration/docs/run"

// elsewhere finds what a page doesn't have: files, databases, streams, certificates, an HTTP API, servers that somebody opens,
// and a clock for measurements.
var elsewhere = regexp.MustCompile(`time\.Since\(|"(net/http|crypto/.*|path/filepath|.*/(httpapi|hopbackotel|postgres|stream))"`)

// findProgram finds the first program, if it is complete and the next block is what it prints. A block of sh with its command
// line may come before. integration/docs reads programs in the same way.
func (d *document) findProgram() {
	_, text, _ := strings.Cut(string(d.source), "\n```go\npackage ")
	text, rest, _ := strings.Cut(text, "\n```\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	blocks := strings.Split(rest, "\n```") // prose, and blocks that begin with their language, by turns
	if len(blocks) > 3 && strings.HasPrefix(blocks[1], "sh\n") {
		_, line, _ := strings.Cut(blocks[1], "\ngo run .")
		line, _, _ = strings.Cut(line, "\n")
		d.Arguments, blocks = strings.TrimSpace(line), blocks[2:]
	}
	if len(blocks) > 1 && strings.HasPrefix(blocks[1], "\n") && strings.HasPrefix(text, "main\n") && !elsewhere.MatchString(text) {
		d.program = text
	}
}

// compile makes one program for browsers of those of all pages.
func compile(root, to string, all []*document) (err error) {
	folder, err := os.MkdirTemp("", "docsite-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	files := map[string]string{}
	add := func(name, text string) {
		file := filepath.Join(folder, strings.ReplaceAll(name, "/", "-"))
		files[filepath.Join(root, runs, name)] = file
		err = errors.Join(err, os.WriteFile(file, []byte(text), 0o600))
	}
	for _, d := range all {
		if d.program != "" {
			add(d.Name+"/program.go", "package p"+strings.Replace(strings.TrimPrefix(d.program, "main"), "\nfunc main() {", "\nfunc Main() {", 1))
			add(d.Name+".go", fmt.Sprintf("package main\n\nimport p %q\n\nfunc init() { programs[%q] = p.Main }\n", "github.com/hopback/hopback/"+runs+"/"+d.Name, d.Name))
		}
	}
	overlay, _ := json.Marshal(map[string]any{"Replace": files}) // texts can be encoded
	add("overlay.json", string(overlay))
	name := filepath.Join(to, "docs.wasm")
	c := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w -checklinkname=0", "-overlay", filepath.Join(folder, "overlay.json"), "-o", name, "./"+runs)
	c.Dir, c.Env = root, append(os.Environ(), "GOOS=js", "GOARCH=wasm", "GOFLAGS=", "GOWORK="+filepath.Join(root, "go.work"))
	if out, failed := c.CombinedOutput(); failed != nil {
		return errors.Join(err, fmt.Errorf("%s: %w\n%s", strings.Join(c.Args, " "), failed, out))
	}
	text, failed := os.ReadFile(name)
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // there is this level
	_, _ = z.Write(text)                                  // a buffer accepts everything
	err = errors.Join(err, failed, z.Close(), os.WriteFile(name+".gz", b.Bytes(), 0o644))
	fmt.Printf("%s: docs.wasm has %.1f MB, %.2f MB with gzip\n", to, float64(len(text))/1e6, float64(b.Len())/1e6)
	return err
}
