package hopbacktest

import (
	"net/http"

	"github.com/hopback/hopback/hopbacktest/internal/httpapi"
)

// HTTPHandler is RabbitMQ's management HTTP API, whose paths begin with /api: virtual
// hosts, users, permissions, limits, queues, exchanges, bindings, policies, definitions,
// connections, nodes and health checks. It has no pages. An httptest.Server serves it, or
// any other.
func (b *Broker) HTTPHandler() http.Handler { return httpapi.New(b.engine) }
