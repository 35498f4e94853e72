package engine

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// What an administrator may do without a connection, as by the HTTP API.

// QueueSpec is what a queue is to be like.
type QueueSpec struct {
	Durable, AutoDelete bool
	// Arguments have values as JSON has them.
	Arguments map[string]any
}

// DeclareQueue makes a queue. It says whether it is new. The error is a [Refusal] of
// RabbitMQ's, or ErrMissing.
func (b *Broker) DeclareQueue(vhost, name string, spec QueueSpec) (bool, error) {
	b.lock()
	defer b.unlock()
	v, err := b.virtual(vhost)
	if err != nil {
		return false, err
	}
	_, is, status, text := v.declare(declaration{name: name, durable: spec.Durable, autoDelete: spec.AutoDelete, args: tableOf(spec.Arguments)}, nil)
	if status != 0 {
		return false, Refusal(text)
	}
	return is, nil
}

func (b *Broker) virtual(name string) (*vhost, error) {
	if v := b.vhosts[name]; v != nil {
		return v, nil
	}
	return nil, fmt.Errorf("%w: virtual host %q", ErrMissing, name)
}

// PurgeQueue drops the messages of a queue that nobody holds, and says how many.
func (b *Broker) PurgeQueue(vhost, name string) (int, error) {
	b.lock()
	defer b.unlock()
	q, err := b.find(vhost, name)
	if err != nil {
		return 0, err
	}
	return q.purge(), nil
}

// ExchangeSpec is what an exchange is to be like.
type ExchangeSpec struct {
	Type                          string
	Durable, AutoDelete, Internal bool
	Arguments                     map[string]any
}

// DeclareExchange makes an exchange. It says whether it is new.
func (b *Broker) DeclareExchange(vhost, name string, spec ExchangeSpec) (bool, error) {
	b.lock()
	defer b.unlock()
	v, err := b.virtual(vhost)
	switch {
	case err != nil:
		return false, err
	case !b.version.hasExchangeType(spec.Type):
		return false, Refusal("unknown exchange type '" + spec.Type + "'")
	}
	_, is, text := v.declareExchange(exchangeDeclaration{name, spec.Type, spec.Durable, spec.AutoDelete, spec.Internal, tableOf(spec.Arguments)})
	if text != "" {
		return false, Refusal(text)
	}
	return is, nil
}

// DeleteExchange removes an exchange.
func (b *Broker) DeleteExchange(vhost, name string) error {
	b.lock()
	defer b.unlock()
	v, err := b.virtual(vhost)
	switch {
	case err != nil:
		return err
	case v.exchanges[name] == nil:
		return fmt.Errorf("%w: exchange %q in virtual host %q", ErrMissing, name, vhost)
	case name == "" || strings.HasPrefix(name, "amq."):
		return Refusal("operation not permitted on a predeclared exchange")
	}
	v.deleteExchange(v.exchanges[name])
	return nil
}

func (i BindingInfo) ends() ends {
	e := ends{source: i.Source, key: i.Key, args: tableOf(i.Arguments), toExchange: i.ToExchange, queue: i.Destination}
	if i.ToExchange {
		e.exchange = i.Destination
	}
	return e
}

// Bind adds a binding, and returns its Properties.
func (b *Broker) Bind(i BindingInfo) (string, error) {
	b.lock()
	defer b.unlock()
	v, err := b.virtual(i.VHost)
	if err != nil {
		return "", err
	}
	e := i.ends()
	if text := v.bind(e, nil); text != "" {
		return "", Refusal(text)
	}
	for _, bound := range v.between(e) {
		if bound.key == e.key && bound.args.equal(e.args) {
			return bound.info(v.name).Properties, nil
		}
	}
	return "", nil
}

// Unbind removes the binding between two ends that has these Properties. The key in them
// doesn't have to be escaped.
func (b *Broker) Unbind(i BindingInfo) error {
	b.lock()
	defer b.unlock()
	v, err := b.virtual(i.VHost)
	if err != nil {
		return err
	}
	for _, bound := range v.between(i.ends()) {
		plain := bound.key
		if len(bound.args) > 0 {
			plain += "~" + bound.args.hash()
		}
		if bound.info(v.name).Properties == i.Properties || plain == i.Properties {
			v.removeBinding(bound)
			return nil
		}
	}
	return fmt.Errorf("%w: binding %q", ErrMissing, i.Properties)
}

