package client

import "sync"

// activity notifies ConsumerConfig.OnActive whether the consumer is the active one of its
// queue. A nil *activity does nothing.
type activity struct {
	notify func(bool)

	mu        sync.Mutex
	link      any // whose link states count
	notified  bool
	waiting   []bool
	notifying bool // a goroutine calls notify
}

func newActivity(notify func(bool)) *activity {
	if notify == nil {
		return nil
	}
	return &activity{notify: notify}
}

// state returns what is called with the states of link, the consumer's next.
func (a *activity) state(link any) func(map[string]any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.link = link
	return func(state map[string]any) {
		active, ok := state["rabbitmq:active"].(bool)
		if !ok {
			return
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.link == link {
			a.change(active)
		}
	}
}

// ended reports that the link is gone, or that the consumer has stopped.
func (a *activity) ended() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.link = nil
	a.change(false)
}

// change is called with mu held. It doesn't wait for the user's function.
func (a *activity) change(active bool) {
	if active == a.notified {
		return
	}
	a.notified = active
	a.waiting = append(a.waiting, active)
	if a.notifying {
		return
	}
	a.notifying = true
	go func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		for len(a.waiting) > 0 {
			active := a.waiting[0]
			a.waiting = a.waiting[1:]
			a.mu.Unlock()
			a.notify(active)
			a.mu.Lock()
		}
		a.notifying = false
	}()
}
