package rabbitmq

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// probeDockerTimeout is for the daemon to answer, or compose to start, on a
	// machine that is busy with other things.
	probeDockerTimeout = 20 * time.Second
	// registryTimeout is for the registry's first sign of life, and pullTimeout
	// for all of the image, which may be slow without being broken.
	registryTimeout = 20 * time.Second
	pullTimeout     = 10 * time.Minute
)

// docker runs brokers by the compose file, with one kind of image.
type docker struct {
	// image returns the image's name when it is there.
	image func(ctx context.Context, version string, say sayFunc) (string, error)
	// id keeps apart the compose projects of different cache folders.
	id    string
	setup *dockerSetup
}

// dockerSetup is looked for once; both kinds of image share it.
type dockerSetup struct {
	mu      sync.Mutex
	done    bool
	compose []string // the command: docker compose (2.x) or docker-compose (1.29)
	file    string
	err     error
}

// leanArguments has Erlang run on one thread, for what HOPBACK_BROKER_LEAN asks for.
const leanArguments = "+S 1:1"

// composeService is the single node of docker-compose.yml.
const composeService = "rabbitmq"

// projectID makes names that are the same each time for one cache folder.
func projectID(dir string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(dir)))[:6] }

// find looks for a daemon, compose and the compose file.
func (s *dockerSetup) find(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done {
		return s.err
	}
	if s.err = quick(ctx, "docker", "version", "--format", "{{.Server.Version}}"); s.err == nil {
		s.compose, s.err = findCompose(ctx)
	}
	if s.err == nil {
		s.file, s.err = composeFile()
	}
	s.done = ctx.Err() == nil // or the next caller, with another context, looks again
	return s.err
}

func findCompose(ctx context.Context) ([]string, error) {
	v2 := quick(ctx, "docker", "compose", "version")
	if v2 == nil {
		return []string{"docker", "compose"}, nil
	}
	if err := quick(ctx, "docker-compose", "version"); err != nil {
		return nil, fmt.Errorf("docker is here, but no compose: %w; %w", v2, err)
	}
	return []string{"docker-compose"}, nil
}

// quick runs a command that answers soon where all is well.
func quick(ctx context.Context, name string, args ...string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, probeDockerTimeout, fmt.Errorf("%s %s: no answer within %s", name, args[0], probeDockerTimeout))
	defer cancel()
	_, err := run(ctx, nil, name, args...)
	return err
}

// composeFile looks upwards from the current folder, which for a test is the
// one of its package.
func composeFile() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		file := filepath.Join(at, "docker-compose.yml")
		if _, err := os.Stat(file); err == nil {
			if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
				return file, nil
			}
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("no docker-compose.yml next to a go.mod in %s or above; run this inside the module", dir)
		}
	}
}

func (d *docker) prepare(ctx context.Context, version string, say sayFunc) (string, error) {
	if err := d.setup.find(ctx); err != nil {
		return "", err
	}
	return d.image(ctx, version, say)
}

func imagePresent(ctx context.Context, image string) bool {
	_, err := run(ctx, nil, "docker", "image", "inspect", "--format", "{{.Id}}", image)
	return err == nil
}

// officialImage is for docker.image.
func officialImage(ctx context.Context, version string, say sayFunc) (string, error) {
	image := "rabbitmq:" + version + "-management"
	if imagePresent(ctx, image) {
		return image, nil
	}
	defer say.during("pulling %s", image)()
	return image, pull(ctx, image)
}

// pull gives up soon if the registry gives no sign of life, since where none
// can be reached a name look-up or a firewall may let us wait for minutes.
func pull(ctx context.Context, image string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, pullTimeout, fmt.Errorf("not pulled within %s", pullTimeout))
	defer cancel()
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	alarm := time.AfterFunc(registryTimeout, func() {
		giveUp(fmt.Errorf("no image registry answers within %s", registryTimeout))
	})
	defer alarm.Stop()
	cmd := command(ctx, nil, "docker", "pull", image)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return commandError(ctx, err, "docker", []string{"pull"}, "")
	}
	// The first line names the image once the registry has answered.
	for lines := bufio.NewScanner(out); lines.Scan(); {
		alarm.Stop()
	}
	_, _ = io.Copy(io.Discard, out)
	return commandError(ctx, cmd.Wait(), "docker", []string{"pull"}, stderr.String())
}

// builder makes images from Debian's packages.
type builder struct{ trees *trees }

// builtLabel marks images that are ours to remove.
const builtLabel = "hopback.built"

// image is for docker.image.
func (b *builder) image(ctx context.Context, version string, say sayFunc) (string, error) {
	// The tag changes with the recipe, so an image of an older one isn't used.
	image := "hopback-rabbitmq:" + version + "-" + recipeOf(version).hash() + "-v4"
	if imagePresent(ctx, image) {
		return image, nil
	}
	tar, err := b.trees.tar(ctx, version, say)
	if err != nil {
		return "", err
	}
	defer say.during("importing the tree into Docker as %s", image)()
	_, err = run(ctx, nil, "docker", "import",
		"--change", "LABEL "+builtLabel+"=true",
		"--change", "USER rabbitmq",
		// As in the official image: files of queues don't go through a layered file system.
		"--change", "VOLUME /var/lib/rabbitmq",
		"--change", "ENV PATH=/usr/local/bin:"+treePath,
		"--change", "ENV HOME=/var/lib/rabbitmq",
		"--change", "ENV LANG=C.UTF-8",
		"--change", "ENV RABBITMQ_LOGS=-", // to standard output, for docker logs
		// Otherwise each line of the log looks at /etc/localtime, through the layered file system.
		"--change", "ENV TZ=UTC0",
		// What it says of each connection and queue takes a sixth of the CPU that tests need of it.
		"--change", "ENV RABBITMQ_LOG=warning",
		"--change", `ENTRYPOINT ["docker-entrypoint.sh"]`,
		"--change", `CMD ["rabbitmq-server"]`,
		tar, image)
	return image, err
}

