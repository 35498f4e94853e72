package httpapi

import (
	"slices"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
)

func (a *api) queues() {
	a.listing("GET /queues", levelManagement, func(*call) []object { return list(a.b.Queues(""), a.queue) })
	a.listing("GET /queues/{vhost}", levelManagement, func(c *call) []object { return list(a.b.Queues(c.vhost()), a.queue) })
	a.handle("GET /queues/{vhost}/{name}", levelManagement, func(c *call) reply {
		q, err := a.b.Queue(c.vhost(), c.name())
		if err != nil {
			return failed(err)
		}
		return ok(a.queue(q))
	})
	a.handle("PUT /queues/{vhost}/{name}", levelManagement, func(c *call) reply {
		spec := struct {
			Durable    *bool          `json:"durable"`
			AutoDelete bool           `json:"auto_delete"`
			Arguments  map[string]any `json:"arguments"`
		}{}
		if err := c.read(&spec); err != nil {
			return failed(err)
		}
		durable := spec.Durable == nil || *spec.Durable
		is, err := a.b.DeclareQueue(c.vhost(), c.name(), engine.QueueSpec{Durable: durable, AutoDelete: spec.AutoDelete, Arguments: spec.Arguments})
		if err != nil {
			return failed(err)
		}
		return made(is)
	})
	a.handle("DELETE /queues/{vhost}/{name}", levelManagement, func(c *call) reply {
		q, err := a.b.Queue(c.vhost(), c.name())
		switch {
		case err != nil:
			return failed(err)
		case c.URL.Query().Get("if-empty") == "true" && q.Messages > 0:
			return bad("queue '" + q.Name + "' in vhost '" + q.VHost + "' is not empty")
		case c.URL.Query().Get("if-unused") == "true" && q.Consumers > 0:
			return bad("queue '" + q.Name + "' in vhost '" + q.VHost + "' in use")
		}
		if err := a.b.ForgetQueue(c.vhost(), c.name()); err != nil {
			return failed(err)
		}
		return made(false)
	})
	a.handle("DELETE /queues/{vhost}/{name}/contents", levelManagement, func(c *call) reply {
		if _, err := a.b.PurgeQueue(c.vhost(), c.name()); err != nil {
			return failed(err)
		}
		return made(false)
	})
	a.handle("GET /queues/{vhost}/{name}/bindings", levelManagement, func(c *call) reply {
		return ok(list(a.bound(c.vhost(), func(b engine.BindingInfo) bool { return !b.ToExchange && b.Destination == c.name() }), binding))
	})
}

func (a *api) queue(q engine.QueueInfo) object {
	o := object{
		"name": q.Name, "vhost": q.VHost, "type": q.Type, "durable": q.Durable, "auto_delete": q.AutoDelete, "exclusive": q.Exclusive,
		"arguments": q.Arguments, "node": q.Leader, "state": "running", "consumers": q.Consumers,
		"messages": q.Messages, "messages_ready": q.Ready, "messages_unacknowledged": q.Unacknowledged,
		"message_bytes": q.ReadyBytes + q.UnacknowledgedBytes, "message_bytes_ready": q.ReadyBytes, "message_bytes_unacknowledged": q.UnacknowledgedBytes,
		"policy": orNull(q.Policy), "operator_policy": orNull(q.OperatorPolicy), "effective_policy_definition": object{},
		"message_stats": object{"publish": q.Published, "deliver": q.Delivered},
	}
	if q.EffectivePolicy != nil {
		o["effective_policy_definition"] = q.EffectivePolicy
	}
	if q.Type != "classic" {
		slices.Sort(q.Nodes)
		o["leader"], o["members"], o["online"] = q.Leader, q.Nodes, q.Nodes
		o["messages_dlx"] = q.DeadLettering
		if q.DeliveryLimit < 0 {
			o["delivery_limit"] = "unlimited"
		} else {
			o["delivery_limit"] = q.DeliveryLimit
		}
		if a.newer() {
			o["messages_delayed"] = q.Delayed
			if q.Delayed > 0 {
				o["next_delayed_at"], o["last_delayed_at"] = q.NextDelayed.UnixMilli(), q.LastDelayed.UnixMilli()
			}
		}
	}
	return o
}

func (a *api) newer() bool { return a.b.Version()[:3] != "4.0" }

func orNull(s string) any {
	if s == "" {
		return nil
	}
	return s
}
