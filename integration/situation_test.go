package integration

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
	teams []*team
	// signed says that publishers and workers log in as different users, and that the
	// publishers set the user-id.
	signed bool
}

// team is one team in a situation.
type team struct {
	// Queue is its work queue.
	Queue string
	// places are where the team runs the same value of a feature, such as a decorator:
	// each on its own connection.
	places []*place
	second bool // its settings differ from the first's
}

// tuned returns the policy with the team's own settings: teams that share the default
// names don't have to agree on delays.
func (m *team) tuned(p retry.Policy) retry.Policy {
	if m.second {
		if p.AnyDelay != nil {
			p.AnyDelay = &retry.Ladder{Unit: p.AnyDelay.Unit, Levels: p.AnyDelay.Levels + 1}
		}
		p.Backoff = retry.Delays(70*time.Millisecond, 140*time.Millisecond, 210*time.Millisecond)
	}
	return p
}

// allNewer reports whether all the team's brokers are 4.3 or later.
func (m *team) allNewer() bool {
	return !slices.ContainsFunc(m.places, func(p *place) bool { return !p.newer() })
}

// place is a virtual host where a team works.
type place struct {
	*site
	*team
	situation *situation
	// Owner is a connection of a user with all permissions, who declares the topology.
	Owner *client.Conn
	// The user who publishes; empty if there is one user for everything.
	publisherURL, publisherName string
}

// as returns a connection of a user who has no other permissions than these, where the
// situation has more than one user, and Owner otherwise.
func (p *place) as(t *testing.T, configure, write, read string) *client.Conn {
	t.Helper()
	if !p.situation.signed {
		conn, _ := p.connect(t)
		return conn
	}
	conn, _ := connectTo(t, p.user(t, configure, write, read))
	return conn
}

// asPublisher returns a connection of the user who publishes, and an edit that signs
// messages with the user's name, where the situation has more than one user.
func (p *place) asPublisher(t *testing.T) (*client.Conn, func(*client.Message)) {
	t.Helper()
	if !p.situation.signed {
		conn, _ := p.connect(t)
		return conn, func(*client.Message) {}
	}
	conn, _ := connectTo(t, p.publisherURL)
	return conn, func(m *client.Message) {
		if m.Properties == nil {
			m.Properties = &client.Properties{}
		}
		m.Properties.UserID = []byte(p.publisherName)
	}
}

// asCaller is asPublisher for a user who also has what the queues of replies need.
func (p *place) asCaller(t *testing.T) (*client.Conn, func(*client.Message)) {
	t.Helper()
	if p.situation.signed {
		p.http(t, http.MethodPut, "/permissions/"+p.vhost+"/"+p.publisherName, map[string]string{"configure": "^hopback-replies-.*", "write": everything, "read": `^(hopback-replies-|amq\.rabbitmq\.reply-to\.)`}, nil)
	}
	return p.asPublisher(t)
}

// send publishes texts to an address as the publisher.
func (p *place) send(t *testing.T, to address.Address, texts ...string) {
	t.Helper()
	conn, sign := p.asPublisher(t)
	pub := publisherOf(t, conn, to)
	for _, text := range texts {
		publish(t, pub, text, sign, func(m *client.Message) { m.Properties.MessageID = text })
	}
}

// keepsUser fails the test unless m says by whom it was published, in the situations in
// which publishers do.
func (p *place) keepsUser(t *testing.T, m *client.Message) {
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
	make func(t *testing.T, v *situation, s *site)
}{
	// Two teams in one virtual host, different users for publishers and workers, and a
	// policy for all queues.
	{"together", func(t *testing.T, v *situation, s *site) {
		v.signed = true
		shared := newSite(t, s.Broker)
		shared.policyForAll(t, map[string]any{"max-length": 100_000, "overflow": "reject-publish", "delivery-limit": 1000})
		v.team(t, "orders", shared)
		v.team(t, "bills", shared)
	}},
	// One team on two connections: to two virtual hosts of a broker, and to brokers of two
	// versions.
	{"apart", func(t *testing.T, v *situation, s *site) {
		other := s.Broker
		if !s.newer() {
			other = neighbours(s)[0]
		}
		v.team(t, "orders", newSite(t, s.Broker), newSite(t, other))
	}},
}

// policyForAll sets a policy for all queues of the virtual host.
func (s *site) policyForAll(t *testing.T, definition map[string]any) {
	t.Helper()
	s.http(t, http.MethodPut, "/policies/"+s.vhost+"/all", map[string]any{"pattern": ".*", "apply-to": "queues", "definition": definition}, nil)
}

// team adds a team that works at these sites.
func (v *situation) team(t *testing.T, queue string, sites ...*site) {
	t.Helper()
	m := &team{Queue: queue, second: len(v.teams) > 0}
	for _, s := range sites {
		p := &place{site: s, team: m, situation: v}
		p.Owner, _ = s.connect(t)
		if v.signed {
			p.publisherURL = s.user(t, "^$", everything, "^$")
			u, err := url.Parse(p.publisherURL)
			require.NoError(t, err)
			p.publisherName = u.User.Username()
		}
		m.places = append(m.places, p)
	}
	v.teams = append(v.teams, m)
}

// forEachSituation runs a feature in every situation, with every broker. feature is called
// once for each team. What it makes is used at all of the team's places: the function that
// it returns is called once for each, at the same time. If it returns nil, the feature
// doesn't exist there.
func forEachSituation(t *testing.T, feature func(t *testing.T, m *team) func(t *testing.T, p *place)) {
	t.Helper()
	forEachBroker(t, func(t *testing.T, s *site) {
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
