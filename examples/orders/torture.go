package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// part is a process of the shop.
type part struct {
	name string
	args []string
	env  []string

	cmd   *exec.Cmd
	kills int
}

func (p *part) start() error {
	p.cmd = exec.Command(os.Args[0], append([]string{"-leashed", "-shop", shop}, p.args...)...)
	p.cmd.Env = append(os.Environ(), p.env...)
	if _, err := p.cmd.StdinPipe(); err != nil { // it closes when this process stops
		return err
	}
	return p.cmd.Start()
}

// kill stops the process like kill -9.
func (p *part) kill() {
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}

// receipts counts the receipts at the end of the line.
type receipts struct {
	mu    sync.Mutex
	of    map[string]string // the message-id, by order
	again int               // duplicates with the same message-id
	wrong int               // duplicates with another message-id
}

func (r *receipts) add(order, messageID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	first, known := r.of[order]
	switch {
	case !known:
		r.of[order] = messageID
	case first == messageID:
		r.again++
	default:
		r.wrong++
	}
}

func (r *receipts) consume(ctx context.Context, conn *client.Conn) error {
	return conn.Consume(ctx, receiptsQueue(), client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		var o order
		if err := json.Unmarshal(d.Message().GetData(), &o); err != nil {
			return err
		}
		r.add(o.ID, fmt.Sprint(d.Message().Properties.MessageID))
		return nil
	}), client.ConsumerConfig{})
}

// open starts a service, two relays, and two workers. end kills them.
func open(listen, database, broker string) (parts []*part, end func(), err error) {
	env := []string{"HOPBACK_URL=" + broker, "HOPBACK_POSTGRES_URL=" + database}
	parts = append(parts, &part{name: "service", args: []string{"-listen", listen, "service"}, env: env})
	for _, name := range []string{"relay", "relay", "worker", "worker"} {
		parts = append(parts, &part{name: name, args: []string{name}, env: env})
	}
	for _, p := range parts {
		err = errors.Join(err, p.start())
	}
	return parts, func() {
		for _, p := range parts {
			p.kill()
		}
	}, err
}

// killAtRandom kills and restarts a random part each time the number of accepted orders reaches
// one of the numbers in at.
func killAtRandom(ctx context.Context, parts []*part, kills int, at func(i int) int, taken *atomic.Int64) error {
	for i := range kills {
		for int(taken.Load()) < at(i) && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		p := parts[rand.IntN(len(parts))]
		p.kill()
		p.kills++
		if err := p.start(); err != nil {
			return err
		}
		fmt.Printf("%d %s, ", taken.Load(), p.name)
	}
	return nil
}

// torture sends orders while it kills the parts of the shop, waits until all orders are paid,
// and checks the books.
func torture(ctx context.Context, database, broker string, orders, kills int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Minute, errors.New("the orders weren't finished within ten minutes"))
	defer cancel()
	shop = "torture." // next to a shop that is open
	quiet := slog.New(slog.DiscardHandler)
	pool, drop, err := ownDatabase(ctx, database)
	if err != nil {
		return err
	}
	defer drop()
	conn, err := client.Connect(ctx, broker, client.Config{Name: "orders torture", Logger: quiet})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := empty(ctx, conn); err != nil { // from a run that was killed itself
		return err
	}
	if err := setUp(ctx, pool, conn); err != nil {
		return err
	}
	before, err := books(ctx, pool)
	if err != nil {
		return err
	}
	listen, err := freeAddress()
	if err != nil {
		return err
	}
	parts, end, err := open(listen, databaseURL(database, pool), broker)
	defer end()
	if err != nil {
		return err
	}
	got := &receipts{of: map[string]string{}}
	consuming, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- got.consume(consuming, conn) }()
	if err := awaitListener(ctx, listen); err != nil {
		return err
	}
	fmt.Printf("sending %d orders, and killing %d processes, each after this number of orders: ", orders, kills)
	began := time.Now()
	c := &customers{url: "http://" + listen + "/orders"}
	sending := make(chan error, 1)
	go func() { sending <- c.send(ctx, orders) }()
	if err := killAtRandom(ctx, parts, kills, func(i int) int { return orders * (i + 1) / (kills + 1) }, &c.taken); err != nil {
		return err
	}
	if err := <-sending; err != nil {
		return err
	}
	fmt.Printf("%d the end\n", orders)
	err = settle(ctx, pool, conn, got, orders)
	stop()
	if e := <-ended; !errors.Is(e, context.Canceled) {
		err = errors.Join(err, e)
	}
	if err != nil {
		return err
	}
	after, err := books(ctx, pool)
	if err != nil {
		return err
	}
	end() // a part that has just been restarted would declare the topology again
	if err := empty(ctx, conn); err != nil {
		return err
	}
	return report(parts, c, got, before, after, orders, time.Since(began))
}

