package rabbitmq

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/hopback/hopback/integration/service"
)

// treePath is PATH inside a tree. RabbitMQ's own scripts come before Debian's
// wrappers in /usr/sbin, which change user and hide the log.
const treePath = "/usr/lib/rabbitmq/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// recipe of a tree: what mmdebstrap is asked for.
type recipe struct {
	suite string // of Debian
	args  []string
}

// recipeOf returns the suite that has the version: Debian 13, trixie, has 4.0
// with Erlang 27, and forky 4.3 with Erlang 29.
//
// The hooks make the tree look like the official image where the compose file
// looks: the folder for configuration files, and the entry point.
func recipeOf(version string) recipe {
	suite := map[string]string{"4.0": "trixie", "4.3": "forky"}[version]
	return recipe{suite, []string{
		"--variant=essential",
		"--include=rabbitmq-server,ca-certificates",
		"--components=main",
		// A suite that is not released yet may go without a fresh Release file.
		`--aptopt=Acquire::Check-Valid-Until "false"`,
		`--aptopt=Acquire::Retries "3"`,
		`--customize-hook=printf "127.0.0.1 localhost\n" >"$1/etc/hosts"`,
		`--customize-hook=mkdir -p "$1/etc/rabbitmq/conf.d"`,
		`--customize-hook=printf "loopback_users = none\n" >"$1/etc/rabbitmq/conf.d/10-defaults.conf"`,
		`--customize-hook=printf "[rabbitmq_management].\n" >"$1/etc/rabbitmq/enabled_plugins"`,
		`--customize-hook=printf '#!/bin/sh\nexec "$@"\n' >"$1/usr/local/bin/docker-entrypoint.sh"`,
		`--customize-hook=chmod 755 "$1/usr/local/bin/docker-entrypoint.sh"`,
		`--customize-hook=chroot "$1" chown -R rabbitmq: /etc/rabbitmq`,
	}}
}

// hash distinguishes recipes in the names of what they make.
func (r recipe) hash() string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(r.suite+"\n"+strings.Join(r.args, "\n"))))[:8]
}

// trees makes and keeps Debian trees with RabbitMQ inside.
type trees struct{ dir string }

// seal is written last, next to what it vouches for: without it, or if it
// doesn't match, what is there is half or broken.
type seal struct {
	Size   int64  `json:"size"`             // bytes, of all files
	Files  int    `json:"files,omitempty"`  // of a folder
	SHA256 string `json:"sha256,omitempty"` // of a file
}

func (t *trees) path(version string) string {
	return filepath.Join(t.dir, "rabbitmq-"+version+"-"+recipeOf(version).hash())
}

// tar returns the path of a tar of the tree, built if it isn't there.
func (t *trees) tar(ctx context.Context, version string, say sayFunc) (string, error) {
	lock, err := t.lock(ctx, version, say)
	if err != nil {
		return "", err
	}
	defer lock.unlock()
	return t.tarLocked(ctx, version, say)
}

func (t *trees) lock(ctx context.Context, version string, say sayFunc) (*flock, error) {
	if recipeOf(version).suite == "" {
		return nil, fmt.Errorf("no suite of Debian has RabbitMQ %s", version)
	}
	return waitLock(ctx, filepath.Join(t.dir, version+".lock"), false, func() { say("waiting for another process that builds it") })
}

func (t *trees) tarLocked(ctx context.Context, version string, say sayFunc) (string, error) {
	path := t.path(version) + ".tar"
	switch err := checkFile(path); {
	case err == nil:
		return path, nil
	case !errors.Is(err, fs.ErrNotExist):
		say("the kept tree can't be used (%v); building it again", err)
	}
	if err := t.mmdebstrap(ctx, say); err != nil {
		return "", err
	}
	// We hold the lock, so anything there was left by a process that crashed.
	tmp := t.path(version) + ".tmp"
	if err := removeTree(tmp); err != nil {
		return "", err
	}
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return "", err
	}
	defer func() { _ = removeTree(tmp) }()
	r := recipeOf(version)
	done := say.during("building RabbitMQ from the packages of Debian %s; once only, within a minute or so", r.suite)
	defer done()
	built := filepath.Join(tmp, "tree.tar")
	args := append([]string{"mmdebstrap"}, r.args...)
	args = append(args, r.suite, built)
	if os.Geteuid() == 0 && runtime.GOOS == "linux" {
		// In a pid namespace all of it ends with us, even by kill -9, and in a
		// mount namespace nothing stays mounted.
		args = append([]string{"unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"}, args...)
	}
	if err := t.build(ctx, tmp, args); err != nil {
		return "", err
	}
	if err := sealFile(built, path); err != nil {
		return "", err
	}
	return path, nil
}

