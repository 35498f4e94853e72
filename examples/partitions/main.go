// Command partitions is for teams that need order by key and more than one worker: 200 customers
// change their accounts all the time, workers come and go, and some changes fail and are retried.
//
// The example publishes the changes of each customer with numbers, and starts and stops workers
// at the same time. It prints who handles which partition whenever that changes. Every change of a
// customer is handled after the one before, by one worker at a time.
//
// To see the owners on the command line, use "hopback partition show". It needs RabbitMQ 4.3.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/partitions
package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

const (
	customers  = 200
	partitions = 12
	dead       = "elastic.dead"
)

var group = partition.Group{Name: "elastic", Partitions: partitions}

// change is the nth change of a customer's account.
type change struct {
	Customer string `json:"customer"`
	N        int    `json:"n"`
}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("12 partitions, and one worker")
	topology := show.Must(group.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue(dead), DeliveryLimit: declare.Unlimited}))
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: dead, DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
	s.Declare(topology)
	accounts := &accounts{last: map[string]int{}}
	pool := &pool{stage: s, handle: accounts.handle}
	defer pool.stopAll()
	stopPublishing := publish(s)
	pool.start("ann")
	pool.balanced()

	s.Act("Three more workers join")
	for _, name := range []string{"bob", "cid", "dee"} {
		pool.start(name)
	}
	pool.balanced()

	s.Act("One of them leaves")
	pool.stop("bob")
	pool.balanced()

	s.Act("The rest of the changes")
	published := stopPublishing()
	for accounts.handled() < published {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-s.Ctx.Done():
			s.Want(false, "all changes are handled: %d of %d are", accounts.handled(), published)
		}
	}
	accounts.mu.Lock()
	defer accounts.mu.Unlock()
	s.Want(accounts.early == 0, "no change was handled before an earlier one: %d were", accounts.early)
	s.Want(accounts.failed > 0, "some changes failed")
	s.Proven("%d changes of %d customers in their order, with %d retries, on up to 4 workers", published, customers, accounts.failed)
}

// publish publishes changes until stop is called, which returns how many.
func publish(s *show.Stage) (stop func() int) {
	p := show.Must(client.NewPublisher[change](s.Ctx, s.Conn, address.Address{}, client.PublisherConfig{})) // closed with Conn
	ended, done := make(chan struct{}), make(chan error, 1)
	published := 0
	go func() {
		done <- func() error {
			for n := 1; ; n++ {
				round := make([]change, customers)
				for c := range round {
					round[c] = change{fmt.Sprint("customer-", c), n}
				}
				if err := p.PublishAll(s.Ctx, round, func(c change, m *client.Message) { client.PublishTo(group.Address(c.Customer))(m) }); err != nil {
					return err
				}
				published += customers
				select {
				case <-ended:
					return nil
				case <-time.After(10 * time.Millisecond):
				}
			}
		}()
	}()
	return func() int {
		close(ended)
		s.Check(<-done)
		return published
	}
}

// accounts checks the order of changes.
type accounts struct {
	mu                   sync.Mutex
	last                 map[string]int
	count, early, failed int
}

func (a *accounts) handled() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.count
}

// handle fails the first attempt of every fifth change of a customer.
func (a *accounts) handle(ctx context.Context, c change) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.N > a.last[c.Customer]+1 {
		a.early++
	}
	if c.N%5 == 0 && retry.Attempt(ctx) == 1 {
		a.failed++
		return errors.New("the database is busy")
	}
	if c.N > a.last[c.Customer] { // a duplicate changes nothing
		a.last[c.Customer] = c.N
		a.count++
	}
	return nil
}

// pool is the workers. In production, each is a process.
type pool struct {
	stage   *show.Stage
	handle  func(context.Context, change) error
	workers []*worker

	mu     sync.Mutex
	owners [partitions]string
}

type worker struct {
	name  string
	leave context.CancelFunc
	done  chan error
}

func (p *pool) start(name string) {
	conn := show.Must(client.Connect(p.stage.Ctx, p.stage.URL, client.Config{Name: name}))
	ctx, leave := context.WithCancel(p.stage.Ctx)
	w := &worker{name, leave, make(chan error, 1)}
	p.workers = append(p.workers, w)
	go func() {
		err := partition.Consume(ctx, conn, group, client.JSON(p.handle), partition.Config{
			Worker:     name,
			Retry:      retry.Policy{Backoff: retry.Exponential(100*time.Millisecond, 2)},
			OnAssigned: func(i int, owned bool) { p.assigned(name, i, owned) },
		})
		w.done <- errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
	}()
}

func (p *pool) stop(name string) {
	i := slices.IndexFunc(p.workers, func(w *worker) bool { return w.name == name })
	w := p.workers[i]
	p.workers = slices.Delete(p.workers, i, i+1)
	w.leave()
	p.stage.Check(<-w.done)
}

func (p *pool) stopAll() {
	for _, w := range p.workers {
		w.leave()
		<-w.done
	}
}

// assigned prints who has which partition: one letter each.
func (p *pool) assigned(name string, partition int, owned bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case owned:
		p.owners[partition] = name
	case p.owners[partition] == name:
		p.owners[partition] = ""
	}
	var line strings.Builder
	for _, owner := range p.owners {
		if owner == "" {
			owner = "."
		}
		line.WriteString(owner[:1])
	}
	verb := "gave up"
	if owned {
		verb = "took"
	}
	p.stage.Say("%s   %s %s partition %d", line.String(), name, verb, partition)
}

// balanced waits until the workers have equal shares, and asks them who has what.
func (p *pool) balanced() {
	for {
		shares := map[string]int{}
		for _, state := range show.Must(partition.Inspect(p.stage.Ctx, p.stage.Conn, group)) {
			shares[state.Owner]++
		}
		if len(shares) == len(p.workers) && shares[p.workers[0].name] == partitions/len(p.workers) && even(shares) {
			p.stage.Say("the shares are %v", shares)
			return
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-p.stage.Ctx.Done():
			p.stage.Want(false, "the shares are equal: they are %v", shares)
		}
	}
}

func even(shares map[string]int) bool {
	for _, n := range shares {
		if n != partitions/len(shares) {
			return false
		}
	}
	return true
}