// customers send orders, and send an order again if they got no answer.
type customers struct {
	url          string
	taken, again atomic.Int64
}

func (c *customers) send(ctx context.Context, orders int) error {
	h := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	defer h.CloseIdleConnections()
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for range 8 {
		wg.Go(func() {
			for n := next.Add(1); int(n) <= orders; n = next.Add(1) {
				o := order{ID: fmt.Sprint("order-", n), Item: []string{"apples", "pears", "plums"}[rand.IntN(3)], Quantity: 1 + rand.IntN(5)}
				for !c.post(ctx, h, o) {
					if ctx.Err() != nil {
						errs <- context.Cause(ctx)
						return
					}
					c.again.Add(1)
					time.Sleep(20 * time.Millisecond)
				}
				c.taken.Add(1)
			}
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}

// post reports whether the service has accepted the order.
func (c *customers) post(ctx context.Context, h *http.Client, o order) bool {
	body, err := json.Marshal(o)
	if err != nil {
		return false
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return false
	}
	answer, err := h.Do(req)
	if err != nil {
		return false
	}
	defer func() { _ = answer.Body.Close() }()
	return answer.StatusCode == http.StatusCreated
}

// settle waits until every order is paid, every receipt has arrived, and no message is in flight.
func settle(ctx context.Context, pool *pgxpool.Pool, conn *client.Conn, got *receipts, orders int) error {
	var left string
	for limit := time.Now().Add(3 * time.Minute); time.Now().Before(limit); {
		var unpaid, inOutbox int
		if err := pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM orders WHERE NOT paid), (SELECT count(*) FROM hopback_outbox)").Scan(&unpaid, &inOutbox); err != nil {
			return err
		}
		waiting := 0
		for _, queue := range []string{ordersQueue(), receiptsQueue()} {
			info, err := declare.Inspect(ctx, conn.Management(), queue)
			if err != nil {
				return err
			}
			waiting += int(info.Messages)
		}
		got.mu.Lock()
		missing := orders - len(got.of)
		got.mu.Unlock()
		if unpaid+inOutbox+waiting+missing == 0 {
			return nil
		}
		left = fmt.Sprintf("unpaid orders: %d, messages in the outbox: %d, messages in queues: %d, missing receipts: %d", unpaid, inOutbox, waiting, missing)
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), errors.New(left))
		case <-time.After(20 * time.Millisecond):
		}
	}
	return errors.New("not finished after three minutes: " + left)
}

// item is one row of the books.
type item struct {
	name                 string
	stock, sold, ordered int
}

// ledger is the books.
type ledger struct {
	items                     []item
	orders, unpaid            int
	payments, twice, setAside int
	wrongSums                 int // orders whose payment isn't their price
}

