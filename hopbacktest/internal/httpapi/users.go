package httpapi

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
)

func (a *api) vhosts() {
	find := func(name string) (engine.VHostInfo, bool) {
		for _, v := range a.b.VHosts() {
			if v.Name == name {
				return v, true
			}
		}
		return engine.VHostInfo{}, false
	}
	a.handle("GET /vhosts", levelManagement, func(c *call) reply {
		all := slices.DeleteFunc(a.b.VHosts(), func(v engine.VHostInfo) bool {
			_, may := c.user.Permissions[v.Name]
			return !may && !levelAdministrator.allows(c.user.Tags) && !levelMonitoring.allows(c.user.Tags)
		})
		return ok(list(all, vhost))
	})
	a.handle("GET /vhosts/{vhost}", levelManagement, func(c *call) reply {
		v, there := find(c.vhost())
		if !there {
			return missing
		}
		return ok(vhost(v))
	})
	a.handle("PUT /vhosts/{vhost}", levelAdministrator, func(c *call) reply {
		spec := struct {
			Description string `json:"description"`
			Tags        tags   `json:"tags"`
			Default     string `json:"default_queue_type"`
		}{}
		if err := c.read(&spec); err != nil {
			return failed(err)
		}
		return made(a.b.PutVHost(c.vhost(), engine.VHostConfig{Description: spec.Description, Tags: spec.Tags, DefaultQueueType: spec.Default}))
	})
	a.handle("DELETE /vhosts/{vhost}", levelAdministrator, func(c *call) reply {
		if !a.b.DeleteVHost(c.vhost()) {
			return missing
		}
		return made(false)
	})
	a.handle("GET /vhosts/{vhost}/connections", levelManagement, func(c *call) reply {
		all := slices.DeleteFunc(a.b.Connections(), func(o engine.ConnectionInfo) bool { return o.VHost != c.vhost() })
		return ok(list(all, connection))
	})
	limit := func(set func(c *call, value int64) error) func(*call) reply {
		return func(c *call) reply {
			value := struct {
				Value int64 `json:"value"`
			}{-1}
			if c.Method == http.MethodPut {
				if err := c.read(&value); err != nil {
					return failed(err)
				}
			}
			if err := set(c, value.Value); err != nil {
				return failed(err)
			}
			return made(false)
		}
	}
	for _, method := range []string{"PUT", "DELETE"} {
		a.handle(method+" /vhost-limits/{vhost}/{name}", levelAdministrator, limit(func(c *call, v int64) error { return a.b.SetLimit(c.vhost(), c.name(), v) }))
		a.handle(method+" /user-limits/{user}/{name}", levelAdministrator, limit(func(c *call, v int64) error { return a.b.SetUserLimit(c.value("user"), c.name(), v) }))
	}
}

func vhost(v engine.VHostInfo) object {
	kind := v.DefaultQueueType
	if kind == "" {
		kind = "classic"
	}
	return object{
		"name": v.Name, "description": v.Description, "tags": notNil(v.Tags), "default_queue_type": kind, "tracing": false,
		"metadata": object{"description": v.Description, "tags": notNil(v.Tags), "default_queue_type": kind},
	}
}

func notNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// tags are a list, or texts with commas between them.
type tags []string

// UnmarshalJSON reads either.
func (t *tags) UnmarshalJSON(b []byte) error {
	var all []string
	if json.Unmarshal(b, &all) == nil {
		*t = all
		return nil
	}
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	*t = nil
	for _, tag := range strings.Split(text, ",") {
		if tag = strings.TrimSpace(tag); tag != "" {
			*t = append(*t, tag)
		}
	}
	return nil
}

