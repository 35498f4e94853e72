// Package frameworks recognizes which library or system declared the topology of a virtual host:
// Celery, Symfony Messenger, MassTransit, hopback itself, and others. It looks at names and at
// shapes: which queue dead-letters where, with which time to live, and which keys bind it.
//
// Each framework has a file that says what it declares, and from which version of its source or
// documentation that is known. testdata has a definitions document for each; its README.md says
// where they come from.
//
// Names in a virtual host are untrusted. They are compared, never run as patterns.
package frameworks

import (
	"cmp"
	"maps"
	"slices"

	"github.com/hopback/hopback/declare/check"
)

// Framework is a library or a system whose topology a virtual host has.
type Framework struct {
	// Name is such as "Celery" or "hopback". Variant tells several topologies of one framework
	// apart, such as "delayed delivery"; it is empty if there is only one.
	Name    string `json:"name"`
	Variant string `json:"variant,omitempty"`
	VHost   string `json:"vhost"`
	// Certain reports that names and shapes together are this framework's alone. Otherwise the
	// shape fits, but the names may be anyone's.
	Certain bool `json:"certain"`
	// Because is what was recognized, as a sentence without a full stop.
	Because string `json:"because"`
	// Queues and Exchanges are those that belong to it, sorted.
	Queues    []string `json:"queues"`
	Exchanges []string `json:"exchanges"`
	// Docs is the framework's own page about this topology.
	Docs string `json:"docs"`
	// Central reports that the central retrier can take over its retries: its workers reject what
	// they can't handle, or can be configured to.
	Central bool `json:"central_retrier"`
	// Cure is what to do for this framework, in a few sentences. It may be empty.
	Cure string `json:"cure,omitempty"`
}

// recognizer finds the topologies of one framework.
type recognizer struct {
	name, docs string
	find       func(*view) []*match
}

// match is a topology that a recognizer found.
type match struct {
	variant, because, cure string
	certain, central       bool
	queues, exchanges      map[string]bool
}

func newMatch() *match { return &match{queues: map[string]bool{}, exchanges: map[string]bool{}} }

// recognizers run in this order. What one has recognized, the later ones don't see, so those
// with names of their own come before those with nothing but a shape.
var recognizers = []recognizer{
	{"hopback", "https://github.com/hopback/hopback/blob/main/docs/concepts.md", (*view).hopback},
	{"Celery", "https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/rabbitmq.html", (*view).celery},
	{"NServiceBus", "https://docs.particular.net/transports/rabbitmq/delayed-delivery", (*view).nserviceBus},
	{"Symfony Messenger", "https://symfony.com/doc/current/messenger.html#amqp-transport", (*view).symfony},
	{"Laravel", "https://github.com/vyuldashev/laravel-queue-rabbitmq", (*view).laravel},
	{"Dramatiq", "https://dramatiq.io/guide.html#dead-letters", (*view).dramatiq},
	{"Sneakers", "https://github.com/ruby-amqp/kicks/blob/main/lib/sneakers/handlers/maxretry.rb", (*view).sneakers},
	{"Spring", "https://docs.spring.io/spring-cloud-stream/reference/rabbit/rabbit_overview/rabbitmq-retry.html", (*view).spring},
	{"MassTransit", "https://masstransit.io/documentation/transports/rabbitmq", (*view).massTransit},
	{"Rascal", "https://github.com/onebeyond/rascal#recovery-strategies", (*view).rascal},
	{handBuilt, "https://www.rabbitmq.com/docs/dlx", (*view).handBuilt},
}

// Recognize names the frameworks of a virtual host, in the order of their names and variants.
// It takes time in proportion to the size of s.
func Recognize(s check.Snapshot) []Framework {
	v := newView(s)
	found := []Framework{}
	for _, r := range recognizers {
		for _, m := range r.find(v) {
			v.claim(m)
			found = append(found, Framework{
				Name: r.name, Variant: m.variant, VHost: s.VHost, Certain: m.certain, Because: m.because,
				Queues: v.existing(m.queues, v.hasQueue), Exchanges: v.existing(m.exchanges, v.hasExchange),
				Docs: r.docs, Central: m.central, Cure: m.cure,
			})
		}
	}
	slices.SortStableFunc(found, func(a, b Framework) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Variant, b.Variant))
	})
	return found
}

// existing are the names that there are, sorted: a framework's topology may be incomplete.
func (v *view) existing(names map[string]bool, exists func(string) bool) []string {
	list := slices.Sorted(maps.Keys(names))
	list = slices.DeleteFunc(list, func(name string) bool { return !exists(name) })
	if list == nil {
		return []string{} // in JSON, an empty list
	}
	return list
}
