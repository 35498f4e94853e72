package suite

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// CentralConsumer is how the documentation runs Central.
var CentralConsumer = client.ConsumerConfig{Prefetch: 1000, NoIsolation: true}

// Central declares what Central needs, and runs it.
func Central(t *testing.T, conn *client.Conn, p retry.Policy, cfg retry.CentralConfig, work ...declare.QuorumQueue) (stop func() error) {
	t.Helper()
	topology, err := retry.CentralTopology(p, cfg, work...)
	require.NoError(t, err)
	Apply(t, conn, topology)
	return RunCentral(t, conn, p, cfg, work...)
}

func RunCentral(t *testing.T, conn *client.Conn, p retry.Policy, cfg retry.CentralConfig, work ...declare.QuorumQueue) (stop func() error) {
	t.Helper()
	for _, q := range work {
		cfg.Queues = append(slices.Clone(cfg.Queues), q.Name)
	}
	failed := cfg.FailedQueue
	if failed == "" {
		failed = p.Names.Prefix + "failed_queue"
	}
	return Consume(t, conn, failed, retry.Central(p, cfg), CentralConsumer)
}

// ByHand is a worker without hopback, which settles by itself.
func (p *Peer) ByHand(queue string, settle func(r *amqp.Receiver, m *amqp.Message) error) {
	p.t.Helper()
	r := p.Receiver(queue, 1000)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	p.t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for n := 1; ; n++ {
			m, err := r.Receive(ctx, nil)
			if err != nil {
				return
			}
			if err := settle(r, m); err != nil {
				return
			}
			if n%100 == 0 {
				if err := r.IssueCredit(100); err != nil {
					return
				}
			}
		}
	}()
}

// Rejections are what a worker sees of messages that fail twice: by body, how often each
// number of retries came.
type Rejections struct {
	Mu   sync.Mutex
	Seen map[string]*[3]int
	More int // attempts beyond the policy's
	done int // messages that came a third time
	All  int
	// first counts the attempts that were no retries.
	first int
}

func (r *Rejections) next(body string, retries int) (again bool) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	r.All++
	if r.Seen[body] == nil {
		r.Seen[body] = new([3]int)
	}
	if retries > 2 {
		r.More++
		return false
	}
	r.Seen[body][retries]++
	if retries == 0 {
		r.first++
	}
	if retries == 2 && r.Seen[body][2] == 1 {
		r.done++
	}
	return retries < 2
}

func (r *Rejections) Counts() (done, all int) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	return r.done, r.All
}

// Retried is how many attempts were retries.
func (r *Rejections) Retried() int {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	return r.All - r.first
}

// Rejecting is a worker, without hopback, that rejects what has less than two retries.
func (p *Peer) Rejecting(queue string, r *Rejections) {
	p.ByHand(queue, func(l *amqp.Receiver, m *amqp.Message) error {
		if r.next(string(m.GetData()), retry.Count(m)) {
			return l.RejectMessage(context.Background(), m, nil)
		}
		return l.AcceptMessage(context.Background(), m)
	})
}