// VHostInfo is a virtual host.
type VHostInfo struct {
	Name string
	VHostConfig
}

// VHosts are the virtual hosts by name.
func (b *Broker) VHosts() []VHostInfo {
	b.peek()
	defer b.mu.Unlock()
	var all []VHostInfo
	for _, v := range b.sorted("") {
		all = append(all, VHostInfo{v.name, v.VHostConfig})
	}
	return all
}

// SetLimit sets a limit of a virtual host, "max-connections" or "max-queues". A negative one is
// none.
func (b *Broker) SetLimit(vhost, limit string, value int64) error {
	b.lock()
	defer b.unlock()
	v, err := b.virtual(vhost)
	if err == nil {
		v.limits[limit] = value
	}
	return err
}

// SetUserLimit sets a limit of a user, "max-connections". A negative one is none.
func (b *Broker) SetUserLimit(user, limit string, value int64) error {
	b.lock()
	defer b.unlock()
	if b.users[user] == nil {
		return fmt.Errorf("%w: user %q", ErrMissing, user)
	}
	b.users[user].limits[limit] = value
	return nil
}

// UserInfo is a user.
type UserInfo struct {
	Name string
	Tags []string
	// Permissions are by virtual host.
	Permissions map[string]Permissions
	// Topics are the permissions for routing keys of topic exchanges, in no order.
	Topics []TopicPermissions
}

// TopicPermissions are what a user may publish to a topic exchange, and bind with there.
type TopicPermissions struct{ VHost, Exchange, Write, Read string }

// Users are the users by name.
func (b *Broker) Users() []UserInfo {
	b.peek()
	defer b.mu.Unlock()
	var all []UserInfo
	for _, u := range b.users {
		i := UserInfo{Name: u.name, Tags: slices.Clone(u.tags), Permissions: map[string]Permissions{}}
		for vhost, p := range u.permissions {
			i.Permissions[vhost] = Permissions{Configure: p.Configure, Write: p.Write, Read: p.Read}
		}
		for at, p := range u.topics {
			i.Topics = append(i.Topics, TopicPermissions{at.vhost, at.exchange, p.Write, p.Read})
		}
		all = append(all, i)
	}
	slices.SortFunc(all, func(a, b UserInfo) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// PutUserWithoutPassword adds a user who can't log in with one.
func (b *Broker) PutUserWithoutPassword(name string, tags ...string) {
	b.lock()
	defer b.unlock()
	b.putUser(name, "", tags).noPassword = true
}

// PolicyInfo is a policy.
type PolicyInfo struct {
	VHost, Name string
	Policy
}

// Policies are the policies of a virtual host by name, or, if it is "", of all.
func (b *Broker) Policies(vhost string) []PolicyInfo {
	b.peek()
	defer b.mu.Unlock()
	var all []PolicyInfo
	for _, v := range b.sorted(vhost) {
		for _, of := range []map[string]*policy{v.policies, v.operators} {
			for _, name := range slices.Sorted(maps.Keys(of)) {
				all = append(all, PolicyInfo{v.name, name, of[name].Policy})
			}
		}
	}
	return all
}

// Alarms are the alarms that are on.
func (b *Broker) Alarms() []Alarm {
	b.peek()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.alarms))
}

// Node and Nodes are the names of the node, and of all nodes.
func (b *Broker) Node() string { return b.cfg.Node }

// Nodes are the names of all nodes.
func (b *Broker) Nodes() []string { return slices.Clone(b.cfg.Nodes) }

// Sessions is how many sessions a connection has.
func (b *Broker) Sessions(connection string) (int, error) {
	b.peek()
	defer b.mu.Unlock()
	for _, c := range b.conns {
		if c.name == connection {
			return len(c.sessions), nil
		}
	}
	return 0, fmt.Errorf("%w: connection %q", ErrMissing, connection)
}
