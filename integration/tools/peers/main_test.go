package main

import (
	"errors"
	"strings"
	"testing"
)

func TestOldVersionsAreNamed(t *testing.T) {
	page := "| peer | module | version |\n| --- | --- | --- |\n" +
		"| a | `example.com/a` | v1.2.0 |\n| b | `example.com/b` | v1.2.0 |\n| c | `example.com/c` | v1.2.0 |\n"
	newest := map[string]string{"example.com/a": "v1.2.9", "example.com/b": "v1.3.0"}
	var lines []string
	old, err := check(page, func(m string) (string, error) {
		if newest[m] == "" {
			return "", errors.New("gone")
		}
		return newest[m], nil
	}, func(line string) { lines = append(lines, line[:strings.Index(line, " v")]) })
	if err != nil || old != 1 || strings.Join(lines, "; ") != "up to date   example.com/a; out of date  example.com/b; not checked  example.com/c" {
		t.Fatal(old, err, lines)
	}
	if _, err := check("", nil, nil); err == nil {
		t.Fatal("a page without a table passes")
	}
}
