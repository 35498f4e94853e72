//go:build !js

package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"embed"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
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
	run := flag.String("run", "", "run a message with these `settings`, in JSON as the page's, and print its history as a client sees it; writes no folder")
	broker := flag.String("broker", "", "`URL` of the broker for -run (default the one in memory)")
	flag.Parse()
	err := error(nil)
	if *run != "" {
		err = observeTo(os.Stdout, *run, *broker)
	} else {
		err = build(*to, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "playground:", err)
		os.Exit(1)
	}
}

// observeTo prints what observe returns.
func observeTo(out io.Writer, text, url string) error {
	var s settings
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	history, err := observe(ctx, s, url)
	if err == nil {
		_, err = io.WriteString(out, history)
	}
	return err
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
		if err != nil {
			return err
		}
		if err := write(to, e.Name(), text); err != nil {
			return err
		}
	}
	root, err := output(nil, "env", "GOROOT")
	if err != nil {
		return err
	}
	runtime, err := os.ReadFile(filepath.Join(strings.TrimSpace(root), "lib", "wasm", "wasm_exec.js"))
	if err != nil {
		return err
	}
	if err := write(to, "wasm_exec.js", runtime); err != nil {
		return err
	}
	if _, err := output([]string{"GOOS=js", "GOARCH=wasm", "GOFLAGS="}, "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(to, programName), "github.com/hopback/hopback/operate/playground"); err != nil {
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

func write(folder, name string, text []byte) error {
	return os.WriteFile(filepath.Join(folder, name), text, 0o644)
}

// compress writes a file with gzip next to it, for servers that send that.
func compress(name string) (size, compressed int, err error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, 0, err
	}
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return 0, 0, err
	}
	if _, err := z.Write(text); err != nil {
		return 0, 0, err
	}
	if err := z.Close(); err != nil {
		return 0, 0, err
	}
	return len(text), b.Len(), os.WriteFile(name+".gz", b.Bytes(), 0o644)
}