// build runs the builder as a child that dies with us. The kernel ties that to
// the thread that started it, hence the lock.
func (t *trees) build(ctx context.Context, tmp string, args []string) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := command(ctx, []string{"TMPDIR=" + tmp, "DEBIAN_FRONTEND=noninteractive"}, args[0], args[1:]...)
	diesWithUs(cmd)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	return commandError(ctx, cmd.Run(), "mmdebstrap", nil, log.String())
}

// mmdebstrap makes sure that it is here.
func (t *trees) mmdebstrap(ctx context.Context, say sayFunc) error {
	lock, err := waitLock(ctx, filepath.Join(t.dir, "apt.lock"), false, nil)
	if err != nil {
		return err
	}
	defer lock.unlock()
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		defer say.during("installing mmdebstrap by apt-get")()
	}
	_, err = service.Program(ctx, nil, "mmdebstrap", "mmdebstrap")
	return err
}

// unpacked returns the folder of the tree, made if it isn't there.
func (t *trees) unpacked(ctx context.Context, version string, say sayFunc) (string, error) {
	lock, err := t.lock(ctx, version, say)
	if err != nil {
		return "", err
	}
	defer lock.unlock()
	path := t.path(version)
	switch err := checkFolder(path); {
	case err == nil:
		return path, nil
	case !errors.Is(err, fs.ErrNotExist):
		say("the unpacked tree can't be used (%v); unpacking it again", err)
	}
	tar, err := t.tarLocked(ctx, version, say)
	if err != nil {
		return "", err
	}
	defer say.during("unpacking the tree")()
	tmp := path + ".tmp"
	if err := errors.Join(removeTree(tmp), removeTree(path)); err != nil {
		return "", err
	}
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return "", err
	}
	// Devices are left out: the broker sees those of the machine.
	if _, err := run(ctx, nil, "tar", "-C", tmp, "--numeric-owner", "--exclude=./dev/*", "-xf", tar); err != nil {
		return "", errors.Join(err, removeTree(tmp))
	}
	return path, sealFolder(tmp, path)
}

// removeTree is os.RemoveAll, but not through what is still mounted there.
func removeTree(path string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err == nil && strings.Contains(string(mounts), " "+path+"/") {
		return fmt.Errorf("something is mounted below %s; unmount it", path)
	}
	return os.RemoveAll(path)
}

// sealFile moves a finished file to its place.
func sealFile(from, to string) error {
	s, err := measureFile(from)
	if err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return writeSeal(to, s)
}

func sealFolder(from, to string) error {
	s, err := measureFolder(from)
	if err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return writeSeal(to, s)
}

func writeSeal(path string, s seal) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return writeFile(path+".seal", append(text, '\n'))
}

func checkFile(path string) error   { return check(path, measureFile) }
func checkFolder(path string) error { return check(path, measureFolder) }

func check(path string, measure func(string) (seal, error)) error {
	is, err := measure(path)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path + ".seal")
	if err != nil {
		return fmt.Errorf("it wasn't finished")
	}
	var ought seal
	if err := json.Unmarshal(text, &ought); err != nil || is != ought {
		return fmt.Errorf("%s has changed since it was made", filepath.Base(path))
	}
	return nil
}

func measureFile(path string) (seal, error) {
	f, err := os.Open(path)
	if err != nil {
		return seal{}, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	return seal{Size: n, SHA256: fmt.Sprintf("%x", h.Sum(nil))}, err
}

// measureFolder counts, as reading 10,000 files each time would take seconds.
func measureFolder(path string) (seal, error) {
	var s seal
	err := filepath.WalkDir(path, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		s.Files++
		if !e.Type().IsRegular() {
			return nil
		}
		info, err := e.Info()
		if err == nil {
			s.Size += info.Size()
		}
		return err
	})
	return s, err
}
