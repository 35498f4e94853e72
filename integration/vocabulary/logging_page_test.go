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
	skipped := []string{"integration", "examples"}
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

// row is an item of docs/observability.md: level and message, and perhaps the cause or what to do.
var row = regexp.MustCompile("(?m)^- (debug|info|warn|error|warn, then debug|warn, or debug|info, or `Policy.LogLevel`) `([^`]+)`(?:: .+)?$")

// docs/observability.md has every warning and error that is logged, with its level, and no message
// that isn't logged. An item that ends with … has the beginning of a message.
func TestThePageOfLogMessagesIsComplete(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "observability.md"))
	require.NoError(t, err)
	rows := row.FindAllStringSubmatch(string(page), -1) // level, message
	require.Greater(t, len(rows), 60)
	used := make([]bool, len(rows))
	for _, l := range loggedMessages(t) {
		found := l.level == "debug" || l.level == "info" // these rows are optional
		for i, r := range rows {
			beginning, cut := strings.CutSuffix(r[2], "…")
			if l.text == r[2] || cut && strings.HasPrefix(l.text, beginning) {
				used[i] = true
				found = found || l.level == "" || r[1] == l.level
			}
		}
		assert.True(t, found, "docs/observability.md doesn't list this message (%s):\n- %s `%s`: cause, or what to do", l.at, l.level, l.text)
	}
	for i, r := range rows {
		assert.True(t, used[i], "docs/observability.md has a message that nothing logs: %s", r[2])
	}
}
