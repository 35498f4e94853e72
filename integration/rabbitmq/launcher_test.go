package rabbitmq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
)

// fakeDriver runs nothing, but remembers what does.
type fakeDriver struct {
	prepareErr, startErr error
	block                chan struct{} // start waits for ctx if not nil, and closes it first

	mu      sync.Mutex
	starts  int
	running map[string]bool
}

func (d *fakeDriver) prepare(context.Context, string, sayFunc) (string, error) {
	return "fake", d.prepareErr
}

func (d *fakeDriver) start(ctx context.Context, s *state, save func() error) error {
	if d.block != nil {
		close(d.block)
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if s.Project != "" {
		return errors.New("this is not a new one")
	}
	if s.Project = "project"; d.startErr == nil {
		d.set(s.Name, true)
		s.Project = ""
	}
	return d.startErr
}

func (d *fakeDriver) set(name string, running bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.running == nil {
		d.running = map[string]bool{}
	}
	d.running[name] = running
	if running {
		d.starts++
	}
}

func (d *fakeDriver) stop(_ context.Context, s *state) error   { d.set(s.Name, false); return nil }
func (d *fakeDriver) kill(_ context.Context, s *state) error   { d.set(s.Name, false); return nil }
func (d *fakeDriver) remove(_ context.Context, s *state) error { d.set(s.Name, false); return nil }
func (d *fakeDriver) lastWords(context.Context, *state) string { return "last words" }

func (d *fakeDriver) alive(_ context.Context, s *state) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running[s.Name]
}

func (d *fakeDriver) exec(_ context.Context, _ *state, args []string) ([]byte, error) {
	return []byte(strings.Join(args, " ")), nil
}

// fakes are the drivers of a launcher that depends on nothing.
type fakes struct {
	docker, built, chroot fakeDriver
	env                   map[string]string
	full                  map[string]string // reported version, by first digits of the port or by host
	out                   bytes.Buffer
}

// launcher of a process: several share the cache folder dir.
func (f *fakes) launcher(dir string) *launcher {
	return &launcher{
		dir:    dir,
		getenv: func(name string) string { return f.env[name] },
		only:   How(f.env["HOPBACK_BROKER_WITH"]),
		ways:   []way{{HowDocker, &f.docker}, {HowChroot, &f.chroot}, {HowDockerBuilt, &f.built}},
		out:    newLineWriter(&f.out),
		probe: func(_ context.Context, amqpURL, _ string) (string, error) {
			for part, full := range f.full {
				if strings.Contains(amqpURL, part) {
					return full, nil
				}
			}
			return "", errors.New("connection refused")
		},
		free:     func(int) bool { return true },
		patience: time.Minute,
	}
}

func newFakes() *fakes {
	return &fakes{env: map[string]string{}, full: map[string]string{":243": "4.3.6", ":240": "4.0.5"}}
}

func TestWaysAreTriedInOrder(t *testing.T) {
	t.Parallel()
	no := errors.New("not here")
	for _, c := range []struct {
		name   string
		fix    func(*fakes)
		how    How
		reason []How // of NoWayError
	}{
		{"docker first", func(f *fakes) {}, HowDocker, nil},
		{"then a chroot", func(f *fakes) { f.docker.prepareErr = no }, HowChroot, nil},
		{"also if it can't start", func(f *fakes) { f.docker.startErr = no }, HowChroot, nil},
		{"then a built image", func(f *fakes) { f.docker.prepareErr, f.chroot.prepareErr = no, no }, HowDockerBuilt, nil},
		{"one way only", func(f *fakes) { f.env["HOPBACK_BROKER_WITH"] = "chroot" }, HowChroot, nil},
		{"environment first", func(f *fakes) {
			f.env["HOPBACK_URL_4_3"], f.full["host"] = "amqp://host", "4.3.1"
		}, HowEnvironment, nil},
		{"no way", func(f *fakes) { f.docker.prepareErr, f.built.prepareErr, f.chroot.prepareErr = no, no, no }, "", []How{HowDocker, HowChroot, HowDockerBuilt}},
		{"not that way", func(f *fakes) { f.env["HOPBACK_BROKER_WITH"] = "docker"; f.docker.prepareErr = no }, "", []How{HowDocker}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFakes()
			c.fix(f)
			brokers, err := f.launcher(t.TempDir()).need(t.Context(), false, []string{"4.3"})
			if c.how == "" {
				var none *NoWayError
				require.ErrorAs(t, err, &none)
				require.ErrorIs(t, err, no)
				var tried []How
				for _, a := range none.Tried {
					tried = append(tried, a.How)
				}
				assert.Equal(t, c.reason, tried)
				assert.NotContains(t, err.Error(), "\n")
				assert.Contains(t, err.Error(), "HOPBACK_URL_4_3")
				return
			}
			require.NoError(t, err)
			b := brokers[0]
			assert.Equal(t, c.how, b.How)
			assert.Equal(t, "4.3", b.Version)
			assert.Equal(t, 1, strings.Count(f.out.String(), b.FullVersion), "one line reports it: %s", &f.out)
			require.NoError(t, b.Release(t.Context()))
			require.NoError(t, b.Release(t.Context()))
		})
	}
}

