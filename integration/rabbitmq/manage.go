package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"
)

// Status is what is known of one broker.
type Status struct {
	Name          string // the version; longer for one that a test has for itself
	Version       string // "4.3"
	FullVersion   string // empty if it doesn't serve
	URL           string // as in [Broker]
	ManagementURL string
	How           How
	Keep          bool // until [Down]
	Started       time.Time
	Err           error // why it doesn't serve; nil if it does
}

// List returns the brokers of the environment and those that we started.
func List(ctx context.Context) ([]Status, error) {
	l, err := newLauncher(os.Getenv, nil)
	if err != nil {
		return nil, err
	}
	return l.list(ctx)
}

func (l *launcher) list(ctx context.Context) ([]Status, error) {
	var list []Status
	for _, v := range supported {
		if u := l.getenv(envName("HOPBACK_URL_", v)); u != "" {
			s := Status{Name: v, Version: v, How: HowEnvironment, URL: u}
			var b *Broker
			if b, s.Err = l.fromEnvironment(ctx, v, u); b != nil {
				s.FullVersion, s.ManagementURL = b.FullVersion, b.ManagementURL
			}
			list = append(list, s)
		}
	}
	all, err := l.loadAll()
	for _, st := range all {
		s := Status{Name: st.Name, Version: st.Version, How: st.How, Keep: st.Keep, Started: st.Started, URL: st.amqpURL(), ManagementURL: st.managementURL()}
		s.FullVersion, s.Err = l.probe(ctx, s.URL, s.ManagementURL)
		list = append(list, s)
	}
	return list, err
}

// Down stops brokers that we started, even if somebody uses them: those of the versions given
// that processes share, or all, tests' own among them. Those of the environment are
// left alone. It reports each one in a line on out.
func Down(ctx context.Context, out io.Writer, versions ...string) error {
	l, err := newLauncher(os.Getenv, out)
	if err != nil {
		return err
	}
	return l.down(ctx, versions)
}

func (l *launcher) down(ctx context.Context, versions []string) error {
	if len(versions) > 0 {
		if err := checkVersions(versions); err != nil {
			return err
		}
	}
	all, err := l.loadAll()
	errs := []error{err}
	for _, s := range all {
		if len(versions) == 0 || slices.Contains(versions, s.Name) {
			errs = append(errs, l.downOne(ctx, s.Name))
		}
	}
	return errors.Join(errs...)
}

func (l *launcher) downOne(ctx context.Context, name string) error {
	say := l.out.prefixed("broker " + name)
	lock, err := waitLock(ctx, l.lockPath(name), false, func() { say("waiting for another process that starts or ends it") })
	if err != nil {
		return fmt.Errorf("broker %s: %w", name, err)
	}
	defer lock.unlock()
	s, err := l.load(name)
	if err == nil && s != nil {
		if err = l.end(ctx, s); err == nil {
			say("ended")
		}
	}
	if err != nil {
		return fmt.Errorf("broker %s: %w", name, err)
	}
	return nil
}

// Clean is Down for all, and removes the images that we built and everything
// in the cache folder.
func Clean(ctx context.Context, out io.Writer) error {
	l, err := newLauncher(os.Getenv, out)
	if err != nil {
		return err
	}
	if err := l.down(ctx, nil); err != nil {
		return err
	}
	if _, err := exec.LookPath("docker"); err == nil {
		// Where the daemon doesn't run there is nothing to be removed from it.
		if quick(ctx, "docker", "version") == nil {
			if err := removeImages(ctx); err != nil {
				return fmt.Errorf("remove images: %w", err)
			}
		}
	}
	if err := removeTree(l.dir); err != nil {
		return err
	}
	l.out.prefixed("broker")("removed %s and the images built from it", l.dir)
	return nil
}
