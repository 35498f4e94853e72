package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"

	"github.com/hopback/hopback/declare"
)

// act disturbs the run, or repairs it. It returns at once: what asks the broker does so on a goroutine, and an error
// is logged.
func (l *lab) act(what, name string) {
	switch what {
	case "cut":
		l.cutWorker()
	case "start":
		l.startWorker()
	case "stop":
		l.stopWorker()
	case "alarm", "no alarm":
		l.broker.SetMemoryAlarm(what == "alarm")
		l.mu.Lock()
		defer l.mu.Unlock()
		l.alarm = what == "alarm"
	default:
		l.wg.Go(func() {
			ctx, cancel := context.WithTimeout(l.ctx, startTimeout)
			defer cancel()
			if err := l.change(ctx, what, name); err != nil && l.ctx.Err() == nil {
				l.logger.Error("can't "+what, "name", name, "error", err)
			}
		})
	}
}

// change changes the broker's topology, as an operator or another team does.
func (l *lab) change(ctx context.Context, what, name string) error {
	switch what {
	case "delete":
		_, err := declare.DeleteQueue(ctx, l.conn.Management(), name)
		return err
	case "bind":
		return l.bindForeign(ctx, name)
	case "apply":
		_, err := declare.Apply(ctx, l.conn.Management(), l.topology)
		return err
	case "import":
		_, err := l.definitions(ctx, http.MethodPost, l.exported)
		return err
	}
	return nil
}

// bindForeign binds a queue of another team to an exchange, so that it gets a copy of what passes.
func (l *lab) bindForeign(ctx context.Context, exchange string) error {
	key := "#"
	for _, e := range l.topology.Exchanges {
		if e.Name == exchange && e.Type == declare.ExchangeDirect {
			key = workQueue
		}
	}
	_, err := declare.Apply(ctx, l.conn.Management(), declare.Topology{
		Queues:   []declare.Queue{declare.QuorumQueue{Name: foreignQueue, DeadLetter: declare.Drop()}},
		Bindings: []declare.Binding{{Source: exchange, Queue: foreignQueue, Key: key}},
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && !slices.Contains(l.foreign, exchange) {
		l.foreign = append(l.foreign, exchange)
	}
	return err
}

// definitions calls the broker's HTTP API, and returns its answer.
func (l *lab) definitions(ctx context.Context, method string, body []byte) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://localhost/api/definitions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.SetBasicAuth("guest", "guest")
	a := answer{status: http.StatusOK}
	l.broker.HTTPHandler().ServeHTTP(&a, r)
	if a.status/100 != 2 {
		return nil, fmt.Errorf("RabbitMQ answers %d: %s", a.status, a.Bytes())
	}
	return a.Bytes(), nil
}

// answer is what an HTTP handler writes.
type answer struct {
	bytes.Buffer
	header http.Header
	status int
}

func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

func (a *answer) WriteHeader(status int) { a.status = status }
