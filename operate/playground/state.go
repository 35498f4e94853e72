package main

import (
	"time"

	"github.com/hopback/hopback/retry"
)

// node is a box of the drawing.
type node struct {
	ID   string `json:"id"`
	Kind string `json:"kind"` // "queue" or "exchange"
	Role string `json:"role"` // "work", "delay", "dead", or "exchange"
	// Column is the place in the cycle, from 0.
	Column int `json:"column"`
}

// edge is an arrow of the drawing.
type edge struct {
	From string `json:"from"`
	To   string `json:"to"`
	Kind string `json:"kind"` // "retry" or "dead"
}

// drawing is the topology as the page draws it: the nodes and edges that messages of one work queue
// pass. What only other work queues or lost bindings need is left out.
type drawing struct {
	Nodes []node `json:"nodes"`
	Edges []edge `json:"edges"`
}

// names of the default topology: see retry.Names.
const (
	retryExchange   = "retry_exchange"
	requeueExchange = "requeue_exchange"
	deadExchange    = "dead_letter_exchange"
	givenUpExchange = "given_up_exchange"
	returnExchange  = "return_exchange"
)

// draw draws the lab's topology. Edges are its bindings and dead-letter exchanges.
func (l *lab) draw() drawing {
	d := drawing{Nodes: []node{{workQueue, "queue", "work", 0}}, Edges: []edge{}}
	column := map[string]int{retryExchange: 1, deadExchange: 1, requeueExchange: 3, returnExchange: 3, givenUpExchange: 2}
	for _, name := range []string{retryExchange, deadExchange, requeueExchange, returnExchange} {
		for _, e := range l.topology.Exchanges {
			if e.Name == name {
				d.Nodes = append(d.Nodes, node{name, "exchange", "exchange", column[name]})
			}
		}
	}
	if l.policy.Strategy == retry.StrategyRepublish {
		d.Edges = append(d.Edges, edge{workQueue, retryExchange, "retry"})
	}
	d.Edges = append(d.Edges, edge{workQueue, deadExchange, "dead"}, edge{deadExchange, givenUpExchange, "dead"}, edge{givenUpExchange, deadQueue, "dead"})
	back := requeueExchange
	if l.policy.Strategy == retry.StrategyDeadLetter {
		back = returnExchange
	}
	for _, b := range l.topology.Bindings {
		switch {
		case b.Source == retryExchange, b.Source == deadExchange && b.Queue != "":
			d.Nodes = append(d.Nodes, node{b.Queue, "queue", "delay", 2})
			d.Edges = append(d.Edges, edge{b.Source, b.Queue, "retry"}, edge{b.Queue, back, "retry"})
		case b.Source == back:
			d.Edges = append(d.Edges, edge{back, b.Queue, "retry"})
		}
	}
	d.Nodes = append(d.Nodes, node{givenUpExchange, "exchange", "exchange", 2}, node{deadQueue, "queue", "dead", 3})
	return d
}

// summary is a message without its history.
type summary struct {
	ID    string `json:"id"`
	Where string `json:"where"`
	State string `json:"state"`
}

// state is what the page shows of a run.
type state struct {
	Now     int64          `json:"now"` // in ms since the run began
	Counts  map[string]int `json:"counts"`
	Handled int            `json:"handled"`
	Dead    int            `json:"dead"`
	All     []summary      `json:"all"`
	// Shown are the newest messages, with the selected one, for the timeline.
	Shown  []*message `json:"shown"`
	Worker bool       `json:"worker"`
	Alarm  bool       `json:"alarm"`
	Error  string     `json:"error,omitempty"`
}

// shownMessages is how many messages the timeline has.
const shownMessages = 10

// state returns what the page shows. encode is called while nothing changes.
func (l *lab) state(selected string, encode func(state) string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.update()
	s := state{Now: l.since(time.Now()), Counts: map[string]int{}, All: []summary{}, Shown: []*message{}, Worker: l.stop != nil, Alarm: l.alarm}
	if l.err != nil {
		s.Error = l.err.Error()
	}
	from := max(0, len(l.messages)-shownMessages)
	for i, m := range l.messages {
		s.All = append(s.All, summary{m.ID, m.Where, m.State})
		switch {
		case m.State == "handled":
			s.Handled++
		case m.State == "dead":
			s.Dead++
		}
		if m.Where != "" {
			s.Counts[m.Where]++
		}
		if i >= from || m.ID == selected {
			s.Shown = append(s.Shown, m)
		}
	}
	return encode(s)
}
