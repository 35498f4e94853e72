package vocabulary

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// levels are the methods of a slog.Logger, and which argument is the message.
var levels = map[string]struct {
	name    string
	message int
}{
	"Debug": {"debug", 0}, "Info": {"info", 0}, "Warn": {"warn", 0}, "Error": {"error", 0},
	"DebugContext": {"debug", 1}, "InfoContext": {"info", 1}, "WarnContext": {"warn", 1}, "ErrorContext": {"error", 1},
	"Log": {"", 2},
}

// logged is one call that logs.
type logged struct {
	level, text string // the level is "" if it is chosen while the program runs
	at          token.Position
}

// loggedMessages are the literals that the library and the command log.
func loggedMessages(t *testing.T) (all []logged) {
	t.Helper()
	root := filepath.Join("..", "..")
	skipped := []string{"integration", "examples", "bench", "tools", "internal/chaos", "internal/broker", "internal/dev", "internal/proxy", "internal/service"}
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		in, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains(skipped, filepath.ToSlash(in)) || path != root && strings.HasPrefix(d.Name(), ".") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				if level, text := logs(call); strings.HasPrefix(text, "hopback") || strings.HasPrefix(text, "outbox") {
					all = append(all, logged{level, strings.TrimSpace(text), fset.Position(n.Pos())})
				}
			}
			return true
		})
		return nil
	}))
	return all
}

// logs returns the level and the message of a call that logs.
func logs(call *ast.CallExpr) (level, text string) {
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		if l, ok := levels[f.Sel.Name]; ok && len(call.Args) > l.message {
			return l.name, beginning(call.Args[l.message])
		}
	case *ast.Ident: // a method that was chosen before: level("hopback: ...", "error", err)
		if len(call.Args) >= 3 {
			return "", beginning(call.Args[0])
		}
	}
	return "", ""
}

// beginning is the string that an expression begins with.
func beginning(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		if err == nil {
			return text
		}
	case *ast.BinaryExpr:
		left := beginning(e.X)
		if _, whole := e.X.(*ast.BasicLit); whole {
			return left + beginning(e.Y)
		}
		if b, ok := e.X.(*ast.BinaryExpr); ok && ends(b) {
			return left + beginning(e.Y)
		}
		return left
	}
	return ""
}

// ends reports whether an expression consists of literals only.
func ends(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.BasicLit:
		return true
	case *ast.BinaryExpr:
		return ends(e.X) && ends(e.Y)
	}
	return false
}

// row is a row of docs/logging.md: level, message, when, what to do.
var row = regexp.MustCompile("(?m)^\\| (debug|info|warn|error|warn, then debug|info, or `Policy.LogLevel`) \\| `([^`]+)` \\| (.+) \\| (.+) \\|$")

// docs/logging.md has every message that is logged, with its level, and none that isn't.
func TestThePageOfLogMessagesIsComplete(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "logging.md"))
	require.NoError(t, err)
	rows := map[string][]string{} // the levels, by message
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		rows[m[2]] = append(rows[m[2]], m[1])
	}
	all := loggedMessages(t)
	require.Greater(t, len(all), 60)
	used := map[string]bool{}
	for _, l := range all {
		levels, ok := rows[l.text]
		assert.True(t, ok && (l.level == "" || slices.Contains(levels, l.level)), "docs/logging.md has no row for this message (%s):\n| %s | `%s` | when | what to do |", l.at, l.level, l.text)
		used[l.text] = true
	}
	for text := range rows {
		assert.True(t, used[text], "docs/logging.md has a message that nothing logs: %s", text)
	}
}
