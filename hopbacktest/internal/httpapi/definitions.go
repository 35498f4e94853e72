package httpapi

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
)

func (a *api) definitions() {
	a.handle("GET /definitions", levelAdministrator, func(*call) reply { return ok(a.export("")) })
	a.handle("GET /definitions/{vhost}", levelAdministrator, func(c *call) reply {
		if _, err := a.b.DeclareExchange(c.vhost(), "amq.topic", engine.ExchangeSpec{Type: "topic", Durable: true}); err != nil {
			return failed(err) // there is no such virtual host
		}
		return ok(a.export(c.vhost()))
	})
	a.handle("POST /definitions", levelAdministrator, func(c *call) reply { return a.imported("", c.body) })
	a.handle("POST /definitions/{vhost}", levelAdministrator, func(c *call) reply { return a.imported(c.vhost(), c.body) })
}

// export is all that isn't there by itself. Of one virtual host its name is left out.
func (a *api) export(of string) object {
	version := a.b.Version()
	o := object{
		"rabbit_version": version, "rabbitmq_version": version, "product_name": "RabbitMQ", "product_version": version,
	}
	plain := func(x object) object {
		if of != "" {
			delete(x, "vhost")
		}
		return x
	}
	queues, exchanges, bindings := []object{}, []object{}, []object{}
	policies, parameters := []object{}, []object{}
	for _, q := range a.b.Queues(of) {
		if !q.Exclusive {
			queues = append(queues, plain(object{
				"name": q.Name, "vhost": q.VHost, "type": q.Type, "durable": q.Durable, "auto_delete": q.AutoDelete, "arguments": q.Arguments,
			}))
		}
	}
	for _, x := range a.b.Exchanges(of) {
		if x.Name != "" && !strings.HasPrefix(x.Name, "amq.") && !(x.Internal && a.newer()) {
			exchanges = append(exchanges, plain(object{
				"name": x.Name, "vhost": x.VHost, "type": x.Type, "durable": x.Durable, "auto_delete": x.AutoDelete, "internal": x.Internal, "arguments": x.Arguments,
			}))
		}
	}
	for _, b := range a.b.Bindings(of) {
		if b.Source != "" {
			x := binding(b)
			delete(x, "properties_key")
			bindings = append(bindings, plain(x))
		}
	}
	for _, p := range a.b.Policies(of) {
		x := policy(p)
		if !p.Operator {
			policies = append(policies, plain(x))
			continue
		}
		value := object{"pattern": p.Pattern, "apply-to": p.ApplyTo, "priority": p.Priority, "definition": p.Definition}
		parameters = append(parameters, plain(object{"vhost": p.VHost, "component": "operator_policy", "name": p.Name, "value": value}))
	}
	o["queues"], o["exchanges"], o["bindings"], o["policies"], o["parameters"] = queues, exchanges, bindings, policies, parameters
	if of != "" {
		return o
	}
	users, permissions := []object{}, []object{}
	for _, u := range a.b.Users() {
		users = append(users, user(u))
		for vhost, p := range u.Permissions {
			permissions = append(permissions, object{"user": u.Name, "vhost": vhost, "configure": p.Configure, "write": p.Write, "read": p.Read})
		}
	}
	o["users"], o["permissions"], o["vhosts"] = users, permissions, list(a.b.VHosts(), vhost)
	o["topic_permissions"], o["global_parameters"] = a.topicPermissions(func(string, string) bool { return true }), []object{}
	return o
}

// document is what is read of definitions.
type document struct {
	VHosts []struct {
		Name    string `json:"name"`
		Default string `json:"default_queue_type"`
	} `json:"vhosts"`
	Users       []json.RawMessage `json:"users"`
	Permissions []struct {
		User, VHost, Configure, Write, Read string
	} `json:"permissions"`
	Topics []struct {
		User, VHost, Exchange, Write, Read string
	} `json:"topic_permissions"`
	Policies   []json.RawMessage `json:"policies"`
	Parameters []struct {
		VHost, Component, Name string
		Value                  json.RawMessage
	} `json:"parameters"`
	Queues []struct {
		Name, VHost string
		Durable     bool
		AutoDelete  bool `json:"auto_delete"`
		Arguments   arguments
	} `json:"queues"`
	Exchanges []struct {
		Name, VHost, Type string
		Durable, Internal bool
		AutoDelete        bool `json:"auto_delete"`
		Arguments         arguments
	} `json:"exchanges"`
	Bindings []struct {
		Source, VHost, Destination string
		Kind                       string `json:"destination_type"`
		Key                        string `json:"routing_key"`
		Arguments                  arguments
	} `json:"bindings"`
}

