package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/topologyfile"
)

// stdinName is what stdin is called in messages.
const stdinName = "stdin"

// maxInput is how large a definitions document may be.
const maxInput = 64 << 20

// input is a file that was read: a topology file, or definitions.
type input struct {
	name     string
	topology declare.Topology
	// defs is nil for a topology file. vhost is the virtual host that topology was read from.
	defs  *audit.Definitions
	vhost string
}

// read reads a file, or stdin for "-".
func (c *command) read(name string) ([]byte, string, error) {
	var r io.Reader
	if name == "-" {
		r, name = c.io.Stdin, stdinName
	} else {
		info, err := os.Stat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, name, usage("there is no file %q; check the path%s", name, nearby(name))
		case err != nil:
			return nil, name, usage("%s can't be read: %w", name, reasonOf(err))
		case info.IsDir():
			return nil, name, usage("%s is a folder; name a file in it", name)
		}
		f, err := os.Open(name)
		if err != nil {
			return nil, name, usage("%s can't be read: %w", name, reasonOf(err))
		}
		defer func() { _ = f.Close() }()
		r = f
	}
	text, err := io.ReadAll(io.LimitReader(r, maxInput+1))
	switch {
	case err != nil:
		return nil, name, usage("%s can't be read: %w", name, reasonOf(err))
	case len(text) > maxInput:
		return nil, name, usage("%s has more than %d MiB; if it is definitions, export a single virtual host", name, maxInput>>20)
	}
	return text, name, nil
}

// reasonOf is an error without the file's name, which the message names already.
func reasonOf(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// nearby names the topology files next to one that doesn't exist.
func nearby(name string) string {
	var found []string
	for _, pattern := range []string{"*.yaml", "*.yml", "*.json"} {
		list, _ := filepath.Glob(filepath.Join(filepath.Dir(name), pattern))
		found = append(found, list...)
	}
	if len(found) == 0 || len(found) > 5 {
		return ""
	}
	return "; the folder has " + strings.Join(found, ", ")
}

// isDefinitions recognizes definitions by JSON's first brace.
func isDefinitions(text []byte) bool {
	return bytes.HasPrefix(bytes.TrimLeft(bytes.TrimPrefix(text, []byte("\ufeff")), " \t\r\n"), []byte("{"))
}

// load reads a topology file or definitions. to is the command's virtual host, or "".
func (c *command) load(name, to string) (input, error) {
	text, name, err := c.read(name)
	if err != nil {
		return input{}, err
	}
	if !isDefinitions(text) {
		f, err := topologyfile.Parse(name, text)
		return input{name: name, topology: f.Topology}, err
	}
	in, err := definitions(name, text, c.vhost, to)
	if err != nil {
		return in, err
	}
	in.topology, err = in.defs.Topology(in.vhost)
	if err != nil {
		return in, coded(Usage, fmt.Errorf("%s: %w", name, err))
	}
	return in, nil
}

// definitions reads definitions, and chooses the virtual host in them.
func definitions(name string, text []byte, want, to string) (input, error) {
	in := input{name: name}
	if !utf8.Valid(text) {
		return in, usage("%s isn't text in UTF-8; save it as UTF-8", name)
	}
	d, err := audit.ParseDefinitions(bytes.TrimPrefix(text, []byte("\ufeff")))
	if err != nil {
		return in, coded(Usage, fmt.Errorf("%s: %w", name, err))
	}
	in.defs = &d
	vhosts := slices.DeleteFunc(d.VHosts(), func(v string) bool { return v == "" })
	switch {
	case len(d.VHosts()) == 0:
		return in, usage("%s has no queues, exchanges, bindings, or policies; export the definitions again, or name another file", name)
	case want != "":
		if len(vhosts) > 0 && !slices.Contains(vhosts, want) {
			return in, usage("%s has no virtual host %q; --vhost can be %s", name, want, quoted(vhosts))
		}
		in.vhost = want
	case len(vhosts) == 0:
		in.vhost = to
	case to != "" && slices.Contains(vhosts, to):
		in.vhost = to
	case len(vhosts) > 1:
		return in, usage("%s has several virtual hosts, %s; choose one with --vhost", name, quoted(vhosts))
	case to != "" && vhosts[0] != to:
		return in, usage("%s is for the virtual host %q, but --url names %q; correct the URL, or use the file there anyway with --vhost %s", name, vhosts[0], to, vhosts[0])
	default:
		in.vhost = vhosts[0]
	}
	return in, nil
}

func quoted(list []string) string {
	out := make([]string, 0, len(list))
	for _, s := range list[:min(len(list), 10)] {
		out = append(out, fmt.Sprintf("%.80q", s))
	}
	if len(list) > 10 {
		out = append(out, "...")
	}
	return strings.Join(out, ", ")
}
