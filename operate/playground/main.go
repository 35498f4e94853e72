//go:build !js

package main

import (
	"bytes"
	"compress/gzip"
	"embed"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// static are the files that are copied unchanged.
//
//go:embed page
var static embed.FS

// maxCompressed is how large the program may be with gzip.
const maxCompressed = 5 << 20

const programName = "playground.wasm"

func main() {
	to := flag.String("o", filepath.Join("bin", "site"), "`folder` to write")
	flag.Parse()
	if err := build(*to, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "playground:", err)
		os.Exit(1)
	}
}

// build writes the site to a folder. It runs in the module's folder.
func build(to string, log io.Writer) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	entries, err := static.ReadDir("page")
	if err != nil {
		return err
	}
	for _, e := range entries {
		text, err := static.ReadFile("page/" + e.Name())
		if err == nil {
			err = os.WriteFile(filepath.Join(to, e.Name()), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	root, err := output(nil, "env", "GOROOT")
	if err != nil {
		return err
	}
	runtime, err := os.ReadFile(filepath.Join(strings.TrimSpace(root), "lib", "wasm", "wasm_exec.js"))
	if err == nil {
		err = os.WriteFile(filepath.Join(to, "wasm_exec.js"), runtime, 0o644)
	}
	if err == nil {
		_, err = output([]string{"GOOS=js", "GOARCH=wasm", "GOFLAGS="}, "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(to, programName), "github.com/hopback/hopback/operate/playground")
	}
	if err != nil {
		return err
	}
	size, compressed, err := compress(filepath.Join(to, programName))
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(log, "%s: %s has %.1f MB, %.2f MB with gzip\n", to, programName, float64(size)/1e6, float64(compressed)/1e6)
	if err == nil && compressed > maxCompressed {
		err = fmt.Errorf("%s has %d bytes with gzip, and may have %d", programName, compressed, maxCompressed)
	}
	return err
}

// output runs the go command with additional variables.
func output(env []string, args ...string) (string, error) {
	c := exec.Command("go", args...)
	c.Env = append(os.Environ(), env...)
	var problem bytes.Buffer
	c.Stderr = &problem
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(c.Args, " "), err, problem.Bytes())
	}
	return string(out), nil
}

// compress writes a file with gzip next to it, for servers that send that.
func compress(name string) (size, compressed int, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, 0, err
	}
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // there is this level, and a buffer accepts all
	_, _ = z.Write(text)
	_ = z.Close()
	return len(text), b.Len(), os.WriteFile(name+".gz", b.Bytes(), 0o644)
}
