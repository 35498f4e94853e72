package httpapi

import (
	"net/http"
	"slices"
	"strings"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

func (a *api) status() {
	a.handle("GET /overview", levelManagement, func(*call) reply {
		ready, held := 0, 0
		queues := a.b.Queues("")
		for _, q := range queues {
			ready, held = ready+q.Ready, held+q.Unacknowledged
		}
		version := a.b.Version()
		return ok(object{
			"rabbitmq_version": version, "management_version": version, "product_version": version, "product_name": "RabbitMQ",
			"node": a.b.Node(), "cluster_name": a.b.Node(), "erlang_version": "hopbacktest",
			"queue_totals":  object{"messages": ready + held, "messages_ready": ready, "messages_unacknowledged": held},
			"object_totals": object{"queues": len(queues), "exchanges": len(a.b.Exchanges("")), "connections": len(a.b.Connections()), "consumers": consumers(queues), "channels": 0},
			"listeners":     []object{}, "contexts": []object{},
		})
	})
	nodes := func() []object { return list(a.b.Nodes(), a.node) }
	a.handle("GET /nodes", levelMonitoring, func(*call) reply { return ok(nodes()) })
	a.handle("GET /nodes/{name}", levelMonitoring, func(c *call) reply {
		if !slices.Contains(a.b.Nodes(), c.name()) {
			return missing
		}
		return ok(a.node(c.name()))
	})
	a.connections()
	a.handle("GET /health/checks/{check...}", levelManagement, func(c *call) reply {
		check, _, _ := strings.Cut(c.value("check"), "/")
		if !slices.Contains([]string{"alarms", "local-alarms", "virtual-hosts", "node-is-quorum-critical", "port-listener"}, check) {
			return unmodeled("the health check " + check)
		}
		alarms := a.b.Alarms()
		if !strings.HasSuffix(check, "alarms") || len(alarms) == 0 {
			return ok(object{"status": "ok"})
		}
		return reply{status: http.StatusServiceUnavailable, body: object{
			"status": "failed", "reason": "There are alarms in effect in the cluster",
			"alarms": list(alarms, func(alarm engine.Alarm) object { return object{"node": a.b.Node(), "resource": alarm} }),
		}}
	})
}

func consumers(queues []engine.QueueInfo) (n int) {
	for _, q := range queues {
		n += q.Consumers
	}
	return n
}

func (a *api) node(name string) object {
	alarms := a.b.Alarms()
	return object{
		"name": name, "type": "disc", "running": true, "mem_alarm": slices.Contains(alarms, engine.AlarmMemory),
		"disk_free_alarm": slices.Contains(alarms, engine.AlarmDisk), "partitions": []string{}, "being_drained": false,
	}
}

func (a *api) connections() {
	find := func(name string) (engine.ConnectionInfo, bool) {
		all := a.b.Connections()
		i := slices.IndexFunc(all, func(c engine.ConnectionInfo) bool { return c.Name == name })
		if i < 0 {
			return engine.ConnectionInfo{}, false
		}
		return all[i], true
	}
	a.handle("GET /connections", levelManagement, func(*call) reply { return ok(list(a.b.Connections(), connection)) })
	a.handle("GET /connections/{name}", levelManagement, func(c *call) reply {
		o, there := find(c.name())
		if !there {
			return missing
		}
		return ok(connection(o))
	})
	a.handle("DELETE /connections/{name}", levelManagement, func(c *call) reply {
		reason := c.Header.Get("X-Reason")
		if reason == "" {
			reason = "Closed via management plugin"
		}
		if !a.b.CloseConnection(c.name(), reason) {
			return missing
		}
		return made(false)
	})
	a.handle("GET /connections/{name}/sessions", levelManagement, func(c *call) reply {
		n, err := a.b.Sessions(c.name())
		if err != nil || !a.newer() {
			return missing
		}
		sessions := make([]object, n)
		for i := range sessions {
			sessions[i] = object{"channel_number": i, "handle_max": 255, "incoming_links": []object{}, "outgoing_links": []object{}}
		}
		return ok(sessions)
	})
}

func connection(c engine.ConnectionInfo) object {
	properties := object{}
	for _, e := range c.Peer.Properties {
		if key, ok := e.Key.(frames.Symbol); ok {
			switch v := e.Value.(type) {
			case string, bool:
				properties[string(key)] = v
			case frames.Symbol:
				properties[string(key)] = string(v)
			}
		}
	}
	return object{
		"name": c.Name, "user": c.User, "vhost": c.VHost, "protocol": "AMQP 1-0", "container_id": c.Peer.ContainerID, "state": "running",
		"connected_at": c.Since.UnixMilli(), "client_properties": properties, "channels": c.Sessions, "type": "network",
	}
}