func TestLastUserEndsTheBroker(t *testing.T) {
	t.Parallel()
	f, dir := newFakes(), t.TempDir()
	one, err := f.launcher(dir).need(t.Context(), false, []string{"4.3"})
	require.NoError(t, err)
	two, err := f.launcher(dir).need(t.Context(), false, []string{"any", "4.0"})
	require.NoError(t, err)
	assert.Equal(t, one[0].URL, two[0].URL)
	assert.Equal(t, 2, f.docker.starts)

	require.NoError(t, one[0].Release(t.Context()))
	assert.True(t, f.docker.running["4.3"])
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, two[0].Release(ended), "even when the context has ended")
	assert.False(t, f.docker.running["4.3"])
	assert.True(t, f.docker.running["4.0"])
	require.NoError(t, two[1].Release(t.Context()))
	all, err := f.launcher(dir).loadAll()
	require.NoError(t, err)
	assert.Empty(t, all)
}

func TestKeptUntilDown(t *testing.T) {
	t.Parallel()
	f, dir := newFakes(), t.TempDir()
	for _, keep := range []bool{false, true, false} { // a later Need doesn't undo it
		b, err := f.launcher(dir).need(t.Context(), keep, []string{"4.3"})
		require.NoError(t, err)
		if keep {
			require.NoError(t, b[0].Release(t.Context()))
			assert.True(t, f.docker.running["4.3"])
			continue
		}
		defer func() { assert.NoError(t, b[0].Release(t.Context())) }()
	}
	assert.Equal(t, 1, f.docker.starts)
	list, err := f.launcher(dir).list(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	assert.True(t, list[0].Keep)
	assert.Equal(t, "4.3.6", list[0].FullVersion)
	require.NoError(t, f.launcher(dir).down(t.Context(), []string{"4.0"}))
	assert.True(t, f.docker.running["4.3"])
	require.NoError(t, f.launcher(dir).down(t.Context(), nil))
	assert.False(t, f.docker.running["4.3"])
}

func TestKeepInTheEnvironment(t *testing.T) {
	t.Parallel()
	f := newFakes()
	f.env["HOPBACK_KEEP"] = "1"
	b, err := f.launcher(t.TempDir()).need(t.Context(), false, []string{"4.3"})
	require.NoError(t, err)
	require.NoError(t, b[0].Release(t.Context()))
	assert.True(t, f.docker.running["4.3"])
}

func TestStartsOnceForManyAtOnce(t *testing.T) {
	t.Parallel()
	f, dir := newFakes(), t.TempDir()
	var wg sync.WaitGroup
	for range 8 {
		l := f.launcher(dir)
		l.out = newLineWriter(nil)
		wg.Go(func() {
			b, err := l.need(t.Context(), true, []string{"4.3", "4.0"})
			if assert.NoError(t, err) {
				assert.Equal(t, "amqp://guest:guest@127.0.0.1:24300", b[0].URL)
				assert.Equal(t, "amqp://guest:guest@127.0.0.1:24000", b[1].URL)
				assert.NoError(t, errors.Join(b[0].Release(t.Context()), b[1].Release(t.Context())))
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 2, f.docker.starts)
}

func TestDeadOrBrokenRecordIsReplaced(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*fakes, *launcher){
		"killed":      func(f *fakes, _ *launcher) { f.docker.set("4.3", false) },
		"half a file": func(_ *fakes, l *launcher) { _ = os.WriteFile(l.statePath("4.3"), []byte(`{"name":"4`), 0o600) },
		"empty file":  func(_ *fakes, l *launcher) { _ = os.WriteFile(l.statePath("4.3"), nil, 0o600) },
		"other way": func(_ *fakes, l *launcher) {
			_ = os.WriteFile(l.statePath("4.3"), []byte(`{"name":"4.3","how":"podman"}`), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFakes()
			l := f.launcher(t.TempDir())
			for i := range 2 {
				b, err := l.need(t.Context(), true, []string{"4.3"})
				require.NoError(t, err)
				require.NoError(t, b[0].Release(t.Context()))
				assert.Equal(t, i+1, f.docker.starts)
				spoil(f, l)
			}
		})
	}
}

func TestCancelLeavesNothing(t *testing.T) {
	t.Parallel()
	f := newFakes()
	f.docker.block = make(chan struct{})
	l := f.launcher(t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-f.docker.block
		cancel()
	}()
	_, err := l.need(ctx, false, []string{"4.3"})
	require.ErrorIs(t, err, context.Canceled)
	all, err := l.loadAll()
	require.NoError(t, err)
	assert.Empty(t, all)
	assert.Zero(t, f.built.starts, "no other way is tried then")
}

func TestWrongVersionIsNoBroker(t *testing.T) {
	t.Parallel()
	f := newFakes()
	f.full[":243"] = "4.30.1"
	_, err := f.launcher(t.TempDir()).need(t.Context(), false, []string{"4.3"})
	require.ErrorContains(t, err, "it is RabbitMQ 4.30.1, not 4.3")
	assert.False(t, f.docker.running["4.3"])
}

func TestBadArguments(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		versions []string
		env      string
		contains string
	}{
		"none":             {nil, "", "ask for"},
		"unknown version":  {[]string{"4.3", "3.13"}, "", `"3.13"`},
		"no URL":           {[]string{"4.3"}, "127.0.0.1:5672", "HOPBACK_URL_4_3"},
		"HTTP":             {[]string{"4.3"}, "http://127.0.0.1", "HOPBACK_URL_4_3"},
		"another version":  {[]string{"4.3"}, "amqp://127.0.0.1:24000", "is a RabbitMQ 4.0.5"},
		"password kept in": {[]string{"4.3"}, "ftp://u:secret@h", "HOPBACK_URL_4_3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFakes()
			f.env["HOPBACK_URL_4_3"] = c.env
			_, err := f.launcher(t.TempDir()).need(t.Context(), false, c.versions)
			var bad *argument.Error
			require.ErrorAs(t, err, &bad)
			assert.ErrorContains(t, err, c.contains)
			assert.NotContains(t, err.Error(), "secret")
		})
	}
	_, err := newLauncher(func(string) string { return "podman" }, nil)
	assert.ErrorContains(t, err, "docker-built")
}

func TestEnvironmentBrokerIsNotOurs(t *testing.T) {
	t.Parallel()
	f := newFakes()
	f.env["HOPBACK_URL_4_3"], f.full["host"] = "amqps://me:pass@host/vh", "4.3.1"
	f.env["HOPBACK_BROKER_WITH"] = "env"
	l := f.launcher(t.TempDir())
	brokers, err := l.need(t.Context(), false, []string{"any"})
	require.NoError(t, err)
	b := brokers[0]
	assert.Equal(t, "http://me:pass@host:15672", b.ManagementURL)
	assert.NotContains(t, f.out.String(), "pass@")
	_, execErr := b.Exec(t.Context(), "rabbitmqctl", "status")
	for _, err := range []error{b.Kill(t.Context()), b.Stop(t.Context()), b.Start(t.Context()), b.Restart(t.Context()), execErr} {
		assert.ErrorIs(t, err, ErrNotOurs)
	}
	assert.NoError(t, b.Release(t.Context()))
	_, err = l.need(t.Context(), false, []string{"4.0"})
	assert.ErrorContains(t, err, "HOPBACK_URL_4_0 is not set")
	assert.NoFileExists(t, filepath.Join(l.dir, "run"), "nothing is written for it")
}

func TestOwnIsAloneAndReaped(t *testing.T) {
	t.Parallel()
	f := newFakes()
	l := f.launcher(t.TempDir())
	shared, err := l.need(t.Context(), false, []string{"4.3"})
	require.NoError(t, err)
	own, _, err := l.own(t.Context(), "any", 1)
	require.NoError(t, err)
	assert.NotEqual(t, shared[0].URL, own.URL)
	require.NoError(t, own.Kill(t.Context()))
	require.NoError(t, own.Start(t.Context()))
	out, err := own.Exec(t.Context(), "rabbitmqctl", "status")
	require.NoError(t, err)
	assert.Equal(t, "rabbitmqctl status", string(out))

	l.reap(t.Context())
	assert.True(t, f.docker.running[own.name], "in use")
	require.NoError(t, f.launcher(l.dir).down(t.Context(), []string{"4.0", "4.3"}))
	assert.False(t, f.docker.running["4.3"])
	assert.True(t, f.docker.running[own.name], "it isn't shared")
	shared, err = l.need(t.Context(), false, []string{"4.3"})
	require.NoError(t, err)
	own.lease.unlock() // as the death of its process does
	l.reap(t.Context())
	assert.False(t, f.docker.running[own.name])
	assert.True(t, f.docker.running["4.3"])
	require.NoError(t, shared[0].Release(t.Context()))
	entries, err := os.ReadDir(filepath.Join(l.dir, "run"))
	require.NoError(t, err)
	for _, e := range entries {
		assert.NotContains(t, e.Name(), "own")
	}
}

func TestPortsAreTakenInBlocks(t *testing.T) {
	t.Parallel()
	claimed, busy := map[int]bool{24300: true}, []int{24307}
	free := func(port int) bool { return !slices.Contains(busy, port) }
	p, err := choosePorts("4.3", claimed, free)
	require.NoError(t, err)
	assert.Equal(t, ports{24308, 24309, 24310, 24311}, p)
	_, err = choosePorts("4.0", nil, func(int) bool { return false })
	assert.EqualError(t, err, "no four free ports on 127.0.0.1 from 24000 to 24099")
}

func TestBrokenTreeIsNoticed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	tar, tree := filepath.Join(dir, "a.tar"), filepath.Join(dir, "b")
	assert.ErrorIs(t, checkFile(tar), os.ErrNotExist)
	assert.ErrorIs(t, checkFolder(tree), os.ErrNotExist)

	require.NoError(t, sealFile(write("a.tmp", "content"), tar))
	assert.NoError(t, checkFile(tar))
	write("a.tar", "Content")
	assert.ErrorContains(t, checkFile(tar), "a.tar has changed since it was made")
	write("a.tar.seal", "")
	assert.Error(t, checkFile(tar))

	write("b.tmp/usr/one", "1")
	write("b.tmp/usr/two", "2")
	require.NoError(t, sealFolder(filepath.Join(dir, "b.tmp"), tree))
	assert.NoError(t, checkFolder(tree))
	require.NoError(t, os.Remove(filepath.Join(tree, "usr", "two")))
	assert.ErrorContains(t, checkFolder(tree), "b has changed since it was made")
	require.NoError(t, os.Remove(tree+".seal"))
	assert.ErrorContains(t, checkFolder(tree), "wasn't finished")
}

func TestLastLines(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "b | c", lastLines("a\n\n b\nc\n \n", 2))
	assert.Equal(t, "", lastLines("", 2))
}

func TestErrorOfACommandSaysWhatItSaid(t *testing.T) {
	t.Parallel()
	_, err := run(t.Context(), []string{"WHAT=broken"}, "sh", "-c", `echo "it is $WHAT" >&2; exit 3`)
	assert.EqualError(t, err, "sh -c: exit status 3: it is broken")
	_, err = run(t.Context(), nil, "no-such-command-here")
	assert.EqualError(t, err, "there is no no-such-command-here here")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(fmt.Errorf("enough"))
	_, err = run(ctx, nil, "sh", "-c", "true")
	assert.EqualError(t, err, "enough")
}
