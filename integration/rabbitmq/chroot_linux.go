package rabbitmq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hopback/hopback/argument"
)

// chroot runs brokers in a tree, in mount and pid namespaces of their own:
// when the first process of a pid namespace ends, the kernel ends the others,
// Erlang's epmd included, and with them go the mounts.
type chroot struct {
	trees  *trees
	id     string // keeps apart in memory the data of different cache folders
	runDir func(name string) string
	given  func(version string) string // a tree of the environment's, or ""
}

// chrootInit is the first process of the namespaces. It waits for its number
// to be on record before it starts, and stops if its parent has crashed.
//
// The tree is read-only, so that brokers can share it and leave it unchanged.
const chrootInit = `set -e
root=$1 data=$2
shift 2
read -r go
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$data" "$root/var/lib/rabbitmq"
chroot "$root" chown -R rabbitmq: /var/lib/rabbitmq
exec chroot "$root" /usr/bin/env -i "$@" </dev/null
`

func (c *chroot) prepare(ctx context.Context, version string, say sayFunc) (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("needs root")
	}
	if _, err := run(ctx, nil, "unshare", "--mount", "--pid", "--fork", "mount", "--make-rprivate", "/"); err != nil {
		return "", fmt.Errorf("no namespaces can be made here: %w", err)
	}
	if tree := c.given(version); tree != "" {
		if _, err := os.Stat(filepath.Join(tree, "usr/lib/rabbitmq/bin/rabbitmq-server")); err != nil {
			return "", argument.New(envName("HOPBACK_TREE_", version), tree, "isn't a system with RabbitMQ's Debian package", "name the folder of one, or unset it").Because(err)
		}
		return tree, nil
	}
	return c.trees.unpacked(ctx, version, say)
}

// environment of the broker and of rabbitmqctl, the same for both.
func (c *chroot) environment(s *state) []string {
	const loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
	// As in docker-compose.yml.
	const handOver = "-rabbit dead_letter_worker_publisher_confirm_timeout 10000"
	arguments := loopback + " " + handOver
	if s.Lean {
		arguments += " " + leanArguments
	}
	return []string{
		"PATH=" + treePath,
		"HOME=/var/lib/rabbitmq",
		"LANG=C.UTF-8",
		"RABBITMQ_NODENAME=rabbit@localhost", // alone in its epmd
		"RABBITMQ_CONFIG_FILE=/var/lib/rabbitmq/rabbitmq.conf",
		"RABBITMQ_ENABLED_PLUGINS_FILE=/var/lib/rabbitmq/enabled_plugins",
		"RABBITMQ_MNESIA_BASE=/var/lib/rabbitmq/mnesia",
		"RABBITMQ_LOG_BASE=/var/lib/rabbitmq/log",
		"RABBITMQ_LOGS=-",
		"RABBITMQ_LOG=warning",
		fmt.Sprintf("RABBITMQ_DIST_PORT=%d", s.Ports.Dist),
		fmt.Sprintf("ERL_EPMD_PORT=%d", s.Ports.EPMD),
		"ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=" + arguments,
		"RABBITMQ_CTL_ERL_ARGS=" + loopback,
	}
}

// inMemory is where Linux keeps files in memory.
const inMemory = "/dev/shm"

// roomInMemory says whether the data of a few test brokers, some 100 MiB each, surely fit
// in there. They outlive a broker that is killed, as on a disk.
func roomInMemory() bool {
	const tmpfs, enough = 0x01021994, 4 << 30
	var fs syscall.Statfs_t
	return syscall.Statfs(inMemory, &fs) == nil && fs.Type == tmpfs && fs.Bavail*uint64(fs.Bsize) >= enough
}

func (c *chroot) memoryDir() string { return filepath.Join(inMemory, "hopback-broker-"+c.id) }

func (c *chroot) logPath(s *state) string { return filepath.Join(c.runDir(s.Name), "broker.log") }

// asRabbitmq is the command to run something as the tree's broker user.
var asRabbitmq = []string{"setpriv", "--reuid=rabbitmq", "--regid=rabbitmq", "--init-groups"}

