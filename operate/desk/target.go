package desk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/retry"
)

var errNoQueue = errors.New("the message doesn't record which queue it was dead-lettered from; set an address to send it to")

// target is where a message goes according to its annotations, or to fixed.
func (l *deadLetter) target(toExchange bool, fixed address.Address) (address.Address, error) {
	a := fixed
	switch {
	case !fixed.IsZero():
	case toExchange && l.death.Exchange != "":
		a = address.Exchange(l.death.Exchange, l.death.RoutingKey)
	case toExchange && l.death.RoutingKey != "":
		a = address.Queue(l.death.RoutingKey) // by the default exchange
	case l.death.Queue == "":
		return a, &unsendable{errNoQueue}
	default:
		a = address.Queue(l.death.Queue)
	}
	if err := a.Validate(); err != nil {
		return a, &unsendable{err}
	}
	return a, nil
}

// target is where a message goes. It refuses a target that only the message's annotations
// support.
func (r *replay) target(ctx context.Context, l *deadLetter) (address.Address, error) {
	to, err := l.target(r.cfg.ToExchange, r.cfg.Address)
	if err != nil || !r.cfg.Address.IsZero() {
		return to, err
	}
	queue, names := l.death.Queue, evidence(r.d.cfg.Names)
	if !names.Failed(l.m, r.cfg.Queue, queue) {
		return to, &unsendable{fmt.Errorf("its annotations say that it was dead-lettered from the queue %q, and the broker has no record of that, so its sender may have written them; set an address to send it to", queue)}
	}
	if to == address.Queue(queue) {
		return to, nil
	}
	exchange, key := l.death.Exchange, l.death.RoutingKey
	answer := names.Published(l.m, queue, exchange, key)
	if answer == inside.AnswerUnknown {
		feeds, err := r.feeds(ctx, exchange, key, queue)
		switch {
		case err != nil:
			return to, err
		case feeds:
			answer = inside.AnswerYes
		}
	}
	if answer != inside.AnswerYes {
		return to, &unsendable{fmt.Errorf("its annotations say that it was published to the exchange %q with the routing key %q, and the broker has no record of that, so its sender may have written them; replay it to its queue, or set an address to send it to", exchange, key)}
	}
	return to, nil
}

// evidence is what package retry knows of dead letters in a topology with these names.
func evidence(n retry.Names) inside.Names {
	return inside.NamesOf(retry.With(retry.Policy{Names: n})(nil))
}

// feeds reports whether an exchange has a binding to a queue that matches a routing key.
func (r *replay) feeds(ctx context.Context, exchange, key, queue string) (bool, error) {
	if exchange == "" {
		return false, nil // the key is another queue's name
	}
	f, ok := r.feeding[exchange+"\x00"+queue]
	if !ok {
		f = &feeding{keys: map[string]bool{}}
		if err := r.d.bindingsOf(ctx, f, exchange, queue); err != nil {
			return false, err
		}
		if len(r.feeding) < 1000 {
			r.feeding[exchange+"\x00"+queue] = f
		}
	}
	if f.matches(key) || f.whole {
		return f.matches(key), nil
	}
	// Over AMQP, bindings can be listed only by their key.
	for _, k := range bindingKeys(key) {
		if _, known := f.keys[k]; known || ctx.Err() != nil {
			continue
		}
		found, err := declare.Bindings(ctx, r.d.conn.Management(), declare.Binding{Source: exchange, Queue: queue, Key: k})
		var bad *argument.Error
		if err != nil && !errors.Is(err, declare.ErrForbidden) && !errors.As(err, &bad) {
			return false, err
		}
		there := slices.ContainsFunc(found, func(b declare.Binding) bool { return b.Match == "" })
		if len(f.keys) < 10_000 {
			f.keys[k] = there
		}
		if there {
			return true, nil
		}
	}
	return false, context.Cause(ctx)
}

// feeding is what is known about the bindings of an exchange to a queue.
type feeding struct {
	keys   map[string]bool // keys, and whether there is a binding with it
	whole  bool            // keys has all bindings
	fanout bool
}

func (f *feeding) matches(key string) bool {
	for k, there := range f.keys {
		if there && (f.fanout || k == key || topicMatches(k, key)) {
			return true
		}
	}
	return false
}

// bindingsOf lists the bindings of an exchange to a queue, if the HTTP API shows them.
func (d *Desk) bindingsOf(ctx context.Context, f *feeding, exchange, queue string) error {
	if d.cfg.HTTP == nil {
		return nil
	}
	vhost := address.Escape(d.cfg.HTTP.VHost())
	var x struct{ Type string }
	var all []struct {
		Source      string
		Destination string
		Kind        string `json:"destination_type"`
		Key         string `json:"routing_key"`
	}
	for path, into := range map[string]any{"/exchanges/" + vhost + "/" + address.Escape(exchange): &x, "/bindings/" + vhost: &all} {
		reply, err := d.cfg.HTTP.Get(ctx, path)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil || json.Unmarshal(reply, into) != nil {
			return nil // AMQP has to do
		}
	}
	if f.whole, f.fanout = true, x.Type == string(declare.ExchangeFanout); x.Type == string(declare.ExchangeHeaders) {
		return nil
	}
	for _, b := range all {
		if b.Source == exchange && b.Kind == "queue" && b.Destination == queue {
			f.keys[b.Key] = true
		}
	}
	return nil
}

// bindingKeys are binding keys that match a routing key: the key itself, the key with any of up
// to four words replaced by "*", and every prefix of it followed by "#".
func bindingKeys(key string) []string {
	words := strings.Split(key, ".")
	keys := []string{key, "#"}
	for n := 1; n < len(words); n++ {
		keys = append(keys, strings.Join(words[:n], ".")+".#")
	}
	if len(words) <= 4 {
		for stars := 1; stars < 1<<len(words); stars++ {
			some := slices.Clone(words)
			for i := range some {
				if stars>>i&1 == 1 {
					some[i] = "*"
				}
			}
			keys = append(keys, strings.Join(some, "."))
		}
	}
	return keys
}

// topicMatches reports whether a topic exchange's binding key matches a routing key.
func topicMatches(pattern, key string) bool {
	return wordsMatch(strings.Split(pattern, "."), strings.Split(key, "."))
}

func wordsMatch(pattern, words []string) bool {
	// at is the position of the last "#", and from is the first word after those it matches.
	at, from := -1, 0
	p, w := 0, 0
	for w < len(words) {
		switch {
		case p < len(pattern) && pattern[p] == "#":
			at, from = p, w
			p++
		case p < len(pattern) && (pattern[p] == "*" || pattern[p] == words[w]):
			p++
			w++
		case at >= 0:
			from++
			p, w = at+1, from
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == "#" {
		p++
	}
	return p == len(pattern)
}