func books(ctx context.Context, pool *pgxpool.Pool) (ledger, error) {
	var l ledger
	rows, err := pool.Query(ctx, `SELECT name, stock, sold, coalesce((SELECT sum(quantity) FROM orders WHERE item = name), 0)::int FROM items ORDER BY name`)
	if err != nil {
		return l, err
	}
	if l.items, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (i item, err error) {
		return i, row.Scan(&i.name, &i.stock, &i.sold, &i.ordered)
	}); err != nil {
		return l, err
	}
	err = pool.QueryRow(ctx, `WITH paid AS (SELECT order_id, count(*) AS n, sum(cents) AS cents FROM payments GROUP BY order_id)
SELECT (SELECT count(*) FROM orders),
	(SELECT count(*) FROM orders LEFT JOIN paid ON order_id = id WHERE order_id IS NULL),
	(SELECT count(*) FROM payments),
	(SELECT count(*) FROM paid WHERE n > 1),
	(SELECT count(*) FROM paid LEFT JOIN orders ON order_id = id WHERE id IS NULL OR cents <> quantity * $1),
	(SELECT count(*) FROM hopback_outbox_set_aside)`, price).Scan(&l.orders, &l.unpaid, &l.payments, &l.twice, &l.wrongSums, &l.setAside)
	return l, err
}

func report(parts []*part, c *customers, got *receipts, before, after ledger, orders int, took time.Duration) error {
	fmt.Printf("\n%-10s %10s %10s %10s %12s\n", "item", "at start", "stock", "sold", "stock + sold")
	balanced := true
	for i, it := range after.items {
		start := before.items[i].stock
		fmt.Printf("%-10s %10d %10d %10d %12d\n", it.name, start, it.stock, it.sold, it.stock+it.sold)
		balanced = balanced && it.stock+it.sold == start && it.sold == it.ordered
	}
	killed := map[string]int{}
	total := 0
	for _, p := range parts {
		killed[p.name] += p.kills
		total += p.kills
	}
	fmt.Println()
	line := func(what string, n int) { fmt.Printf("%-52s %8d\n", what, n) }
	line("processes killed", total)
	for _, name := range []string{"service", "relay", "worker"} {
		line("  "+name, killed[name])
	}
	line("orders sent", orders)
	line("  sent again after no answer", int(c.again.Load()))
	line("orders in the database", after.orders)
	line("payments", after.payments)
	line("  unpaid orders", after.unpaid)
	line("  orders paid twice", after.twice)
	line("  orders with a wrong payment", after.wrongSums)
	line("orders with a receipt", len(got.of))
	line("  duplicate receipts, with the same message-id", got.again)
	line("  duplicate receipts, with another message-id", got.wrong)
	line("messages set aside", after.setAside)
	fmt.Println()
	right := []bool{balanced, after.orders == orders, after.payments == orders, after.unpaid == 0, after.twice == 0, after.wrongSums == 0, len(got.of) == orders, got.wrong == 0, after.setAside == 0}
	if slices.Contains(right, false) {
		return errors.New("NOT PROVEN: the books don't balance")
	}
	fmt.Printf("PROVEN: %d kills in %.1f s, and each of %d orders is paid exactly once; stock + sold is unchanged\n", total, took.Seconds(), orders)
	return nil
}

// ownDatabase creates a database for this run.
func ownDatabase(ctx context.Context, at string) (pool *pgxpool.Pool, drop func(), err error) {
	admin, err := pgx.Connect(ctx, at)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = admin.Close(ctx) }()
	name := fmt.Sprintf("hopback_orders_%d", time.Now().UnixNano())
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return nil, nil, err
	}
	cfg, err := pgxpool.ParseConfig(at)
	if err != nil {
		return nil, nil, err
	}
	cfg.ConnConfig.Database = name
	if pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, nil, err
	}
	return pool, func() {
		pool.Close()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		if admin, err := pgx.Connect(ctx, at); err == nil {
			_, _ = admin.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
			_ = admin.Close(ctx)
		}
	}, nil
}

// databaseURL is the URL at with the name of the database of pool.
func databaseURL(at string, pool *pgxpool.Pool) string {
	u, err := url.Parse(at)
	if err != nil {
		return at
	}
	u.Path = "/" + pool.Config().ConnConfig.Database
	return u.String()
}

// empty deletes the shop's queues and exchanges.
func empty(ctx context.Context, conn *client.Conn) error {
	t, err := topology()
	if err != nil {
		return err
	}
	_, err = declare.Delete(ctx, conn.Management(), t)
	return err
}

// awaitListener waits until the service has started.
func awaitListener(ctx context.Context, address string) error {
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err == nil {
			return c.Close()
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String(), nil
}
