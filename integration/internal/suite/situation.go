package suite

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// A situation is how hopback is deployed in a test: by how many teams, in how many places,
// with which users and policies. Tests that have one user, one team, one connection and no
// policy don't find what goes wrong between two of them. All that publishes messages runs
// in all situations; see situations.txt.
type situation struct {
	// teams share the virtual hosts and hopback's default names. Each has its own work
	// queues and settings.
	teams []*Team
	// signed says that publishers and workers log in as different users, and that the
	// publishers set the user-id.
	signed bool
}

// Team is one team in a situation.
type Team struct {
	// Queue is its work queue.
	Queue string
	// places are where the team runs the same value of a feature, such as a decorator:
	// each on its own connection.
	places []*Place
	Second bool // its settings differ from the first's
}

// Tuned returns the policy with the team's own settings: teams that share the default
// names don't have to agree on delays.
func (m *Team) Tuned(p retry.Policy) retry.Policy {
	if m.Second {
		if p.AnyDelay != nil {
			p.AnyDelay = &retry.Ladder{Unit: p.AnyDelay.Unit, Levels: p.AnyDelay.Levels + 1}
		}
		p.Backoff = retry.Delays(70*time.Millisecond, 140*time.Millisecond, 210*time.Millisecond)
	}
	return p
}

// AllNewer reports whether all the team's brokers are 4.3 or later.
func (m *Team) AllNewer() bool {
	return !slices.ContainsFunc(m.places, func(p *Place) bool { return !p.Newer() })
}

// Place is a virtual host where a team works.
type Place struct {
	*Site
	*Team
	situation *situation
	// Owner is a connection of a user with all permissions, who declares the topology.
	Owner *client.Conn
	// The user who publishes; empty if there is one user for everything.
	publisherURL, publisherName string
}

// As returns a connection of a user who has no other permissions than these, where the
// situation has more than one user, and Owner otherwise.
func (p *Place) As(t *testing.T, configure, write, read string) *client.Conn {
	t.Helper()
	if !p.situation.signed {
		conn, _ := p.Connect(t)
		return conn
	}
	conn, _ := ConnectTo(t, p.User(t, configure, write, read))
	return conn
}

// AsPublisher returns a connection of the user who publishes, and an edit that signs
// messages with the user's name, where the situation has more than one user.
func (p *Place) AsPublisher(t *testing.T) (*client.Conn, func(*client.Message)) {
	t.Helper()
	if !p.situation.signed {
		conn, _ := p.Connect(t)
		return conn, func(*client.Message) {}
	}
	conn, _ := ConnectTo(t, p.publisherURL)
	return conn, func(m *client.Message) {
		if m.Properties == nil {
			m.Properties = &client.Properties{}
		}
		m.Properties.UserID = []byte(p.publisherName)
	}
}

// AsCaller is asPublisher for a user who also has what the queues of replies need.
func (p *Place) AsCaller(t *testing.T) (*client.Conn, func(*client.Message)) {
	t.Helper()
	if p.situation.signed {
		p.HTTP(t, http.MethodPut, "/permissions/"+p.VHost+"/"+p.publisherName, map[string]string{"configure": "^hopback-replies-.*", "write": Everything, "read": `^(hopback-replies-|amq\.rabbitmq\.reply-to\.)`}, nil)
	}
	return p.AsPublisher(t)
}

// Send publishes texts to an address as the publisher.
func (p *Place) Send(t *testing.T, to address.Address, texts ...string) {
	t.Helper()
	conn, sign := p.AsPublisher(t)
	pub := PublisherOf(t, conn, to)
	for _, text := range texts {
		Publish(t, pub, text, sign, func(m *client.Message) { m.Properties.MessageID = text })
	}
}

// KeepsUser fails the test unless m says by whom it was published, in the situations in
// which publishers do.
func (p *Place) KeepsUser(t *testing.T, m *client.Message) {
	t.Helper()
	if p.situation.signed {
		id, _ := client.UserID(m)
		assert.Equal(t, p.publisherName, id, "who published %q", m.GetData())
	}
}

// situations are all situations, and what makes them on s's broker. Each is several at once,
// as a virtual host takes a broker longer than the tests take.
var situations = []struct {
	name string
	make func(t *testing.T, v *situation, s *Site)
}{
	// Two teams in one virtual host, different users for publishers and workers, and a
	// policy for all queues.
	{"together", func(t *testing.T, v *situation, s *Site) {
		v.signed = true
		shared := NewSite(t, s.Broker)
		shared.policyForAll(t, map[string]any{"max-length": 100_000, "overflow": "reject-publish", "delivery-limit": 1000})
		v.team(t, "orders", shared)
		v.team(t, "bills", shared)
	}},
	// One team on two connections: to two virtual hosts of a broker, and to brokers of two
	// versions.
	{"apart", func(t *testing.T, v *situation, s *Site) {
		other := s.Broker
		if !s.Newer() {
			other = Neighbours(s)[0]
		}
		v.team(t, "orders", NewSite(t, s.Broker), NewSite(t, other))
	}},
}

// policyForAll sets a policy for all queues of the virtual host.
func (s *Site) policyForAll(t *testing.T, definition map[string]any) {
	t.Helper()
	s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/all", map[string]any{"pattern": ".*", "apply-to": "queues", "definition": definition}, nil)
}

// team adds a team that works at these sites.
func (v *situation) team(t *testing.T, queue string, sites ...*Site) {
	t.Helper()
	m := &Team{Queue: queue, Second: len(v.teams) > 0}
	for _, s := range sites {
		p := &Place{Site: s, Team: m, situation: v}
		p.Owner, _ = s.Connect(t)
		if v.signed {
			p.publisherURL = s.User(t, "^$", Everything, "^$")
			u, err := url.Parse(p.publisherURL)
			require.NoError(t, err)
			p.publisherName = u.User.Username()
		}
		m.places = append(m.places, p)
	}
	v.teams = append(v.teams, m)
}

// ForEachSituation runs a feature in every situation, with every broker. feature is called
// once for each team. What it makes is used at all of the team's places: the function that
// it returns is called once for each, at the same time. If it returns nil, the feature
// doesn't exist there.
func ForEachSituation(t *testing.T, feature func(t *testing.T, m *Team) func(t *testing.T, p *Place)) {
	t.Helper()
	ForEachBroker(t, func(t *testing.T, s *Site) {
		for _, kind := range situations {
			t.Run(kind.name, func(t *testing.T) {
				t.Parallel()
				v := &situation{}
				kind.make(t, v, s)
				for _, m := range v.teams {
					at := feature(t, m)
					if at == nil {
						continue
					}
					for i, p := range m.places {
						t.Run(fmt.Sprintf("%s at %s, %d", m.Queue, p.Version, i), func(t *testing.T) {
							t.Parallel()
							at(t, p)
						})
					}
				}
			})
		}
	})
}
