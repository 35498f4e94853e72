package service

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
)

// process is a program that ends with this process.
type process struct {
	cmd   *exec.Cmd
	leash io.Closer
	ended chan struct{}
	once  sync.Once
}

// leashed runs a program in a separate process group and kills the group when its standard
// input ends. The kernel closes that when this process ends, however it ends.
const leashed = `set -m
"$@" </dev/null & group=$!
( read -r never <&3; kill -KILL -- -$group ) 3<&0 2>/dev/null & watch=$!
wait $group
code=$?
kill -KILL -- -$watch 2>/dev/null
exit $code`

func run(argv []string, dir string, user *owner, log io.Writer) (*process, error) {
	cmd := exec.Command("bash", append([]string{"-c", leashed, argv[0]}, argv...)...)
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "HOME="+dir)
	cmd.SysProcAttr = user.credential()
	leash, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("bash: %w", err)
	}
	p := &process{cmd: cmd, leash: leash, ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		_ = cmd.Wait()
	}()
	return p, nil
}

// kill ends the process and its children, as kill -9 does, and waits until they have
// ended.
func (p *process) kill() {
	p.once.Do(func() { _ = p.leash.Close() })
	<-p.ended
}
