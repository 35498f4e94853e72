package hopbacktest

import (
	"net/http"

	"github.com/hopback/hopback/hopbacktest/internal/httpapi"
)

// HTTPHandler returns RabbitMQ's management HTTP API, with paths that start with /api. Serve it
// with an httptest.Server or any http.Server. It has virtual hosts, users, permissions, limits,
// queues, exchanges, bindings, policies, definitions, connections, nodes, and health checks. It
// has no web pages, and can't publish or get messages, since RabbitMQ's API does that with
// AMQP 0-9-1.
func (b *Broker) HTTPHandler() http.Handler { return httpapi.New(b.engine) }
