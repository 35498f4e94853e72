package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/argument"
)

// driver starts and ends brokers in one way.
type driver interface {
	// prepare makes what a broker of this version runs from, and returns its
	// name: an image or a tree. An error means that this way can't be gone
	// here, and why.
	prepare(ctx context.Context, version string, say sayFunc) (source string, err error)
	// start starts s, for the first time or again after stop or kill, and may complete s. It
	// doesn't wait until the broker serves.
	start(ctx context.Context, s *state, save func() error) error
	stop(ctx context.Context, s *state) error
	kill(ctx context.Context, s *state) error
	// remove ends s, however far it got, and leaves nothing of it.
	remove(ctx context.Context, s *state) error
	alive(ctx context.Context, s *state) bool
	exec(ctx context.Context, s *state, args []string) ([]byte, error)
	// lastWords returns the end of the broker's log.
	lastWords(ctx context.Context, s *state) string
}

type way struct {
	how    How
	driver driver
}

// launcher holds what Need depends on, so that tests can put in their own.
type launcher struct {
	dir    string // of the cache
	getenv func(string) string
	only   How // of HOPBACK_BROKER_WITH; empty: any
	lean   bool
	ways   []way
	out    *lineWriter
	probe  func(ctx context.Context, amqpURL, managementURL string) (fullVersion string, err error)
	free   func(port int) bool
	// patience with a broker that has been started; it takes 8 s on two cores.
	patience time.Duration
}

func newLauncher(getenv func(string) string, out io.Writer) (*launcher, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("broker: no cache folder to keep brokers in: %w; set HOME or XDG_CACHE_HOME", err)
	}
	l := &launcher{
		dir:      filepath.Join(cache, "hopback", "broker"),
		getenv:   getenv,
		out:      newLineWriter(out),
		probe:    probe,
		free:     portFree,
		patience: 2 * time.Minute,
	}
	trees := &trees{dir: filepath.Join(l.dir, "trees")}
	id, setup := projectID(l.dir), new(dockerSetup)
	l.ways = []way{
		{HowDocker, &docker{image: officialImage, id: id, setup: setup}},
		// Before an image of the same packages, since a chroot starts in half the time.
		{HowChroot, &chroot{trees: trees, id: id, runDir: l.runDir, given: l.tree}},
		{HowDockerBuilt, &docker{image: (&builder{trees}).image, id: id, setup: setup}},
	}
	only := How(getenv("HOPBACK_BROKER_WITH"))
	if only != "" && only != HowEnvironment && !slices.ContainsFunc(l.ways, func(w way) bool { return w.how == only }) {
		return nil, argument.New("HOPBACK_BROKER_WITH", string(only), "is no way to a broker", "set it to env, docker, chroot or docker-built, or unset it")
	}
	l.only, l.lean = only, getenv("HOPBACK_BROKER_LEAN") != ""
	return l, nil
}

func (l *launcher) driver(how How) driver {
	for _, w := range l.ways {
		if w.how == how {
			return w.driver
		}
	}
	return nil
}

// need is Need; versions are checked here.
func (l *launcher) need(ctx context.Context, keep bool, versions []string) ([]*Broker, error) {
	if err := checkVersions(versions); err != nil {
		return nil, err
	}
	l.reap(ctx)
	brokers := make([]*Broker, len(versions))
	errs := make([]error, len(versions))
	var wg sync.WaitGroup
	for i, v := range versions {
		wg.Go(func() { brokers[i], errs[i] = l.get(ctx, keep, v) })
	}
	wg.Wait()
	err := errors.Join(errs...)
	if err == nil {
		return brokers, nil
	}
	for _, b := range brokers {
		if b != nil {
			err = errors.Join(err, b.Release(ctx))
		}
	}
	return nil, err
}