// start makes the container, or starts it again.
func (d *docker) start(ctx context.Context, s *state, save func() error) error {
	if s.Project != "" {
		_, err := d.onContainer(ctx, s, "start")
		return err
	}
	services := []string{composeService}
	if err := d.setup.find(ctx); err != nil {
		return err
	}
	s.Project = "hopback-" + d.id + "-" + strings.ReplaceAll(s.Name, ".", "-")
	if err := save(); err != nil {
		return err
	}
	// A container of a lost record may be there.
	if err := d.remove(ctx, s); err != nil {
		return err
	}
	env := []string{
		"RABBITMQ_IMAGE=" + s.Source,
		fmt.Sprintf("RABBITMQ_PORT=%d", s.Ports.AMQP),
		fmt.Sprintf("RABBITMQ_MANAGEMENT_PORT=%d", s.Ports.HTTP),
		// Each health check starts an Erlang VM, which a test that measures
		// lateness would feel; we look for ourselves.
		"RABBITMQ_HEALTH_INTERVAL=24h",
	}
	if s.Lean {
		env = append(env, "RABBITMQ_ERL_ARGS="+leanArguments)
	}
	if len(s.Nodes) > 0 {
		services = services[:0]
		for i, n := range s.Nodes {
			services = append(services, s.node(i).service)
			env = append(env, fmt.Sprintf("RABBITMQ_PORT_%d=%d", i+1, n.AMQP), fmt.Sprintf("RABBITMQ_MANAGEMENT_PORT_%d=%d", i+1, n.HTTP))
		}
	}
	compose := append(slices.Clone(d.setup.compose), "-p", s.Project, "-f", d.setup.file, "up", "-d")
	compose = append(compose, services...)
	_, err := run(ctx, env, compose[0], compose[1:]...)
	return err
}

func (d *docker) stop(ctx context.Context, s *state) error {
	_, err := d.onContainer(ctx, s, "stop", "-t", "30")
	return err
}

func (d *docker) kill(ctx context.Context, s *state) error {
	_, err := d.onContainer(ctx, s, "kill")
	return err
}

// remove asks Docker by the label that compose gives, as the compose file may
// have changed since.
func (d *docker) remove(ctx context.Context, s *state) error {
	if s.Project == "" {
		return nil
	}
	filter := "label=com.docker.compose.project=" + s.Project
	for _, kind := range []struct{ list, remove []string }{
		{[]string{"ps", "-aq"}, []string{"rm", "-f", "-v"}},
		{[]string{"network", "ls", "-q"}, []string{"network", "rm"}},
	} {
		ids, err := run(ctx, nil, "docker", append(kind.list, "--filter", filter)...)
		if err != nil {
			return err
		}
		if len(ids) == 0 {
			continue
		}
		if _, err := run(ctx, nil, "docker", append(kind.remove, strings.Fields(string(ids))...)...); err != nil {
			return err
		}
	}
	return nil
}

func (d *docker) alive(ctx context.Context, s *state) bool {
	running, err := d.onContainer(ctx, s, "inspect", "--format", "{{.State.Running}}")
	return err == nil && strings.TrimSpace(string(running)) == "true"
}

func (d *docker) exec(ctx context.Context, s *state, args []string) ([]byte, error) {
	id, err := d.container(ctx, s)
	if err != nil {
		return nil, err
	}
	return run(ctx, nil, "docker", append([]string{"exec", id}, args...)...)
}

func (d *docker) lastWords(ctx context.Context, s *state) string {
	log, err := d.onContainer(ctx, s, "logs", "--tail", "5")
	if err != nil {
		return err.Error()
	}
	return lastLines(string(log), 5)
}

// iptables runs the machine's iptables in the container's network.
func (d *docker) iptables(ctx context.Context, s *state, args ...string) error {
	pid, err := d.onContainer(ctx, s, "inspect", "--format", "{{.State.Pid}}")
	if err == nil {
		_, err = run(ctx, nil, "nsenter", append([]string{"--target", strings.TrimSpace(string(pid)), "--net", "iptables", "-w"}, args...)...)
	}
	return err
}

func (d *docker) onContainer(ctx context.Context, s *state, verb string, args ...string) ([]byte, error) {
	id, err := d.container(ctx, s)
	if err != nil {
		return nil, err
	}
	return run(ctx, nil, "docker", append(append([]string{verb}, args...), id)...)
}

// container is that of a single broker, or of a cluster's node.
func (d *docker) container(ctx context.Context, s *state) (string, error) {
	ids, err := run(ctx, nil, "docker", "ps", "-aq",
		"--filter", "label=com.docker.compose.project="+s.Project,
		"--filter", "label=com.docker.compose.service="+s.composeService())
	if err != nil {
		return "", err
	}
	id := strings.TrimSpace(string(ids))
	if s.Project == "" || id == "" {
		return "", errors.New("its container is gone")
	}
	return id, nil
}

// removeImages removes what builder has made.
func removeImages(ctx context.Context) error {
	ids, err := run(ctx, nil, "docker", "images", "-q", "--filter", "label="+builtLabel)
	if err != nil || len(ids) == 0 {
		return err
	}
	_, err = run(ctx, nil, "docker", append([]string{"rmi", "-f"}, strings.Fields(string(ids))...)...)
	return err
}
