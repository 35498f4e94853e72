package engine

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// User is a user who may log in.
type User struct {
	name, password string
	noPassword     bool
	tags           []string
	permissions    map[string]*Permissions
	topics         map[topicAccess]*Permissions
	limits         map[string]int64
}

// topicAccess is where permissions for topics hold.
type topicAccess struct{ vhost, exchange string }

// Name is the user's name.
func (u *User) Name() string { return u.name }

func (u *User) impersonates() bool { return slices.Contains(u.tags, "impersonator") }

// Permissions are what a user may do in a virtual host: regular expressions of names.
type Permissions struct {
	Configure, Write, Read string

	compiled [3]*regexp.Regexp
}

var everything = must(newPermissions(".*", ".*", ".*"))

func must(p *Permissions, err error) *Permissions {
	if err != nil {
		panic(err)
	}
	return p
}

func newPermissions(configure, write, read string) (*Permissions, error) {
	p := &Permissions{Configure: configure, Write: write, Read: read}
	for i, text := range []string{configure, write, read} {
		if text == "" {
			text = "$^"
		}
		var err error
		if p.compiled[i], err = regexp.Compile(text); err != nil {
			return nil, fmt.Errorf("engine: the permission %q isn't a regular expression: %w", text, err)
		}
	}
	return p, nil
}

type permission uint8

const (
	permissionConfigure permission = iota
	permissionWrite
	permissionRead
)

func (p permission) String() string { return [...]string{"configure", "write", "read"}[p] }

// ErrRefused is the error of a login with a wrong name or password.
var ErrRefused = errors.New("engine: login refused")

// ErrStopped is the error for what a stopped broker can't do.
var ErrStopped = errors.New("engine: the broker is stopped")

// Authenticate checks a login. mechanism is PLAIN, ANONYMOUS or EXTERNAL. ANONYMOUS is
// the user guest. EXTERNAL is the user of that name, without a password.
func (b *Broker) Authenticate(mechanism, user, password string) (*User, error) {
	b.peek()
	defer b.mu.Unlock()
	if !b.running {
		return nil, ErrStopped
	}
	if mechanism == "ANONYMOUS" {
		user = "guest"
	}
	u := b.users[user]
	switch {
	case u == nil:
		return nil, ErrRefused
	case mechanism == "ANONYMOUS", mechanism == "EXTERNAL":
		return u, nil
	case mechanism == "PLAIN" && !u.noPassword && u.password == password:
		return u, nil
	}
	return nil, ErrRefused
}

// PutUser adds a user, or changes password and tags of one.
func (b *Broker) PutUser(name, password string, tags ...string) {
	b.lock()
	defer b.unlock()
	b.putUser(name, password, tags)
}

func (b *Broker) putUser(name, password string, tags []string) *User {
	u := b.users[name]
	if u == nil {
		u = &User{name: name, permissions: map[string]*Permissions{}, topics: map[topicAccess]*Permissions{}, limits: map[string]int64{}}
		b.users[name] = u
	}
	u.password, u.tags, u.noPassword = password, slices.Clone(tags), false
	return u
}

// DeleteUser removes a user, whose connections are closed. It says whether there was one.
func (b *Broker) DeleteUser(name string) bool {
	b.lock()
	defer b.unlock()
	if b.users[name] == nil {
		return false
	}
	delete(b.users, name)
	for _, c := range slices.Clone(b.conns) {
		if c.user.name == name {
			c.shut(connectionForced("user '" + name + "' was deleted"))
		}
	}
	return true
}

// SetPermissions sets what a user may do in a virtual host.
func (b *Broker) SetPermissions(user, vhost string, p Permissions) error {
	compiled, err := newPermissions(p.Configure, p.Write, p.Read)
	if err != nil {
		return err
	}
	b.lock()
	defer b.unlock()
	if b.users[user] == nil || b.vhosts[vhost] == nil {
		return fmt.Errorf("%w: user %q or virtual host %q", ErrMissing, user, vhost)
	}
	b.users[user].permissions[vhost] = compiled
	return nil
}

// ClearPermissions takes all permissions in a virtual host from a user.
func (b *Broker) ClearPermissions(user, vhost string) {
	b.lock()
	defer b.unlock()
	if u := b.users[user]; u != nil {
		delete(u.permissions, vhost)
	}
}

// SetTopicPermissions sets which routing keys of a topic exchange a user may publish to and bind
// with, by Write and Read. Configure isn't used. In the expressions, {username} and {vhost} are the
// user's name and the virtual host's. A user without such an entry for an exchange may use all keys.
func (b *Broker) SetTopicPermissions(user, vhost, exchange string, p Permissions) error {
	variables := strings.NewReplacer("{username}", user, "{vhost}", vhost)
	compiled, err := newPermissions("", variables.Replace(p.Write), variables.Replace(p.Read))
	if err != nil {
		return err
	}
	compiled.Write, compiled.Read = p.Write, p.Read
	b.lock()
	defer b.unlock()
	if b.users[user] == nil || b.vhosts[vhost] == nil {
		return fmt.Errorf("%w: user %q or virtual host %q", ErrMissing, user, vhost)
	}
	b.users[user].topics[topicAccess{vhost, exchange}] = compiled
	return nil
}

// ClearTopicPermissions removes them, of one exchange, or of all if exchange is empty.
func (b *Broker) ClearTopicPermissions(user, vhost, exchange string) {
	b.lock()
	defer b.unlock()
	if u := b.users[user]; u != nil {
		maps.DeleteFunc(u.topics, func(a topicAccess, _ *Permissions) bool {
			return a.vhost == vhost && (exchange == "" || a.exchange == exchange)
		})
	}
}

// mayTopic says whether a user may publish to a topic of an exchange, or bind with it.
func (b *Broker) mayTopic(user, vhost, exchange, key string, p permission) bool {
	u := b.users[user]
	if u == nil {
		return false
	}
	given := u.topics[topicAccess{vhost, exchange}]
	return given == nil || given.compiled[p].MatchString(key)
}

// ErrMissing is in the error for what doesn't exist.
var ErrMissing = errors.New("engine: there is no such thing")

// may says whether a user has a permission for a queue or an exchange.
func (b *Broker) may(user, vhost, name string, p permission) bool {
	u := b.users[user]
	if u == nil || u.permissions[vhost] == nil {
		return false
	}
	if name == "" {
		name = "amq.default"
	}
	return u.permissions[vhost].compiled[p].MatchString(name)
}
