package frameworks

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/declare"
)

// hopback recognizes what retry.Topology, retry.CentralTopology, and schedule.Topology declare.
// Their names can be changed. Their alternate exchanges give them away: a headers exchange spills
// into a direct one, and that into a fanout exchange with a parking queue.
func (v *view) hopback() []*match {
	var found []*match
	if m := v.hopbackRetry(); m != nil {
		found = append(found, m)
	}
	for _, l := range v.ladders {
		dispatch := ""
		if x := v.xOf[l.exit]; x != nil {
			dispatch = x.alternate
		}
		if v.queueOf[l.spill] == nil || v.queueOf[dispatch] == nil || !v.isExchange(l.spill, string(declare.ExchangeFanout)) {
			continue
		}
		m := newMatch()
		l.add(m)
		for _, name := range []string{l.spill, dispatch} {
			m.addExchange(name)
			m.queues[name] = true
		}
		m.variant = "schedule"
		m.certain = strings.HasSuffix(l.exit, "schedule_due")
		m.because = fmt.Sprintf("a ladder of %d delay queues ends in the exchange %s, whose alternate exchange is %s", len(l.levels), short(l.exit), short(dispatch))
		found = append(found, m)
	}
	return append(found, v.hopbackGroups()...)
}

// hopbackGroups recognizes the groups of recurring messages of schedule.GroupTopology, by their names and their
// dead-letter exchange.
func (v *view) hopbackGroups() (found []*match) {
	for _, q := range v.queues {
		prefix, group, ok := strings.Cut(q.name, "schedule_recurring_")
		requests, lost := prefix+"schedule_run_"+group, prefix+"schedule_undeliverable"
		if !ok || q.deadTo != lost || v.queueOf[requests] == nil || v.queueOf[requests].deadTo != lost || !v.isExchange(lost, string(declare.ExchangeFanout)) {
			continue
		}
		m := newMatch()
		m.addExchange(lost)
		for _, name := range []string{q.name, requests, lost} {
			m.queues[name] = true
		}
		m.variant, m.certain = "recurring", true
		m.because = fmt.Sprintf("the queues %s and %s dead-letter to %s", short(q.name), short(requests), short(lost))
		found = append(found, m)
	}
	return found
}

func (v *view) hopbackRetry() *match {
	m, ends := newMatch(), map[string]bool{}
	for _, x := range v.exchanges {
		given := v.xOf[x.alternate]
		if x.kind != string(declare.ExchangeHeaders) || given == nil || given.kind != string(declare.ExchangeDirect) || !v.isExchange(given.alternate, string(declare.ExchangeFanout)) {
			continue
		}
		ends[x.name], ends[given.name], ends[given.alternate] = true, true, true
		m.certain = m.certain || strings.HasSuffix(x.name, "dead_letter_exchange") && strings.HasSuffix(given.name, "given_up_exchange")
		m.because = fmt.Sprintf("the headers exchange %s spills into %s, and that into %s", short(x.name), short(given.name), short(given.alternate))
	}
	if len(ends) == 0 {
		return nil
	}
	// Exchanges that spill into one of these are hopback's. So are the queues on either side.
	for _, x := range v.exchanges {
		if ends[x.alternate] {
			ends[x.name] = true
		}
	}
	m.variant = "retry"
	for _, l := range v.ladders {
		if ends[l.spill] {
			l.add(m)
		}
	}
	for _, q := range v.queues {
		into := q.deadLetters && ends[q.deadTo]
		for _, b := range q.bindings {
			into = into || ends[b.Source]
		}
		if !into {
			continue
		}
		m.addQueue(q)
		for _, b := range q.bindings {
			if q.delays() {
				m.addExchange(b.Source)
			}
		}
	}
	for name := range ends {
		m.addExchange(name)
	}
	return m
}
