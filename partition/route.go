package partition

import (
	"context"
	"errors"
	"fmt"

	"github.com/hopback/hopback/declare"
)

// RabbitMQ routes the messages of a group by bindings alone, never because nothing else matched:
//
//	before     Name ──▶ Name.now ──▶ Name.1
//	Reshard    Name ──▶ Name.now ──▶ Name.1, and other keys ──▶ Name.2
//	after      Name ──▶ Name.now ──▶ Name.2        Name.1 (sealed) ──#──▶ Name.2
//
// A generation that isn't in use any more is sealed: an exchange of another type has its name, and
// leads to the next generation. So definitions that were exported before can be imported again. They
// bring back bindings to Name.1, and those lead to Name.2 as well.

// sealed returns the exchange that takes the place of g's, and leads to next.
func (g Group) sealed(next Group) (declare.Exchange, declare.Binding) {
	// A binding of g's queues that is imported again has no key, so it matches messages without a
	// key only.
	return declare.Exchange{Name: g.hash(), Type: declare.ExchangeTopic}, declare.Binding{Source: g.hash(), Exchange: next.hash(), Key: "#"}
}

// seal replaces g's exchange. The bindings to it must be gone, because it leads nowhere for a moment.
func (g Group) seal(ctx context.Context, m declare.Requester, next Group) error {
	exchange, binding := g.sealed(next)
	if err := replace(ctx, m, exchange); err != nil {
		return err
	}
	_, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{binding}})
	return err
}

// replace declares an exchange in the place of one that differs. A worker of an old generation may
// apply its topology in between.
func replace(ctx context.Context, m declare.Requester, x declare.Exchange) (err error) {
	for range 10 {
		if _, err = declare.Apply(ctx, m, declare.Topology{Exchanges: []declare.Exchange{x}}); !errors.Is(err, declare.ErrConflict) {
			return err
		}
		if err := declare.DeleteExchange(ctx, m, x.Name); err != nil {
			return err
		}
	}
	return err
}

// isSealed reports whether another exchange has taken the place of g's.
func (g Group) isSealed(ctx context.Context, m declare.Requester) (bool, error) {
	hashed, err := bound(ctx, m, declare.Binding{Source: g.hash(), Queue: g.queue(0)})
	if err != nil || !hashed {
		return err == nil, err
	}
	// It has queues, so it exists. Those may have been imported again.
	_, err = declare.Apply(ctx, m, declare.Topology{Exchanges: []declare.Exchange{{Name: g.hash(), Type: declare.ExchangeModulusHash}}})
	if errors.Is(err, declare.ErrConflict) {
		return true, nil
	}
	return false, err
}

func bound(ctx context.Context, m declare.Requester, b declare.Binding) (bool, error) {
	found, err := declare.Bindings(ctx, m, b)
	return len(found) > 0, err
}

// redirect has RabbitMQ route further messages to the next generation. It can be interrupted after
// each request, and called again.
func (g Group) redirect(ctx context.Context, m declare.Requester, to Group) error {
	applied, err := bound(ctx, m, to.behindFront())
	if err != nil {
		return err
	}
	if !applied {
		return fmt.Errorf("hopback: reshard %q: generation %d isn't bound; apply its topology first: %w", g.Name, to.Generation, declare.ErrNotFound)
	}
	if err := replace(ctx, m, declare.Exchange{Name: g.now(), Type: declare.ExchangeModulusHash}); err != nil {
		return err
	}
	sealed, err := g.isSealed(ctx, m)
	if err != nil {
		return err
	}
	moved, err := bound(ctx, m, to.behindNow())
	if err != nil {
		return err
	}
	if !sealed && !moved {
		// The group may be older than Name.now. In this order there is always a route, and never two.
		if err := g.adopt(ctx, m); err != nil {
			return err
		}
		if err := declare.DeleteBinding(ctx, m, declare.Binding{Source: g.Name, Exchange: g.hash()}); err != nil {
			return err
		}
	}
	if err := to.adopt(ctx, m); err != nil {
		return err
	}
	if err := declare.DeleteBinding(ctx, m, g.behindNow()); err != nil {
		return err
	}
	return g.seal(ctx, m, to)
}

// adopt has Name.now lead to g, and everything that is published pass it.
func (g Group) adopt(ctx context.Context, m declare.Requester) error {
	for _, b := range []declare.Binding{g.behindNow(), g.inUse()} {
		if _, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{b}}); err != nil {
			return err
		}
	}
	return nil
}