func (a *api) users() {
	find := func(name string) (engine.UserInfo, bool) {
		all := a.b.Users()
		i := slices.IndexFunc(all, func(u engine.UserInfo) bool { return u.Name == name })
		if i < 0 {
			return engine.UserInfo{}, false
		}
		return all[i], true
	}
	a.handle("GET /whoami", levelManagement, func(c *call) reply { return ok(user(c.user)) })
	a.handle("GET /users", levelAdministrator, func(*call) reply { return ok(list(a.b.Users(), user)) })
	a.handle("GET /users/{user}", levelAdministrator, func(c *call) reply {
		u, there := find(c.value("user"))
		if !there {
			return missing
		}
		return ok(user(u))
	})
	a.handle("PUT /users/{user}", levelAdministrator, func(c *call) reply {
		_, was := find(c.value("user"))
		if err := a.putUser(c.value("user"), c.body); err != nil {
			return failed(err)
		}
		return made(!was)
	})
	a.handle("DELETE /users/{user}", levelAdministrator, func(c *call) reply {
		if !a.b.DeleteUser(c.value("user")) {
			return missing
		}
		return made(false)
	})
	a.permissions(find)
	a.topics()
}

func (a *api) permissions(find func(name string) (engine.UserInfo, bool)) {
	permissions := func(is func(user, vhost string) bool) []object {
		all := []object{}
		for _, u := range a.b.Users() {
			for vhost, p := range u.Permissions {
				if is(u.Name, vhost) {
					all = append(all, object{"user": u.Name, "vhost": vhost, "configure": p.Configure, "write": p.Write, "read": p.Read})
				}
			}
		}
		return all
	}
	a.handle("GET /permissions", levelAdministrator, func(*call) reply {
		return ok(permissions(func(string, string) bool { return true }))
	})
	a.handle("GET /users/{user}/permissions", levelAdministrator, func(c *call) reply {
		return ok(permissions(func(user, _ string) bool { return user == c.value("user") }))
	})
	a.handle("GET /vhosts/{vhost}/permissions", levelAdministrator, func(c *call) reply {
		return ok(permissions(func(_, vhost string) bool { return vhost == c.vhost() }))
	})
	a.handle("GET /permissions/{vhost}/{user}", levelAdministrator, func(c *call) reply {
		all := permissions(func(user, vhost string) bool { return user == c.value("user") && vhost == c.vhost() })
		if len(all) == 0 {
			return missing
		}
		return ok(all[0])
	})
	a.handle("PUT /permissions/{vhost}/{user}", levelAdministrator, func(c *call) reply {
		var p *struct{ Configure, Write, Read *string }
		if err := c.read(&p); err != nil {
			return failed(err)
		}
		if p == nil || p.Configure == nil || p.Write == nil || p.Read == nil {
			return bad("configure, write and read are needed")
		}
		u, _ := find(c.value("user"))
		_, was := u.Permissions[c.vhost()]
		if err := a.b.SetPermissions(c.value("user"), c.vhost(), engine.Permissions{Configure: *p.Configure, Write: *p.Write, Read: *p.Read}); err != nil {
			return failed(err)
		}
		return made(!was)
	})
	a.handle("DELETE /permissions/{vhost}/{user}", levelAdministrator, func(c *call) reply {
		u, _ := find(c.value("user"))
		if _, was := u.Permissions[c.vhost()]; !was {
			return missing
		}
		a.b.ClearPermissions(c.value("user"), c.vhost())
		return made(false)
	})
}

func (a *api) topicPermissions(is func(user, vhost string) bool) []object {
	all := []object{}
	for _, u := range a.b.Users() {
		for _, p := range u.Topics {
			if is(u.Name, p.VHost) {
				all = append(all, object{"user": u.Name, "vhost": p.VHost, "exchange": p.Exchange, "write": p.Write, "read": p.Read})
			}
		}
	}
	return all
}

func (a *api) topics() {
	of := func(c *call) []object {
		return a.topicPermissions(func(user, vhost string) bool { return user == c.value("user") && vhost == c.vhost() })
	}
	a.handle("GET /topic-permissions", levelAdministrator, func(*call) reply {
		return ok(a.topicPermissions(func(string, string) bool { return true }))
	})
	a.handle("GET /topic-permissions/{vhost}/{user}", levelAdministrator, func(c *call) reply {
		if all := of(c); len(all) > 0 {
			return ok(all)
		}
		return missing
	})
	a.handle("PUT /topic-permissions/{vhost}/{user}", levelAdministrator, func(c *call) reply {
		var p *struct{ Exchange, Write, Read *string }
		if err := c.read(&p); err != nil {
			return failed(err)
		}
		if p == nil || p.Exchange == nil || p.Write == nil || p.Read == nil {
			return bad("exchange, write and read are needed")
		}
		was := slices.ContainsFunc(of(c), func(o object) bool { return o["exchange"] == *p.Exchange })
		if err := a.b.SetTopicPermissions(c.value("user"), c.vhost(), *p.Exchange, engine.Permissions{Write: *p.Write, Read: *p.Read}); err != nil {
			return failed(err)
		}
		return made(!was)
	})
	a.handle("DELETE /topic-permissions/{vhost}/{user}", levelAdministrator, func(c *call) reply {
		if len(of(c)) == 0 {
			return missing
		}
		a.b.ClearTopicPermissions(c.value("user"), c.vhost(), "")
		return made(false)
	})
}

