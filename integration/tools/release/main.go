// Command release checks that a version can be released, and says how. It packs each module of
// this commit as that version into a module proxy in a folder, and then does what users do: "go
// install" of the command, and "go get" and "go build" of the libraries, in empty folders.
// Nothing leaves this machine.
//
//	cd integration/tools && go run ./release v0.1.0
//
// The last lines are the commands that tag and push. Modules require each other by their go.mod
// files, so these must name the version already. With -write, release writes it there, into the heading of
// CHANGELOG.md, and into README.md's lines about how to get hopback, and you commit it. With -proxy, the module proxy stays in the folder you name, so you can try the version
// before there is a tag. With -artifacts, release also builds what a release on GitHub offers: the command for all
// platforms, with bills of materials and checksums.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
	"golang.org/x/mod/zip"
)

const root = "github.com/hopback/hopback"

// published are the folders of the released modules. The root comes first, and each module comes
// after those that it requires.
var published = []string{"", "operate/topologyfile", "postgres", "adapter/officialclient", "hopbackotel", "middleware/dedupe/redisstore", "cmd/hopback"}

func main() {
	log.SetFlags(0)
	write := flag.Bool("write", false, "write the version into the go.mod files, go.work, CHANGELOG.md, and README.md, and stop")
	keep := flag.String("proxy", "", "keep the module proxy in this `folder`, and print how to use it")
	artifacts := flag.String("artifacts", "", "also build the command for all platforms into this `folder`, which is emptied first, with a bill of materials for each, and checksums")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: release [-write] [-proxy folder] [-artifacts folder] v1.2.3")
		flag.PrintDefaults()
	}
	flag.Parse()
	version := flag.Arg(0)
	if flag.NArg() != 1 || !semver.IsValid(version) || semver.Canonical(version) != version {
		flag.Usage()
		os.Exit(64)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	top, err := output(ctx, "", nil, "git", "rev-parse", "--show-toplevel")
	if err == nil && *write {
		err = errors.Join(writeVersion(top, version), writePages(top, version, time.Now()))
	} else if err == nil {
		err = check(ctx, top, version, *keep, *artifacts)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// check installs and builds the last commit the way users will.
func check(ctx context.Context, top, version, keep, artifacts string) error {
	dir, err := os.MkdirTemp("", "hopback-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	proxy := filepath.Join(dir, "proxy")
	if keep != "" {
		if proxy, err = filepath.Abs(keep); err != nil {
			return err
		}
	}
	tree := filepath.Join(dir, "commit")
	if err := unpack(ctx, top, tree); err != nil {
		return err
	}
	dated, err := checkChangelog(tree, version)
	if err != nil {
		return err
	}
	if err := pack(tree, proxy, version); err != nil {
		return err
	}
	env, err := environment(ctx, dir, proxy)
	if err != nil {
		return err
	}
	if err := install(ctx, dir, env, version); err != nil {
		return err
	}
	if err := useLibraries(ctx, dir, tree, env, version); err != nil {
		return err
	}
	if artifacts != "" {
		seconds, err := output(ctx, top, nil, "git", "show", "-s", "--format=%ct", "HEAD")
		if err != nil {
			return err
		}
		n, err := strconv.ParseInt(seconds, 10, 64)
		if err != nil {
			return err
		}
		if err := buildArtifacts(ctx, dir, env, version, time.Unix(n, 0), artifacts); err != nil {
			return err
		}
	}
	fmt.Println("\nEverything installs and builds.")
	if keep != "" {
		fmt.Printf("To use the version before it is tagged:\n\texport GOPROXY=file://%s,$(go env GOPROXY) GONOSUMDB=%s,%[2]s/*\n", proxy, root)
	}
	if !dated {
		fmt.Printf("CHANGELOG.md has no dated section for %s yet. To release it, run release -write %[1]s, commit, and run this again.\n", version)
		return nil
	}
	fmt.Println("To release it, tag this commit once for each module, and push these tags together:")
	var tags []string
	for _, folder := range published {
		tags = append(tags, tag(folder, version))
		fmt.Printf("\tgit tag %s\n", tag(folder, version))
	}
	fmt.Printf("\tgit push --atomic origin %s\n", strings.Join(tags, " "))
	return nil
}

// tag is the name under which Go finds a module's version in a repository.
func tag(folder, version string) string {
	if folder == "" {
		return version
	}
	return folder + "/" + version
}

func modulePath(folder string) string {
	if folder == "" {
		return root
	}
	return root + "/" + folder
}

// unpack writes the files of the last commit to a new folder, without anything else that is in the
// checkout.
func unpack(ctx context.Context, top, tree string) error {
	if err := os.Mkdir(tree, 0o755); err != nil {
		return err
	}
	archive := tree + ".tar"
	if _, err := output(ctx, top, nil, "git", "archive", "-o", archive, "HEAD"); err != nil {
		return err
	}
	_, err := output(ctx, tree, nil, "tar", "-xf", archive)
	return err
}

// checkChangelog reports whether CHANGELOG.md has a dated section for the version. It refuses one that has neither
// that nor entries under "Unreleased".
func checkChangelog(tree, version string) (dated bool, err error) {
	text, err := os.ReadFile(filepath.Join(tree, "CHANGELOG.md"))
	if err != nil {
		return false, err
	}
	number := strings.TrimPrefix(version, "v")
	if regexp.MustCompile(`(?m)^## \[` + regexp.QuoteMeta(number) + `\] - \d{4}-\d\d-\d\d$`).Match(text) {
		return true, nil
	}
	if !bytes.Contains(text, []byte(unreleased)) {
		return false, fmt.Errorf("CHANGELOG.md has neither %q nor a dated section for %s", unreleased, version)
	}
	return false, nil
}

// unreleased is the heading over what the next version will have.
const unreleased = "\n## [Unreleased]\n"

// writePages writes the version into CHANGELOG.md, whose entries under "Unreleased" get a dated section, and into
// README.md, which says how to get a version that is tagged.
func writePages(top, version string, now time.Time) error {
	number := strings.TrimPrefix(version, "v")
	changelog := filepath.Join(top, "CHANGELOG.md")
	text, err := os.ReadFile(changelog)
	if err != nil {
		return err
	}
	if !bytes.Contains(text, []byte("\n## ["+number+"] - ")) {
		dated := unreleased + "\n## [" + number + "] - " + now.Format(time.DateOnly) + "\n"
		links := regexp.MustCompile(`(?m)^\[Unreleased\]: .*$`)
		if !bytes.Contains(text, []byte(unreleased)) || !links.Match(text) {
			return errors.New(`CHANGELOG.md lacks the heading "## [Unreleased]", or its link at the bottom`)
		}
		text = bytes.Replace(text, []byte(unreleased), []byte(dated), 1)
		text = links.ReplaceAll(text, fmt.Appendf(nil, "[Unreleased]: https://%s/compare/%s...HEAD\n[%s]: https://%[1]s/releases/tag/%[2]s", root, version, number))
		if err := os.WriteFile(changelog, text, 0o644); err != nil {
			return err
		}
	}
	readme := filepath.Join(top, "README.md")
	if text, err = os.ReadFile(readme); err != nil {
		return err
	}
	blocks := regexp.MustCompile(`(?s)(<!-- release: [^\n]*-->\n).*?(<!-- /release -->)`)
	released := []string{"The newest version is " + version + ".\n", strings.Join([]string{
		"```sh",
		"go get " + root + "@" + version,
		"go install " + root + "/cmd/hopback@" + version,
		"docker run -d -p 5672:5672 -p 15672:15672 rabbitmq:4.3-management # a broker",
		"```", "",
	}, "\n")}
	if n := len(blocks.FindAll(text, -1)); n != len(released) {
		return fmt.Errorf("README.md has %d blocks between release comments, not %d", n, len(released))
	}
	next := 0
	text = blocks.ReplaceAllFunc(text, func(block []byte) []byte {
		m := blocks.FindSubmatch(block)
		next++
		return slices.Concat(m[1], []byte(released[next-1]), m[2])
	})
	return os.WriteFile(readme, text, 0o644)
}

// pack writes each module below tree into a module proxy.
func pack(tree, proxy, version string) error {
	for _, folder := range published {
		path := modulePath(folder)
		text, err := os.ReadFile(filepath.Join(tree, folder, "go.mod"))
		if err != nil {
			return err
		}
		mod, err := modfile.Parse("go.mod", text, nil)
		if err != nil {
			return err
		}
		for _, r := range mod.Require {
			if ours(r.Mod.Path) && r.Mod.Version != version {
				return fmt.Errorf("%s/go.mod requires %s %s: run release -write %s, and commit", folder, r.Mod.Path, r.Mod.Version, version)
			}
		}
		escaped, err := module.EscapePath(path)
		if err != nil {
			return err
		}
		at := filepath.Join(proxy, escaped, "@v")
		if err := os.MkdirAll(at, 0o755); err != nil {
			return err
		}
		var zipped bytes.Buffer
		if err := zip.CreateFromDir(&zipped, module.Version{Path: path, Version: version}, filepath.Join(tree, folder)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		info := fmt.Sprintf(`{"Version":%q,"Time":%q}`, version, time.Now().UTC().Format(time.RFC3339))
		for name, content := range map[string][]byte{
			"list": []byte(version + "\n"), version + ".info": []byte(info), version + ".mod": text, version + ".zip": zipped.Bytes(),
		} {
			if err := os.WriteFile(filepath.Join(at, name), content, 0o600); err != nil {
				return err
			}
		}
		fmt.Printf("packed     %-60s %4d kB\n", path+"@"+version, zipped.Len()>>10)
	}
	return nil
}

func ours(path string) bool { return path == root || strings.HasPrefix(path, root+"/") }

// environment makes Go download hopback's modules from the proxy, and all others from this
// machine's module cache or their usual source.
func environment(ctx context.Context, dir, ours string) ([]string, error) {
	vars, err := output(ctx, "", nil, "go", "env", "GOMODCACHE", "GOPROXY")
	if err != nil {
		return nil, err
	}
	cache, proxy, _ := strings.Cut(vars, "\n")
	return append(os.Environ(),
		"GOWORK=off", "GOFLAGS=-modcacherw -mod=mod",
		"GOMODCACHE="+filepath.Join(dir, "cache"), "GOBIN="+filepath.Join(dir, "bin"),
		"GOPROXY=file://"+ours+",file://"+filepath.Join(cache, "cache", "download")+","+proxy,
		"GONOSUMDB="+root+","+root+"/*"), nil
}

// install installs the command as its users do.
func install(ctx context.Context, dir string, env []string, version string) error {
	if _, err := output(ctx, dir, env, "go", "install", modulePath("cmd/hopback")+"@"+version); err != nil {
		return err
	}
	printed, err := output(ctx, dir, env, filepath.Join(dir, "bin", "hopback"), "--version")
	if err != nil {
		return err
	}
	if !strings.Contains(printed, version) {
		return fmt.Errorf("hopback --version prints %q, without %s", printed, version)
	}
	fmt.Printf("installed  %s\n", printed)
	return nil
}

// useLibraries builds a module that imports a package of each library, and a module that is
// README.md's first program.
func useLibraries(ctx context.Context, dir, tree string, env []string, version string) error {
	readme, err := os.ReadFile(filepath.Join(tree, "README.md"))
	if err != nil {
		return err
	}
	program := regexp.MustCompile("(?s)\n```go\n(.*?\n)```\n").FindSubmatch(readme)
	if program == nil {
		return errors.New("README.md has no Go program")
	}
	imports := []string{"client", "postgres/outbox", "postgres/inbox", "operate/topologyfile", "hopbackotel", "adapter/officialclient", "middleware/dedupe/redisstore"}
	var all strings.Builder
	all.WriteString("package main\n\nimport (\n")
	for _, path := range imports {
		fmt.Fprintf(&all, "\t_ %q\n", root+"/"+path)
	}
	all.WriteString(")\n\nfunc main() {}\n")
	for name, text := range map[string]string{"first": string(program[1]), "libraries": all.String()} {
		at := filepath.Join(dir, name)
		if err := os.Mkdir(at, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(at, "main.go"), []byte(text), 0o600); err != nil {
			return err
		}
		steps := [][]string{{"go", "mod", "init", name}}
		for _, folder := range published {
			if folder == "" || name == "libraries" && folder != "cmd/hopback" {
				steps = append(steps, []string{"go", "mod", "edit", "-require=" + modulePath(folder) + "@" + version})
			}
		}
		steps = append(steps, []string{"go", "build", "-o", os.DevNull, "."})
		for _, step := range steps {
			if _, err := output(ctx, at, env, step[0], step[1:]...); err != nil {
				return err
			}
		}
		fmt.Printf("built      %s\n", name)
	}
	return nil
}

// writeVersion makes all modules require version of each other.
func writeVersion(top, version string) error {
	folders := append(slices.Clone(published), "integration/bench", "examples")
	for _, folder := range folders {
		name := filepath.Join(top, folder, "go.mod")
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		mod, err := modfile.Parse(name, text, nil)
		if err != nil {
			return err
		}
		for _, r := range mod.Require {
			if ours(r.Mod.Path) {
				if err := mod.AddRequire(r.Mod.Path, version); err != nil {
					return err
				}
			}
		}
		if text, err = mod.Format(); err != nil {
			return err
		}
		if err := os.WriteFile(name, text, 0o644); err != nil {
			return err
		}
	}
	name := filepath.Join(top, "go.work")
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	work, err := modfile.ParseWork(name, text, nil)
	if err != nil {
		return err
	}
	for _, r := range work.Replace {
		if i := slices.Index(r.Syntax.Token, r.Old.Version); ours(r.Old.Path) && i >= 0 {
			r.Syntax.Token[i] = version // AddReplace would lose the comment
		}
	}
	return os.WriteFile(name, modfile.Format(work.Syntax), 0o644)
}

// output runs a command and returns what it prints.
func output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr.String())
	}
	return strings.TrimSpace(string(out)), nil
}