func (c *chroot) start(ctx context.Context, s *state, save func() error) error {
	if s.Data == "" {
		s.Data = filepath.Join(c.runDir(s.Name), "data")
		if s.Lean && roomInMemory() {
			s.Data = filepath.Join(c.memoryDir(), s.Name)
		}
		if err := save(); err != nil {
			return err
		}
	}
	data := s.Data
	if err := os.MkdirAll(data, 0o755); err != nil {
		return err
	}
	conf := fmt.Sprintf("loopback_users = none\nlisteners.tcp.1 = 127.0.0.1:%d\nmanagement.tcp.ip = 127.0.0.1\nmanagement.tcp.port = %d\n", s.Ports.AMQP, s.Ports.HTTP)
	if err := os.WriteFile(filepath.Join(data, "rabbitmq.conf"), []byte(conf), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(data, "enabled_plugins"), []byte("[rabbitmq_management].\n"), 0o644); err != nil {
		return err
	}
	log, err := os.OpenFile(c.logPath(s), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	gate, open, err := os.Pipe()
	if err != nil {
		return err
	}
	defer open.Close()
	args := append([]string{"-c", chrootInit, "init", s.Source, data}, c.environment(s)...)
	args = append(append(args, asRabbitmq...), "rabbitmq-server")
	// Not bound to ctx, nor waited for: it outlives this process if need be.
	cmd := exec.Command("/bin/sh", args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = gate, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Setsid:     true,
	}
	err = withoutInheritedFiles(cmd.Start)
	_ = gate.Close()
	if err != nil {
		return err
	}
	defer cmd.Process.Release()
	_, s.PIDStart, err = processStat(cmd.Process.Pid)
	s.PID = cmd.Process.Pid
	if err == nil {
		err = save()
	}
	if err == nil {
		_, err = io.WriteString(open, "go\n")
	}
	if err != nil {
		return errors.Join(err, c.kill(ctx, s))
	}
	return nil
}

var inheriting sync.Mutex

// withoutInheritedFiles keeps the files that this process has inherited from being
// handed on by start. A broker outlives us, and who reads a pipe that it holds open
// would wait for its end. Go closes its own files in what it starts, and no others.
func withoutInheritedFiles(start func() error) error {
	// Of two at once, one would see no file to close, and start when the other is done.
	inheriting.Lock()
	defer inheriting.Unlock()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	var inherited []int
	for _, f := range open {
		fd, err := strconv.Atoi(f.Name())
		if err != nil || fd <= 2 {
			continue
		}
		if flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0); errno == 0 && flags&syscall.FD_CLOEXEC == 0 {
			inherited = append(inherited, fd)
		}
	}
	set := func(flags uintptr) {
		for _, fd := range inherited {
			_, _, _ = syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_SETFD, flags)
		}
	}
	set(syscall.FD_CLOEXEC)
	defer set(0) // for what else is started
	return start()
}

func (c *chroot) stop(ctx context.Context, s *state) error {
	return c.signal(ctx, s, syscall.SIGTERM) // which rabbitmq-server handles
}

func (c *chroot) kill(ctx context.Context, s *state) error {
	return c.signal(ctx, s, syscall.SIGKILL)
}

func (c *chroot) signal(ctx context.Context, s *state, sig syscall.Signal) error {
	if !c.alive(ctx, s) {
		return nil
	}
	if err := syscall.Kill(s.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	for c.alive(ctx, s) {
		if err := wait(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("process %d doesn't end: %w", s.PID, err)
		}
	}
	return nil
}

func (c *chroot) remove(ctx context.Context, s *state) error {
	if err := c.kill(ctx, s); err != nil || s.Data == "" {
		return err
	}
	err := os.RemoveAll(s.Data)
	if in := filepath.Dir(s.Data); in == c.memoryDir() {
		_ = os.Remove(in) // unless there are others' data in it
	}
	return err
}

func (c *chroot) alive(_ context.Context, s *state) bool {
	if s.PID == 0 {
		return false
	}
	// If it is our child it has to be waited for, or it stays a zombie.
	_, _ = syscall.Wait4(s.PID, nil, syscall.WNOHANG, nil)
	status, began, err := processStat(s.PID)
	return err == nil && began == s.PIDStart && status != 'Z'
}

func (c *chroot) exec(ctx context.Context, s *state, args []string) ([]byte, error) {
	if !c.alive(ctx, s) {
		return nil, errors.New("it doesn't run")
	}
	enter := append([]string{"--target", strconv.Itoa(s.PID), "--mount", "--pid", "--root", "--wd", "/usr/bin/env", "-i"}, c.environment(s)...)
	return run(ctx, nil, "nsenter", append(append(enter, asRabbitmq...), args...)...)
}

func (c *chroot) lastWords(_ context.Context, s *state) string {
	log, err := os.ReadFile(c.logPath(s))
	if err != nil {
		return err.Error()
	}
	return lastLines(string(log), 5)
}

// processStat returns the state of a process, such as 'S' or 'Z', and when it
// began, in clock ticks since the machine did: see proc_pid_stat(5).
func processStat(pid int) (status byte, began uint64, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The second field, a name in brackets, may hold anything.
	rest := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(rest) < 20 || rest[0] == "" {
		return 0, 0, fmt.Errorf("/proc/%d/stat: too short", pid)
	}
	began, err = strconv.ParseUint(rest[19], 10, 64)
	return rest[0][0], began, err
}

// diesWithUs has the kernel kill a command when the thread that starts it ends.
func diesWithUs(cmd *exec.Cmd) { cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL }
