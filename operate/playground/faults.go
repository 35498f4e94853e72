package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"

	"github.com/hopback/hopback/declare"
)

// act disturbs the run, or repairs it, as an operator or another team does. It returns at once: what asks the broker
// does so on a goroutine, and an error is logged.
func (l *lab) act(what, name string) {
	var change func(ctx context.Context) error
	switch what {
	case "cut":
		l.cut()
	case "start":
		l.startWorker()
	case "stop":
		l.stopWorker()
	case "alarm", "no alarm":
		l.broker.SetMemoryAlarm(what == "alarm")
		l.mu.Lock()
		defer l.mu.Unlock()
		l.alarm = what == "alarm"
	case "delete":
		change = func(ctx context.Context) error {
			_, err := declare.DeleteQueue(ctx, l.conn.Management(), name)
			return err
		}
	case "bind":
		change = func(ctx context.Context) error { return l.bindForeign(ctx, name) }
	case "apply":
		change = l.apply
	case "import":
		change = func(context.Context) error {
			_, err := l.definitions(http.MethodPost, l.exported)
			return err
		}
	}
	if change != nil {
		l.wg.Go(func() {
			ctx, cancel := context.WithTimeout(l.ctx, startTimeout)
			defer cancel()
			if err := change(ctx); err != nil && l.ctx.Err() == nil {
				l.logger.Error("can't "+what, "name", name, "error", err)
			}
		})
	}
}

func (l *lab) apply(ctx context.Context) error {
	_, err := declare.Apply(ctx, l.conn.Management(), l.topology)
	return err
}

// bindForeign binds a queue of another team to an exchange, so that it gets a copy of what passes. Of the two keys, the
// exchange's type decides which one matters.
func (l *lab) bindForeign(ctx context.Context, exchange string) error {
	_, err := declare.Apply(ctx, l.conn.Management(), declare.Topology{
		Queues:   []declare.Queue{declare.QuorumQueue{Name: foreignQueue, DeadLetter: declare.Drop()}},
		Bindings: []declare.Binding{{Source: exchange, Queue: foreignQueue, Key: "#"}, {Source: exchange, Queue: foreignQueue, Key: workQueue}},
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && !slices.Contains(l.foreign, exchange) {
		l.foreign = append(l.foreign, exchange)
	}
	return err
}

// definitions exports or imports them with RabbitMQ's HTTP API.
func (l *lab) definitions(method string, body []byte) ([]byte, error) {
	r, w := httptest.NewRequest(method, "/api/definitions", bytes.NewReader(body)), httptest.NewRecorder()
	r.SetBasicAuth("guest", "guest")
	if l.broker.HTTPHandler().ServeHTTP(w, r); w.Code >= 300 {
		return nil, fmt.Errorf("RabbitMQ answers %d: %s", w.Code, w.Body)
	}
	return w.Body.Bytes(), nil
}
