// Command payment-webhook is for a shop whose orders wait for somebody else: the payment provider
// calls a webhook when an order is paid, in seconds, in half an hour, or never.
//
// The worker parks each order under a token with client.Park, and is free for the next one. The
// webhook claims the order by its token, and ships it. An order that nobody has paid comes back by
// itself after an hour, 4 s here, and is canceled. There is no table of waiting orders, no polling,
// and no second queue.
//
// Two webhooks come too early: before the worker has parked their orders. They find nothing to claim,
// and answer 503, so the provider calls again, as providers do.
//
// It needs RabbitMQ 4.4:
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/payment-webhook
package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	queue  = "pay.orders"
	orders = 40
	paid   = 25 // the others are never paid
	early  = 2  // webhooks that come before their orders are parked
	giveUp = 4 * time.Second
)

var policy = retry.Policy{Strategy: retry.StrategyNative, Names: retry.Names{Prefix: "pay."}}

type order struct {
	ID string `json:"id"`
}

// shop has what a database would have.
type shop struct {
	s       *show.Stage
	claimer *client.Claimer

	mu       sync.Mutex
	paid     map[string]bool
	parked   map[string]bool
	shipped  map[string]int
	canceled map[string]int
	over     chan string // gets the ID of each order that is shipped or canceled
}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("Orders that wait for their payments")
	s.Declare(show.Must(retry.Topology(policy, declare.QuorumQueue{Name: queue, DeliveryLimit: 20})))
	p := &shop{s: s, paid: map[string]bool{}, parked: map[string]bool{}, shipped: map[string]int{}, canceled: map[string]int{}, over: make(chan string, orders)}
	p.claimer = show.Must(client.NewClaimer(s.Ctx, s.Conn, queue)) // closed with Conn
	webhook := serve(s, p)
	waits := show.Must(http.NewRequestWithContext(s.Ctx, http.MethodPost, webhook+"?"+url.Values{"order": {id(0)}}.Encode(), nil))
	s.Want(call(s, waits) == http.StatusServiceUnavailable, "a webhook without its order asks the provider to call again")

	stop := s.Consume(queue, retry.With(policy)(client.JSON(p.arrives)), client.ConsumerConfig{})
	defer stop()
	all := make([]order, orders)
	for i := range all {
		all[i].ID = id(i)
	}
	publisher := show.Must(client.NewPublisher[order](s.Ctx, s.Conn, address.Queue(queue), client.PublisherConfig{}))
	s.Check(publisher.PublishAll(s.Ctx, all))

	s.Act("The provider calls, for some of them")
	var provider sync.WaitGroup
	defer provider.Wait()
	began := time.Now()
	for i := range paid {
		if i >= early { // the first ones don't wait until the order is parked
			s.Want(p.waitsFor(id(i)), "order %d waits", i)
		}
		provider.Go(func() { pay(s, webhook, id(i)) })
	}
	ends := map[string]bool{}
	for len(ends) < paid {
		ends[show.Next(s, p.over, "an order that is paid")] = true
	}
	s.Say("%d orders are shipped, after %v", paid, time.Since(began).Round(time.Millisecond))
	provider.Wait()

	s.Act("Nobody pays for the others")
	for len(ends) < orders {
		ends[show.Next(s, p.over, "an order that is canceled")] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range orders {
		s.Want(p.shipped[id(i)] == map[bool]int{true: 1}[i < paid], "order %d is shipped if it is paid, and once: %d times", i, p.shipped[id(i)])
		s.Want(p.canceled[id(i)] == map[bool]int{true: 1}[i >= paid], "order %d is canceled if it isn't paid, and once: %d times", i, p.canceled[id(i)])
	}
	s.Holds(queue, 0)
	s.Proven("%d orders waited in their queue: %d were shipped by the webhook, called twice for each, and %d canceled when %v were over", orders, paid, orders-paid, giveUp)
}

func id(i int) string { return fmt.Sprintf("order-%d", i) }

func token(order string) string { return "payment/" + order }

// arrives is the worker's handler.
func (p *shop) arrives(ctx context.Context, o order) error {
	d, _ := client.DeliveryFrom(ctx)
	before, again := d.Parked()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.paid[o.ID]: // the webhook came first, or failed after it had noted the payment
		p.ship(o)
	case !again:
		p.parked[o.ID] = true
		return client.Park{Token: token(o.ID), Until: time.Now().Add(giveUp)}
	case time.Now().Before(before.Until): // it was woken early, for example by a webhook that crashed
		return before
	default:
		p.canceled[o.ID]++
		p.over <- o.ID
	}
	return nil
}

// webhook is called by the provider, at least once for each payment.
func (p *shop) webhook(w http.ResponseWriter, r *http.Request) {
	// A real one checks the provider's signature first: a token is a name, not a secret.
	order := r.FormValue("order")
	n, err := p.claimer.Claim(r.Context(), token(order), client.JSON(p.claimed))
	p.mu.Lock()
	done := p.shipped[order] > 0
	p.mu.Unlock()
	switch {
	case err != nil || n == 0 && !done:
		// Nothing waits: the order isn't parked yet, or it is given up. The provider calls again.
		http.Error(w, "this order doesn't wait for a payment", http.StatusServiceUnavailable)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// claimed is the handler of an order that the webhook has claimed. Once it returns nil, and the
// broker has confirmed that, the order is gone from the queue.
func (p *shop) claimed(_ context.Context, o order) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paid[o.ID] = true
	p.ship(o)
	return nil
}

// ship does nothing for an order that is shipped: messages are delivered at least once.
func (p *shop) ship(o order) {
	if p.shipped[o.ID] > 0 {
		return
	}
	p.shipped[o.ID]++
	p.over <- o.ID
}

// waitsFor waits until the worker has parked an order.
func (p *shop) waitsFor(order string) bool {
	for {
		p.mu.Lock()
		parked := p.parked[order]
		p.mu.Unlock()
		select {
		case <-p.s.Ctx.Done():
			return false
		case <-time.After(time.Millisecond):
		}
		if parked {
			return true
		}
	}
}

// serve starts the web server, and returns the webhook's URL.
func serve(s *show.Stage, p *shop) string {
	ln := show.Must((&net.ListenConfig{}).Listen(s.Ctx, "tcp", "127.0.0.1:0"))
	mux := http.NewServeMux()
	mux.HandleFunc("POST /payments", p.webhook)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = server.Serve(ln) }() // until the program ends
	return "http://" + ln.Addr().String() + "/payments"
}

// pay is the provider: it calls the webhook until that succeeds, and then once more, since it can
// lose an answer.
func pay(s *show.Stage, webhook, order string) {
	for successes := 0; successes < 2 && s.Ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		r, err := http.NewRequestWithContext(s.Ctx, http.MethodPost, webhook+"?"+url.Values{"order": {order}}.Encode(), nil)
		if err == nil && call(s, r) == http.StatusNoContent {
			successes++
		}
	}
}

// call returns the status of a reply, 0 if there is none.
func call(s *show.Stage, r *http.Request) int {
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		s.Say("the webhook: %v", err)
		return 0
	}
	_ = reply.Body.Close()
	return reply.StatusCode
}
