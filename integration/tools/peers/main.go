// Command peers checks that docs/comparison.md compares hopback with current versions of other clients. It reads the
// table of modules there, asks the Go module proxy for the newest version of each, and exits with 1 if a listed
// version is older than the newest minor release. A module that the proxy doesn't serve is printed and can't be
// checked.
//
//	cd integration/tools && GOWORK=off go run ./peers
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/mod/semver"
)

// row is a row of the table: a module and its version.
var row = regexp.MustCompile("(?m)^\\| [^|]+ \\| `([^`]+)` \\| (v\\S+) \\|$")

func main() {
	log.SetFlags(0)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "comparison.md"))
	if err != nil {
		log.Fatal(err)
	}
	old, err := check(string(text), func(module string) (string, error) { return newest(ctx, module) }, func(line string) { fmt.Println(line) })
	if err != nil {
		log.Fatal(err)
	}
	if old > 0 {
		log.Fatalf("%d of the compared versions are out of date: check their cells in docs/comparison.md, then update the table", old)
	}
}

// check returns how many rows of the page have a version older than the newest minor release.
func check(page string, newest func(module string) (string, error), report func(line string)) (old int, err error) {
	rows := row.FindAllStringSubmatch(page, -1)
	if len(rows) == 0 {
		return 0, fmt.Errorf("docs/comparison.md has no table of modules and versions")
	}
	for _, r := range rows {
		module, listed := r[1], r[2]
		current, err := newest(module)
		switch {
		case err != nil:
			report(fmt.Sprintf("not checked  %s %s: %v", module, listed, err))
		case semver.Compare(semver.MajorMinor(listed), semver.MajorMinor(current)) < 0:
			report(fmt.Sprintf("out of date  %s %s: the newest is %s", module, listed, current))
			old++
		default:
			report(fmt.Sprintf("up to date   %s %s: the newest is %s", module, listed, current))
		}
	}
	return old, nil
}

// newest is the newest version of a module that the proxy serves.
func newest(ctx context.Context, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Version}}", module+"@latest")
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("the module proxy doesn't serve it")
	}
	return strings.TrimSpace(string(out)), nil
}
