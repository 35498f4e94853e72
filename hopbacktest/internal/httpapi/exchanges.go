package httpapi

import (
	"net/http"
	"net/url"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
)

func (a *api) exchanges() {
	of := func(vhost string, name *string) []engine.ExchangeInfo {
		var found []engine.ExchangeInfo
		for _, x := range a.b.Exchanges(vhost) {
			if name == nil || x.Name == *name {
				found = append(found, x)
			}
		}
		return found
	}
	a.listing("GET /exchanges", levelManagement, func(*call) []object { return list(of("", nil), exchange) })
	a.listing("GET /exchanges/{vhost}", levelManagement, func(c *call) []object { return list(of(c.vhost(), nil), exchange) })
	a.handle("GET /exchanges/{vhost}/{name}", levelManagement, func(c *call) reply {
		name := c.name()
		if name == "amq.default" {
			name = ""
		}
		found := of(c.vhost(), &name)
		if len(found) == 0 {
			return missing
		}
		return ok(exchange(found[0]))
	})
	a.handle("PUT /exchanges/{vhost}/{name}", levelManagement, func(c *call) reply {
		spec := struct {
			Type       string         `json:"type"`
			Durable    *bool          `json:"durable"`
			AutoDelete bool           `json:"auto_delete"`
			Internal   bool           `json:"internal"`
			Arguments  map[string]any `json:"arguments"`
		}{Type: "direct"}
		if err := c.read(&spec); err != nil {
			return failed(err)
		}
		is, err := a.b.DeclareExchange(c.vhost(), c.name(), engine.ExchangeSpec{
			Type: spec.Type, Durable: spec.Durable == nil || *spec.Durable, AutoDelete: spec.AutoDelete, Internal: spec.Internal, Arguments: spec.Arguments,
		})
		if err != nil {
			return failed(err)
		}
		return made(is)
	})
	a.handle("DELETE /exchanges/{vhost}/{name}", levelManagement, func(c *call) reply {
		if err := a.b.DeleteExchange(c.vhost(), c.name()); err != nil {
			return failed(err)
		}
		return made(false)
	})
	a.handle("GET /exchanges/{vhost}/{name}/bindings/source", levelManagement, func(c *call) reply {
		return ok(list(a.bound(c.vhost(), func(b engine.BindingInfo) bool { return b.Source == c.name() }), binding))
	})
	a.handle("GET /exchanges/{vhost}/{name}/bindings/destination", levelManagement, func(c *call) reply {
		return ok(list(a.bound(c.vhost(), func(b engine.BindingInfo) bool { return b.ToExchange && b.Destination == c.name() }), binding))
	})
}

func exchange(x engine.ExchangeInfo) object {
	return object{
		"name": x.Name, "vhost": x.VHost, "type": x.Type, "durable": x.Durable, "auto_delete": x.AutoDelete, "internal": x.Internal,
		"arguments": x.Arguments, "policy": orNull(x.Policy), "user_who_performed_action": "guest",
	}
}

// bound are the bindings that a condition holds for.
func (a *api) bound(vhost string, is func(engine.BindingInfo) bool) []engine.BindingInfo {
	var found []engine.BindingInfo
	for _, b := range a.b.Bindings(vhost) {
		if is(b) {
			found = append(found, b)
		}
	}
	return found
}

func (a *api) bindings() {
	every := func(engine.BindingInfo) bool { return true }
	a.handle("GET /bindings", levelManagement, func(*call) reply { return ok(list(a.bound("", every), binding)) })
	a.handle("GET /bindings/{vhost}", levelManagement, func(c *call) reply { return ok(list(a.bound(c.vhost(), every), binding)) })
	const between = "/bindings/{vhost}/e/{source}/{kind}/{destination}"
	target := func(c *call) (engine.BindingInfo, bool) {
		kind := c.value("kind")
		return engine.BindingInfo{
			VHost: c.vhost(), Source: c.value("source"), Destination: c.value("destination"), ToExchange: kind == "e",
		}, kind == "e" || kind == "q"
	}
	a.handle("GET "+between, levelManagement, func(c *call) reply {
		of, valid := target(c)
		if !valid {
			return missing
		}
		return ok(list(a.bound(of.VHost, func(b engine.BindingInfo) bool {
			return b.Source == of.Source && b.Destination == of.Destination && b.ToExchange == of.ToExchange
		}), binding))
	})
	a.handle("POST "+between, levelManagement, func(c *call) reply {
		of, valid := target(c)
		if !valid {
			return missing
		}
		spec := struct {
			Key       string         `json:"routing_key"`
			Arguments map[string]any `json:"arguments"`
		}{}
		if err := c.read(&spec); err != nil {
			return failed(err)
		}
		of.Key, of.Arguments = spec.Key, spec.Arguments
		properties, err := a.b.Bind(of)
		if err != nil {
			return failed(err)
		}
		return reply{status: http.StatusCreated, location: url.PathEscape(of.Destination) + "/" + url.PathEscape(properties)}
	})
	a.handle("DELETE "+between+"/{properties}", levelManagement, func(c *call) reply {
		of, valid := target(c)
		of.Properties = c.value("properties")
		if !valid {
			return missing
		}
		if err := a.b.Unbind(of); err != nil {
			return failed(err)
		}
		return made(false)
	})
}

func binding(b engine.BindingInfo) object {
	kind := "queue"
	if b.ToExchange {
		kind = "exchange"
	}
	return object{
		"source": b.Source, "vhost": b.VHost, "destination": b.Destination, "destination_type": kind, "routing_key": b.Key,
		"arguments": b.Arguments, "properties_key": b.Properties,
	}
}