// putUser makes a user of a request's or a definition's object.
func (a *api) putUser(name string, body []byte) error {
	spec := struct {
		Password *string `json:"password"`
		Hash     *string `json:"password_hash"`
		Tags     *tags   `json:"tags"`
	}{}
	if err := json.Unmarshal(body, &spec); err != nil {
		return err
	}
	switch {
	case spec.Tags == nil:
		return errors.New("tags are needed")
	case spec.Password != nil:
		a.b.PutUser(name, *spec.Password, *spec.Tags...)
	case spec.Hash != nil && *spec.Hash == "":
		a.b.PutUserWithoutPassword(name, *spec.Tags...)
	case spec.Hash != nil:
		return errors.New("hopbacktest knows no hashes of passwords: give the password")
	default:
		return errors.New("password or password_hash is needed")
	}
	return nil
}

func user(u engine.UserInfo) object {
	return object{"name": u.Name, "tags": notNil(u.Tags), "password_hash": "", "hashing_algorithm": "rabbit_password_hashing_sha256", "limits": object{}}
}

func (a *api) policies() {
	for _, kind := range []struct {
		path     string
		operator bool
	}{{"/policies", false}, {"/operator-policies", true}} {
		of := func(vhost string) []engine.PolicyInfo {
			return slices.DeleteFunc(a.b.Policies(vhost), func(p engine.PolicyInfo) bool { return p.Operator != kind.operator })
		}
		a.handle("GET "+kind.path, levelPolicymaker, func(*call) reply { return ok(list(of(""), policy)) })
		a.handle("GET "+kind.path+"/{vhost}", levelPolicymaker, func(c *call) reply { return ok(list(of(c.vhost()), policy)) })
		a.handle("GET "+kind.path+"/{vhost}/{name}", levelPolicymaker, func(c *call) reply {
			for _, p := range of(c.vhost()) {
				if p.Name == c.name() {
					return ok(policy(p))
				}
			}
			return missing
		})
		a.handle("PUT "+kind.path+"/{vhost}/{name}", levelPolicymaker, func(c *call) reply {
			was := slices.ContainsFunc(of(c.vhost()), func(p engine.PolicyInfo) bool { return p.Name == c.name() })
			p, err := readPolicy(c.body)
			if err != nil {
				return failed(err)
			}
			p.Operator = kind.operator
			if err := a.b.SetPolicy(c.vhost(), c.name(), p); err != nil {
				return failed(err)
			}
			return made(!was)
		})
		a.handle("DELETE "+kind.path+"/{vhost}/{name}", levelPolicymaker, func(c *call) reply {
			if !a.b.DeletePolicy(c.vhost(), c.name(), kind.operator) {
				return missing
			}
			return made(false)
		})
	}
}

func readPolicy(body []byte) (engine.Policy, error) {
	spec := struct {
		Pattern    string         `json:"pattern"`
		ApplyTo    string         `json:"apply-to"`
		Priority   int64          `json:"priority"`
		Definition map[string]any `json:"definition"`
	}{}
	if err := json.Unmarshal(body, &spec); err != nil {
		return engine.Policy{}, err
	}
	return engine.Policy{Pattern: spec.Pattern, ApplyTo: spec.ApplyTo, Priority: spec.Priority, Definition: spec.Definition}, nil
}

func policy(p engine.PolicyInfo) object {
	return object{"vhost": p.VHost, "name": p.Name, "pattern": p.Pattern, "apply-to": p.ApplyTo, "priority": p.Priority, "definition": p.Definition}
}