func (l *launcher) get(ctx context.Context, keep bool, version string) (*Broker, error) {
	if version != "any" {
		return l.share(ctx, keep, version)
	}
	// One that is there is better than a newer one that isn't yet.
	for _, v := range supported {
		s, err := l.load(v)
		if err != nil {
			return nil, err
		}
		if l.getenv(envName("HOPBACK_URL_", v)) != "" || s != nil {
			return l.share(ctx, keep, v)
		}
	}
	var errs []error
	for _, v := range packaged {
		b, err := l.share(ctx, keep, v)
		if err == nil {
			return b, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// share returns the broker of this version that all processes share.
func (l *launcher) share(ctx context.Context, keep bool, version string) (_ *Broker, err error) {
	say := l.out.prefixed("broker " + version)
	began := time.Now()

	if u := l.getenv(envName("HOPBACK_URL_", version)); u != "" && (l.only == "" || l.only == HowEnvironment) {
		b, err := l.fromEnvironment(ctx, version, u)
		if err == nil {
			say("%s from %s: %s", b.FullVersion, envName("HOPBACK_URL_", version), redacted(b.URL))
		}
		return b, err
	}
	if l.only == HowEnvironment {
		return nil, argument.New(envName("HOPBACK_URL_", version), nil, "is not set, and HOPBACK_BROKER_WITH=env allows nothing else", "set it to the amqp:// URL of a RabbitMQ "+version)
	}

	lock, err := waitLock(ctx, l.lockPath(version), false, func() { say("waiting for another process that starts or ends it") })
	if err != nil {
		return nil, fmt.Errorf("broker %s: %w", version, err)
	}
	defer lock.unlock()
	s, err := l.load(version)
	if err != nil {
		return nil, fmt.Errorf("broker %s: %w", version, err)
	}
	if s != nil {
		d := l.driver(s.How)
		if d.alive(ctx, s) {
			if l.only != "" && l.only != s.How {
				return nil, argument.New("HOPBACK_BROKER_WITH", string(l.only), fmt.Sprintf("differs from how broker %s runs already, %s", version, s.How), "end that one first (broker down "+version+")")
			}
			full, err := l.ready(ctx, d, s, say)
			if err == nil {
				if keep && !s.Keep {
					s.Keep = true
					if err := l.save(s); err != nil {
						return nil, err
					}
				}
				say("%s runs already, %s at %s", full, s.How, s.amqpURL())
				return l.lease(ctx, s, full)
			}
			if ctx.Err() != nil {
				return nil, fmt.Errorf("broker %s: %w", version, err)
			}
			say("what runs is of no use: %v", err)
		}
		// It was killed, or never came up: begin again.
		if err := l.end(ctx, s); err != nil {
			return nil, fmt.Errorf("broker %s: end the dead one: %w", version, err)
		}
	}
	return l.startNew(ctx, &state{Name: version, Version: version, Keep: keep}, say, began)
}

var ownCount atomic.Int64

// own starts a broker, or a cluster of so many nodes, for the caller alone.
func (l *launcher) own(ctx context.Context, version string, nodes int) (*Broker, *state, error) {
	if err := checkVersions([]string{version}); err != nil {
		return nil, nil, err
	}
	if version == "any" {
		version = packaged[0]
	}
	l.reap(ctx)
	name := fmt.Sprintf("%s-own-%d-%d", version, os.Getpid(), ownCount.Add(1))
	say := l.out.prefixed("broker " + name)
	lock, err := waitLock(ctx, l.lockPath(name), false, nil)
	if err != nil {
		return nil, nil, fmt.Errorf("broker %s: %w", version, err)
	}
	defer lock.unlock()
	s := &state{Name: name, Version: version}
	if nodes > 1 {
		s.Nodes = make([]ports, nodes)
	}
	b, err := l.startNew(ctx, s, say, time.Now())
	return b, s, err
}

// startNew goes through the ways until one leads to a broker. The caller holds
// the lock of the name.
func (l *launcher) startNew(ctx context.Context, s *state, say sayFunc, began time.Time) (*Broker, error) {
	none := &NoWayError{Version: s.Version}
	for _, w := range l.ways {
		if l.only != "" && l.only != w.how || len(s.Nodes) > 0 && w.how == HowChroot || l.tree(s.Version) != "" && w.how != HowChroot {
			continue
		}
		s.How = w.how
		full, err := l.tryWay(ctx, w, s, say)
		if err == nil {
			say("%s started in %.0f s, %s (%s), at %s, management at %s", full, time.Since(began).Seconds(), s.How, s.Source, s.amqpURL(), s.managementURL())
			return l.lease(ctx, s, full)
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("broker %s: given up before it served: %w (%w)", s.Name, context.Cause(ctx), ctx.Err())
		}
		none.Tried = append(none.Tried, Attempt{w.how, err})
		say("not by %s: %v", w.how, err)
	}
	return nil, none
}

func (l *launcher) tryWay(ctx context.Context, w way, s *state, say sayFunc) (full string, err error) {
	source, err := w.driver.prepare(ctx, s.Version, say)
	if err != nil {
		return "", err
	}
	s.Source = source
	s.Project, s.Data, s.PID, s.PIDStart = "", "", 0, 0 // of a way that led nowhere
	s.Lean = l.lean
	s.Started = time.Now().UTC().Truncate(time.Second)
	if err := l.claim(ctx, s); err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.end(ctx, s))
		}
	}()
	done := say.during("starting it (%s)", s.How)
	defer done()
	if err := w.driver.start(ctx, s, func() error { return l.save(s) }); err != nil {
		return "", err
	}
	if full, err = l.ready(ctx, w.driver, s, nil); err == nil && len(s.Nodes) > 0 {
		err = l.clusterOf(s).AwaitAll(ctx)
	}
	return full, err
}

