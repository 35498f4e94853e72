package hopbacktest

import (
	"net/http"

	"github.com/hopback/hopback/hopbacktest/internal/httpapi"
)

// HTTPHandler returns RabbitMQ's management HTTP API, whose paths begin with /api: virtual
// hosts, users, permissions, limits, queues, exchanges, bindings, policies, definitions,
// connections, nodes and health checks. It has no web pages, and
// doesn't publish or get messages, which would be messages of AMQP 0-9-1. Serve it with an
// httptest.Server or any http.Server.
func (b *Broker) HTTPHandler() http.Handler { return httpapi.New(b.engine) }
