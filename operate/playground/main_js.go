//go:build js

package main

import (
	"context"
	"encoding/json"
	"sync"
	"syscall/js"
)

// page is the current run. Its functions are called by script.js, which must get an answer without
// waiting for a timer: what may wait runs on a separate goroutine.
type page struct {
	mu      sync.Mutex
	lab     *lab
	problem string // why the latest run didn't start
	number  int    // of the run, so that a slow start doesn't replace a later one
}

// main gives the page the object hopback.
func main() {
	p := &page{}
	api := js.Global().Get("Object").New()
	for name, f := range map[string]func(args []js.Value) string{
		"handlers": func([]js.Value) string { return encode(handlers()) },
		"start":    p.start, "send": p.send, "state": p.state, "history": p.history, "act": p.act,
		"code": func(args []js.Value) string {
			s, err := decode(args)
			if err != nil {
				return failure(err)
			}
			text, err := s.code()
			if err != nil {
				return failure(err)
			}
			return encode(map[string]string{"code": text})
		},
		"doctor": func(args []js.Value) string {
			text := make([]byte, min(args[0].Length(), maxDefinitions+1))
			js.CopyBytesToGo(text, args[0])
			d, err := diagnose(context.Background(), text)
			if err != nil {
				return failure(err)
			}
			return encode(d)
		},
	} {
		api.Set(name, js.FuncOf(func(_ js.Value, args []js.Value) any { return f(args) }))
	}
	js.Global().Set("hopback", api)
	js.Global().Call("dispatchEvent", js.Global().Get("Event").New("hopback"))
	select {}
}

func encode(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return failure(err)
	}
	return string(text)
}

func failure(err error) string {
	text, _ := json.Marshal(map[string]string{"error": err.Error()}) // a map of texts can be encoded
	return string(text)
}

func decode(args []js.Value) (s settings, err error) {
	err = json.Unmarshal([]byte(args[0].String()), &s)
	return s, err
}

// start replaces the run. Bad settings are refused at once; the rest happens on a goroutine.
func (p *page) start(args []js.Value) string {
	s, err := decode(args)
	if err != nil {
		return failure(err)
	}
	if _, err := s.policy(); err != nil {
		return failure(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.lab
	p.lab, p.problem = nil, ""
	p.number++
	number := p.number
	go func() {
		if old != nil {
			old.close()
		}
		l, err := newLab(context.Background(), s)
		p.mu.Lock()
		current := number == p.number
		switch {
		case current && err != nil:
			p.problem = err.Error()
		case current:
			p.lab = l
		}
		p.mu.Unlock()
		if !current && err == nil {
			l.close()
		}
	}()
	return "{}"
}

// current is nil while a run starts.
func (p *page) current() (l *lab, problem string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lab, p.problem
}

func (p *page) send(args []js.Value) string {
	l, _ := p.current()
	if l == nil {
		return "{}"
	}
	if err := l.send(args[0].String()); err != nil {
		return failure(err)
	}
	return "{}"
}

// state is {} until a run has started.
func (p *page) state(args []js.Value) string {
	l, problem := p.current()
	if l == nil {
		if problem != "" {
			return encode(map[string]string{"error": problem})
		}
		return "{}"
	}
	return l.state(args[0].String(), func(s state) string {
		return encode(struct {
			state
			Drawing drawing `json:"drawing"`
		}{s, l.draw()})
	})
}

func (p *page) history([]js.Value) string {
	if l, _ := p.current(); l != nil {
		return l.history()
	}
	return ""
}

// act disturbs the run.
func (p *page) act(args []js.Value) string {
	l, _ := p.current()
	if l == nil {
		return "{}"
	}
	switch args[0].String() {
	case "cut":
		l.cutWorker()
	case "alarm":
		l.setAlarm(true)
	case "no alarm":
		l.setAlarm(false)
	case "start":
		l.startWorker()
	case "stop":
		l.stopWorker()
	}
	return "{}"
}
