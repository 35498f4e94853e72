package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/integration/rabbitmq"
)

// site is the broker or cluster that a run has to itself.
type site struct {
	version string // "4.3.6"
	nodes   []*node
	release func(context.Context) error
	// whole waits until every node of a cluster sees the others; nil for one node.
	whole func(context.Context) error
}

// machine is what can be done to a node; brokers and nodes of clusters can.
type machine interface {
	Kill(context.Context) error
	Stop(context.Context) error
	Start(context.Context) error
	Exec(ctx context.Context, args ...string) ([]byte, error)
	Eval(ctx context.Context, expressions string) ([]byte, error)
}

// node is one broker node, and the two proxies in front of it.
type node struct {
	machine
	name            string // "rabbit@rabbit1"
	handOver        time.Duration
	url, management string
	publishers      *proxy.Proxy
	workers         *proxy.Proxy
}

// heartbeat is after how many seconds without a sign of life the broker treats a
// client as lost. What a client has prefetched is held until then.
const heartbeat = 6

// openSite starts what the run needs.
func openSite(ctx context.Context, out io.Writer, version string, nodes int, handOver time.Duration) (_ *site, err error) {
	s := &site{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close(ctx))
		}
	}()
	if nodes == 1 {
		b, err := rabbitmq.Own(ctx, out, version)
		if err != nil {
			return nil, err
		}
		s.version, s.release = b.FullVersion, b.Release
		s.nodes = []*node{{machine: b, url: b.URL, management: b.ManagementURL}}
	} else if err := s.openCluster(ctx, out, version); err != nil {
		return nil, err
	}
	for _, n := range s.nodes {
		u, err := url.Parse(n.url)
		if err != nil {
			return nil, err
		}
		for _, p := range []**proxy.Proxy{&n.publishers, &n.workers} {
			if *p, err = proxy.New(u.Host); err != nil {
				return nil, err
			}
		}
		n.handOver = handOver
		if err := n.configure(ctx); err != nil {
			return nil, err
		}
		name, err := n.Eval(ctx, "node().")
		if err != nil {
			return nil, err
		}
		n.name = strings.Trim(strings.TrimSpace(string(name)), "'")
	}
	return s, nil
}

func (s *site) close(ctx context.Context) error {
	for _, n := range s.nodes {
		for _, p := range []*proxy.Proxy{n.publishers, n.workers} {
			if p != nil {
				p.Close()
			}
		}
	}
	if s.release == nil {
		return nil
	}
	return s.release(ctx)
}

// configure makes the broker notice lost clients soon, try again soon what it
// couldn't dead-letter, and tell counts that are fresh. It has to be done again
// after each start, and holds for what begins later; the files are for what begins
// with the broker.
func (n *node) configure(ctx context.Context) error {
	ms := n.handOver.Milliseconds()
	_, _ = n.Exec(ctx, "sh", "-c", fmt.Sprintf(`[ -n "$RABBITMQ_CONFIG_FILE" ] || {
printf 'heartbeat = %d\ncollect_statistics_interval = 1000\n' >/etc/rabbitmq/conf.d/90-chaos.conf
printf '[{rabbit,[{dead_letter_worker_publisher_confirm_timeout,%d}]}].\n' >/etc/rabbitmq/advanced.config; }`, heartbeat, ms))
	_, err := n.Eval(ctx, fmt.Sprintf(
		"[application:set_env(rabbit,K,V) || {K,V} <- [{heartbeat,%d},{collect_statistics_interval,1000},{dead_letter_worker_publisher_confirm_timeout,%d}]].", heartbeat, ms))
	return err
}

func (n *node) startAgain(ctx context.Context) error {
	if err := n.Start(ctx); err != nil {
		return err
	}
	err := n.configure(ctx)
	// Who connected before that would be treated as lost only after minutes, and what it has prefetched be held until then.
	n.publishers.Cut()
	n.workers.Cut()
	return err
}

// signalBroker sends a signal to the Erlang VM, by those of its processes that run
// where the broker runs.
func (n *node) signalBroker(ctx context.Context, signal string) error {
	_, err := n.Exec(ctx, "sh", "-c", fmt.Sprintf(`for p in /proc/[0-9]*; do if [ "$(cat $p/comm 2>/dev/null)" = beam.smp ]; then kill -%s "${p#/proc/}" && done=1; fi; done; [ -n "$done" ]`, signal))
	return err
}

func (n *node) pause(ctx context.Context) error {
	if p, ok := n.machine.(interface{ Pause(context.Context) error }); ok {
		return p.Pause(ctx)
	}
	return n.signalBroker(ctx, "STOP")
}

func (n *node) unpause(ctx context.Context) error {
	if p, ok := n.machine.(interface{ Unpause(context.Context) error }); ok {
		return p.Unpause(ctx)
	}
	return n.signalBroker(ctx, "CONT")
}

// urls of the nodes through the proxies of a side, beginning with node first.
func (s *site) urls(first int, side func(*node) *proxy.Proxy) []string {
	urls := make([]string, 0, len(s.nodes))
	for i := range s.nodes {
		n := s.nodes[(first+i)%len(s.nodes)]
		u, err := url.Parse(n.url)
		if err != nil {
			panic(err) // it was parsed before
		}
		u.Host = side(n).Addr()
		urls = append(urls, u.String())
	}
	return urls
}

func (s *site) direct(first int) []string {
	urls := make([]string, 0, len(s.nodes))
	for i := range s.nodes {
		urls = append(urls, s.nodes[(first+i)%len(s.nodes)].url)
	}
	return urls
}

// api calls the HTTP API of the first node that answers.
func api[T any](ctx context.Context, s *site, method, path string, reply *T) error {
	var errs []error
	for _, n := range s.nodes {
		within, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := rabbitmq.API(within, method, n.management, path, reply)
		cancel()
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// QueueCount is what a queue holds, by the HTTP API.
type QueueCount struct {
	Name    string `json:"name"`
	Ready   int    `json:"messages_ready"`
	Unacked int    `json:"messages_unacknowledged"`
	DLX     int    `json:"messages_dlx"`     // awaiting that the next queue has taken them
	Delayed int    `json:"messages_delayed"` // Native
	// Messages is nil where the broker reports none, as while it starts.
	Messages *int `json:"messages"`
}

func (q QueueCount) total() int {
	n := q.DLX + q.Delayed
	if q.Messages != nil {
		n += *q.Messages
	}
	return n
}

func (q QueueCount) String() string {
	return fmt.Sprintf("%s: ready %d, unacked %d, dlx %d, delayed %d", q.Name, q.Ready, q.Unacked, q.DLX, q.Delayed)
}

func (s *site) queues(ctx context.Context) ([]QueueCount, error) {
	var qs []QueueCount
	err := api(ctx, s, http.MethodGet, "/queues/%2F", &qs)
	return qs, err
}
