package engine

import (
	"errors"

	"github.com/hopback/hopback/internal/frames"
)

// Broker is a RabbitMQ in memory. It is safe for concurrent use.
type Broker struct{}

// New starts a Broker. It is to be closed.
func New(cfg Config) (*Broker, error) { return nil, errors.New("engine: not there yet") }

// Close closes every connection and ends every timer and goroutine.
func (b *Broker) Close() {}

// Version is the full version, "4.3.6" or "4.0.5".
func (b *Broker) Version() string { return "" }

// User is a user who has logged in.
type User struct{}

// Name is the user's name.
func (u *User) Name() string { return "" }

// ErrRefused is the error of a login with a wrong name or password.
var ErrRefused = errors.New("engine: login refused")

// Authenticate checks a login. mechanism is PLAIN, ANONYMOUS or EXTERNAL. ANONYMOUS is
// the user guest. EXTERNAL is the user of that name, without a password.
func (b *Broker) Authenticate(mechanism, user, password string) (*User, error) {
	return nil, ErrRefused
}

// Peer describes a client. The HTTP API shows it.
type Peer struct {
	ContainerID string
	Address     string // "127.0.0.1:50000"
	Local       string // "127.0.0.1:5672"
	Properties  frames.Map
}

// Connect opens a connection to a virtual host. The error closes the connection.
func (b *Broker) Connect(u *User, vhost string, peer Peer) (*Connection, *frames.Error) {
	return nil, nil
}

// OpenProperties are the properties of the broker's open frame.
func (b *Broker) OpenProperties() frames.Map { return nil }