// claim chooses the ports and saves the record, which makes them known to
// others that choose.
func (l *launcher) claim(ctx context.Context, s *state) error {
	lock, err := waitLock(ctx, l.lockPath("ports"), false, nil)
	if err != nil {
		return err
	}
	defer lock.unlock()
	all, err := l.loadAll()
	if err != nil {
		return err
	}
	claimed := map[int]bool{}
	for _, other := range all {
		for _, first := range other.claims() {
			claimed[first] = true
		}
	}
	for i := range s.Nodes {
		if s.Nodes[i], err = choosePorts(s.Version, claimed, l.free); err != nil {
			return err
		}
		claimed[s.Nodes[i].AMQP] = true
	}
	if len(s.Nodes) > 0 {
		s.Ports = s.Nodes[0]
	} else if s.Ports, err = choosePorts(s.Version, claimed, l.free); err != nil {
		return err
	}
	return l.save(s)
}

// lease makes this process one of the broker's users. The caller holds the
// lock of the name.
func (l *launcher) lease(ctx context.Context, s *state, full string) (*Broker, error) {
	lease, err := waitLock(ctx, l.leasePath(s.Name), true, nil)
	if err != nil {
		return nil, fmt.Errorf("broker %s: %w", s.Version, err)
	}
	return &Broker{
		Version:       s.Version,
		FullVersion:   full,
		URL:           s.amqpURL(),
		ManagementURL: s.managementURL(),
		How:           s.How,
		l:             l,
		name:          s.Name,
		lease:         lease,
	}, nil
}

func (l *launcher) release(ctx context.Context, name string, lease *flock) error {
	lock, err := waitLock(ctx, l.lockPath(name), false, nil)
	lease.unlock()
	if err != nil {
		return fmt.Errorf("broker %s: %w", name, err)
	}
	defer lock.unlock()
	s, err := l.load(name)
	if err != nil || s == nil || s.Keep || l.getenv("HOPBACK_KEEP") != "" {
		return err
	}
	return l.endUnused(ctx, s)
}

// endUnused ends a broker if no process uses it. The caller holds its lock,
// without which nobody becomes a user.
func (l *launcher) endUnused(ctx context.Context, s *state) error {
	last, err := tryLock(l.leasePath(s.Name), false)
	if err != nil || last == nil {
		return err
	}
	defer last.unlock()
	if err := l.end(ctx, s); err != nil {
		return fmt.Errorf("broker %s: %w", s.Name, err)
	}
	l.out.prefixed("broker " + s.Name)("ended")
	return nil
}

// end ends a broker and forgets it, even when ctx has ended.
func (l *launcher) end(ctx context.Context, s *state) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	if err := l.driver(s.How).remove(ctx, s); err != nil {
		return fmt.Errorf("end it: %w", err)
	}
	if err := os.RemoveAll(l.runDir(s.Name)); err != nil || !isOwn(s.Name) {
		return err
	}
	// The name won't come again, so nobody waits for its locks.
	return errors.Join(os.Remove(l.lockPath(s.Name)), os.RemoveAll(l.leasePath(s.Name)))
}

// reap ends what processes that died have left: brokers of their own.
// What can't be ended now is left to the next one.
func (l *launcher) reap(ctx context.Context) {
	all, _ := l.loadAll()
	for _, s := range all {
		if !isOwn(s.Name) {
			continue
		}
		lock, _ := tryLock(l.lockPath(s.Name), false)
		if lock == nil {
			continue
		}
		if s, _ := l.load(s.Name); s != nil { // still there
			_ = l.endUnused(ctx, s)
		}
		lock.unlock()
	}
}

func isOwn(name string) bool { return strings.Contains(name, "-own-") }

func (l *launcher) startAgain(ctx context.Context, d driver, s *state) error {
	_, err := l.startedAgain(ctx, d, s)
	return err
}

func (l *launcher) startedAgain(ctx context.Context, d driver, s *state) (full string, err error) {
	if !d.alive(ctx, s) {
		if err := d.start(ctx, s, func() error { return l.save(s) }); err != nil {
			return "", err
		}
	}
	return l.ready(ctx, d, s, nil)
}

