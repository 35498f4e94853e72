package main

import (
	"slices"
	"time"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// node is a box of the drawing.
type node struct {
	ID      string `json:"id"`
	Kind    string `json:"kind"`    // "queue" or "exchange"
	Role    string `json:"role"`    // "work", "delay", "dead", "foreign", or "exchange"
	Column  int    `json:"column"`  // the place in the cycle, from 0
	Missing bool   `json:"missing"` // the broker doesn't have this queue
}

// edge is an arrow of the drawing.
type edge struct {
	From string `json:"from"`
	To   string `json:"to"`
	Kind string `json:"kind"` // "retry", "dead", or "foreign"
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
	parkingQueue    = "parking_queue"
)

// draw draws the lab's topology, and whether the broker has its queues. Edges are its bindings and dead-letter
// exchanges. The caller holds mu.
func (l *lab) draw() drawing {
	d := drawing{Edges: []edge{}}
	add := func(name, kind, role string, column int) {
		d.Nodes = append(d.Nodes, node{name, kind, role, column, kind == "queue" && !l.broker.Queue(name).Exists()})
	}
	add(workQueue, "queue", "work", 0)
	for i, name := range []string{retryExchange, deadExchange, requeueExchange, returnExchange} {
		if slices.ContainsFunc(l.topology.Exchanges, func(e declare.Exchange) bool { return e.Name == name }) {
			add(name, "exchange", "exchange", 1+i/2*2)
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
			add(b.Queue, "queue", "delay", 2)
			d.Edges = append(d.Edges, edge{b.Source, b.Queue, "retry"}, edge{b.Queue, back, "retry"})
		case b.Source == back:
			d.Edges = append(d.Edges, edge{back, b.Queue, "retry"})
		}
	}
	add(givenUpExchange, "exchange", "exchange", 2)
	if l.broker.Queue(foreignQueue).Exists() {
		add(foreignQueue, "queue", "foreign", 2)
		for _, exchange := range l.foreign {
			d.Edges = append(d.Edges, edge{exchange, foreignQueue, "foreign"})
		}
	} else {
		l.foreign = nil
	}
	add(deadQueue, "queue", "dead", 3)
	if l.broker.Queue(parkingQueue).Counts().Messages > 0 { // what couldn't return
		add(parkingQueue, "queue", "dead", 3)
		d.Edges = append(d.Edges, edge{back, parkingQueue, "dead"})
	}
	return d
}

// state is what the page shows of a run. Its size has a bound, however many messages there are.
type state struct {
	Strategy retry.Strategy `json:"strategy"`
	Now      int64          `json:"now"` // in ms since the run began
	Counts   map[string]int `json:"counts"`
	Total    int            `json:"total"`
	States   map[string]int `json:"states"` // how many messages are in each
	// Dots are the first messages of each queue.
	Dots map[string][]string `json:"dots"`
	// Shown are the newest messages, with the selected one, for the timeline.
	Shown   []message `json:"shown"`
	Worker  bool      `json:"worker"`
	Alarm   bool      `json:"alarm"`
	Lines   []string  `json:"lines"`
	Error   string    `json:"error,omitempty"`
	Drawing drawing   `json:"drawing"`
}

// shownMessages is how many messages the timeline has, and shownDots how many the drawing of a queue.
const (
	shownMessages = 10
	shownDots     = 6
)

// state returns what the page shows, with a number of the newest messages.
func (l *lab) state(selected string, newest int) state {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.catchUp()
	s := state{
		Strategy: l.policy.Strategy, Now: l.since(time.Now()), Counts: map[string]int{}, Total: len(l.messages), States: map[string]int{}, Dots: map[string][]string{}, Shown: []message{},
		Worker: l.stop != nil, Alarm: l.alarm, Lines: l.lines, Error: l.problem, Drawing: l.draw(),
	}
	for _, n := range s.Drawing.Nodes {
		if count := l.broker.Queue(n.ID).Counts().Messages; n.Kind == "queue" && count > 0 {
			s.Counts[n.ID] = count
		}
	}
	from := max(0, len(l.messages)-newest)
	for i, m := range l.messages {
		s.States[m.State]++
		for _, queue := range m.queues {
			if (queue == m.Where || queue == foreignQueue) && len(s.Dots[queue]) < shownDots && !slices.Contains(s.Dots[queue], m.ID) {
				s.Dots[queue] = append(s.Dots[queue], m.ID)
			}
		}
		if i >= from || m.ID == selected {
			l.explain(m)
			s.Shown = append(s.Shown, *m)
		}
	}
	return s
}