// arguments may be an empty list where there are none.
type arguments map[string]any

// UnmarshalJSON reads either.
func (a *arguments) UnmarshalJSON(b []byte) error {
	var none []any
	if json.Unmarshal(b, &none) == nil {
		*a = nil
		return nil
	}
	return json.Unmarshal(b, (*map[string]any)(a))
}

// imported adds what a document has, in the order in which one thing needs the other.
func (a *api) imported(into string, body []byte) reply {
	var d document
	if err := json.Unmarshal(body, &d); err != nil {
		return bad(fmt.Sprintf("the definitions aren't JSON: %v", err))
	}
	at := func(vhost string) string {
		if into != "" {
			return into
		}
		return vhost
	}
	steps := []func() error{}
	step := func(do func() error) { steps = append(steps, do) }
	for _, v := range d.VHosts {
		step(func() error { a.b.PutVHost(v.Name, engine.VHostConfig{DefaultQueueType: v.Default}); return nil })
	}
	for _, u := range d.Users {
		step(func() error { return a.importUser(u) })
	}
	step(func() error { return a.importPermissions(d, at) })
	for _, raw := range d.Policies {
		step(func() error {
			var name struct{ Name, VHost string }
			if err := json.Unmarshal(raw, &name); err != nil {
				return err
			}
			return a.importPolicy(at(name.VHost), name.Name, raw, false)
		})
	}
	for _, p := range d.Parameters {
		if p.Component == "operator_policy" {
			step(func() error { return a.importPolicy(at(p.VHost), p.Name, p.Value, true) })
		}
	}
	for _, q := range d.Queues {
		step(func() error {
			// What exists in another form isn't changed.
			if _, err := a.b.Queue(at(q.VHost), q.Name); err == nil {
				return nil
			}
			_, err := a.b.DeclareQueue(at(q.VHost), q.Name, engine.QueueSpec{Durable: q.Durable, AutoDelete: q.AutoDelete, Arguments: q.Arguments})
			return err
		})
	}
	for _, x := range d.Exchanges {
		step(func() error {
			for _, old := range a.b.Exchanges(at(x.VHost)) {
				if old.Name == x.Name {
					return nil
				}
			}
			_, err := a.b.DeclareExchange(at(x.VHost), x.Name, engine.ExchangeSpec{
				Type: x.Type, Durable: x.Durable, AutoDelete: x.AutoDelete, Internal: x.Internal, Arguments: x.Arguments,
			})
			return err
		})
	}
	for _, b := range d.Bindings {
		step(func() error {
			_, err := a.b.Bind(engine.BindingInfo{
				VHost: at(b.VHost), Source: b.Source, Destination: b.Destination, ToExchange: b.Kind == "exchange", Key: b.Key, Arguments: b.Arguments,
			})
			return err
		})
	}
	for _, do := range steps {
		if err := do(); err != nil {
			return bad(err.Error())
		}
	}
	return made(false)
}

func (a *api) importPermissions(d document, at func(vhost string) string) error {
	for _, p := range d.Permissions {
		if err := a.b.SetPermissions(p.User, at(p.VHost), engine.Permissions{Configure: p.Configure, Write: p.Write, Read: p.Read}); err != nil {
			return err
		}
	}
	for _, p := range d.Topics {
		if err := a.b.SetTopicPermissions(p.User, at(p.VHost), p.Exchange, engine.Permissions{Write: p.Write, Read: p.Read}); err != nil {
			return err
		}
	}
	return nil
}

// importUser adds a user whose password can be read. The hashes that an export of
// this broker has are empty; they leave a user unchanged.
func (a *api) importUser(raw json.RawMessage) error {
	var name struct{ Name string }
	if err := json.Unmarshal(raw, &name); err != nil {
		return err
	}
	for _, u := range a.b.Users() {
		if u.Name == name.Name {
			return nil
		}
	}
	return a.putUser(name.Name, raw)
}

func (a *api) importPolicy(vhost, name string, raw json.RawMessage, operator bool) error {
	p, err := readPolicy(raw)
	if err != nil {
		return err
	}
	p.Operator = operator
	return a.b.SetPolicy(vhost, name, p)
}