// tree is the folder in HOPBACK_TREE_4_4 and so on: a system with rabbitmq-server installed.
func (l *launcher) tree(version string) string { return l.getenv(envName("HOPBACK_TREE_", version)) }

// ready waits until a broker that has been started serves, and returns its
// full version.
func (l *launcher) ready(ctx context.Context, d driver, s *state, say sayFunc) (string, error) {
	notified := say == nil
	ctx, cancel := context.WithTimeout(ctx, l.patience)
	defer cancel()
	for {
		full, err := l.probe(ctx, s.amqpURL(), s.managementURL())
		if err == nil {
			if !isVersion(full, s.Version) {
				return "", fmt.Errorf("it is RabbitMQ %s, not %s as asked for", full, s.Version)
			}
			return full, nil
		}
		if ctx.Err() == nil && !d.alive(ctx, s) {
			return "", fmt.Errorf("it ended before it served: %s", d.lastWords(ctx, s))
		}
		if !notified {
			notified = true
			defer say.during("waiting until it serves")()
		}
		if wait(ctx, 200*time.Millisecond) != nil {
			return "", fmt.Errorf("it doesn't serve (%w); the last thing seen: %w", context.Cause(ctx), err)
		}
	}
}

// isVersion says whether full, such as "4.3.6" or "4.3.0-rc.1", is of series.
func isVersion(full, series string) bool {
	return full == series || strings.HasPrefix(full, series+".")
}

func (l *launcher) lockPath(name string) string {
	return filepath.Join(l.dir, "run", name+".lock")
}

func (l *launcher) leasePath(name string) string {
	return filepath.Join(l.dir, "run", name+".lease")
}

// envName returns HOPBACK_URL_4_3 for the prefix HOPBACK_URL_ and "4.3".
func envName(prefix, version string) string {
	return prefix + strings.ReplaceAll(version, ".", "_")
}

// fromEnvironment checks the broker of the environment, which has to serve now.
// fromEnvironment returns the broker that HOPBACK_URL_4_3 names, if version is "4.3", or that HOPBACK_URL names,
// if it is "": then it may be of any supported version.
func (l *launcher) fromEnvironment(ctx context.Context, version, amqpURL string) (*Broker, error) {
	name, managementName := "HOPBACK_URL", "HOPBACK_MANAGEMENT_URL"
	if version != "" {
		name, managementName = envName("HOPBACK_URL_", version), envName("HOPBACK_MANAGEMENT_URL_", version)
	}
	u, err := url.Parse(amqpURL)
	if err != nil || u.Hostname() == "" || u.Scheme != "amqp" && u.Scheme != "amqps" {
		// No value: it may hold a password.
		return nil, argument.New(name, nil, "is not an AMQP URL", "write it like amqp://guest:guest@127.0.0.1:5672")
	}
	management, err := managementURL(u, l.getenv(managementName))
	if err != nil {
		return nil, argument.New(managementName, nil, "is not an HTTP URL", "write it like http://guest:guest@127.0.0.1:15672")
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	full, err := l.probe(ctx, amqpURL, management)
	if err != nil {
		return nil, fmt.Errorf("broker: the one that %s names isn't ready (its HTTP API should be at %s; set %s if it is elsewhere): %w", name, redacted(management), managementName, err)
	}
	if version == "" {
		i := slices.IndexFunc(supported, func(v string) bool { return isVersion(full, v) })
		if i < 0 {
			return nil, argument.New(name, redacted(amqpURL), "is a RabbitMQ "+full, "set it to one of "+strings.Join(supported, ", "))
		}
		version = supported[i]
	}
	if !isVersion(full, version) {
		return nil, argument.New(name, redacted(amqpURL), "is a RabbitMQ "+full, "set it to a "+version+", or unset it")
	}
	return &Broker{Version: version, FullVersion: full, URL: amqpURL, ManagementURL: management, How: HowEnvironment, l: l}, nil
}

// managementURL returns the URL of the HTTP API, with the user of the AMQP URL
// if it has none itself.
func managementURL(amqp *url.URL, given string) (string, error) {
	if given == "" {
		given = "http://" + net.JoinHostPort(amqp.Hostname(), "15672")
	}
	u, err := url.Parse(given)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", errors.New("not an HTTP URL")
	}
	if u.User == nil {
		u.User = url.UserPassword(credentials(amqp))
	}
	u.Path = strings.TrimSuffix(u.Path, "/")
	return u.String(), nil
}

func redacted(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return "(no URL)"
	}
	return u.Redacted()
}

// wait returns early, with an error, when ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
