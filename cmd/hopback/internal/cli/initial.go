package cli

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/address"
)

//go:embed initial
var initialFiles embed.FS

// moduleName is what a Go module may be called here.
var moduleName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._~-]*(/[A-Za-z0-9._~-]+)*$`)

// initial is "hopback init".
func (c *command) initial() *cobra.Command {
	var module, queue string
	cmd := &cobra.Command{
		Use:   "init DIR",
		Short: "Write a new worker: a program, a test, and a compose file",
		Long: `Write a Go module with a worker that can run: main.go with a queue, its retries, and a
handler; main_test.go, which runs the handler on a RabbitMQ in memory; and compose.yaml,
which starts a RabbitMQ. Existing files stay as they are, and the command fails.`,
		Example: `  hopback init worker
  hopback init worker --module example.com/orders --queue orders`,
		Args: takes(1, 1, "DIR"),
		RunE: func(_ *cobra.Command, args []string) error {
			if module == "" {
				module = "example.com/" + filepath.Base(filepath.Clean(args[0]))
			}
			if !moduleName.MatchString(module) {
				return usage("--module %.80q isn't the path of a Go module; write it like example.com/orders", module)
			}
			if err := address.Queue(queue).Validate(); err != nil {
				return coded(Usage, err)
			}
			return c.writeInitial(args[0], module, queue)
		},
	}
	c.outputFlag(cmd, "the names of the files")
	cmd.Flags().StringVar(&module, "module", "", "path of the Go module; default: example.com/ and the name of the folder")
	cmd.Flags().StringVar(&queue, "queue", "orders", "name of the queue")
	return cmd
}

// writeInitial writes the files. If one exists, none is written.
func (c *command) writeInitial(dir, module, queue string) error {
	files := map[string]string{"go.mod": "module " + module + "\n\ngo 1.26.0\n"}
	entries, err := initialFiles.ReadDir("initial")
	if err != nil {
		return err
	}
	for _, e := range entries {
		t, err := template.ParseFS(initialFiles, "initial/"+e.Name())
		if err != nil {
			return err
		}
		var text strings.Builder
		if err := t.Execute(&text, map[string]string{"Queue": queue}); err != nil {
			return err
		}
		files[strings.TrimSuffix(e.Name(), ".txt")] = text.String()
	}
	for name := range files {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			return coded(No, fmt.Errorf("%s exists already; nothing was written", filepath.Join(dir, name)))
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if c.structured() {
		return c.printStructured(map[string]any{"folder": dir, "files": slices.Sorted(maps.Keys(files))})
	}
	_, err = fmt.Fprintf(c.stdout.w, `Wrote go.mod, main.go, main_test.go, and compose.yaml. Next:
  cd %s
  go mod tidy              # if hopback isn't tagged yet, first: go mod edit -replace github.com/hopback/hopback=CLONE
  go test ./...            # no broker needed
  docker compose up -d     # RabbitMQ; without Docker: hopback broker
  go run .
  hopback publish %s --body '{"id": "m-1"}'
`, shellWord(dir), shellWord(queue))
	return err
}

// shellWord is an argument as a shell reads it.
func shellWord(s string) string {
	if regexp.MustCompile(`^[A-Za-z0-9_./-]+$`).MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
