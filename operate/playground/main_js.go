//go:build js

package main

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"syscall/js"
)

// page is the current run. Its functions are called by script.js, which must get an answer without
// waiting for a timer: what may wait runs on a separate goroutine.
type page struct {
	mu      sync.Mutex
	labs    []*lab // one, or one for each strategy
	problem string // why the latest run didn't start
	number  int    // of the run, so that a slow start doesn't replace a later one
}

// main gives the page the object hopback.
func main() {
	p := &page{}
	api := js.Global().Get("Object").New()
	for name, f := range map[string]func(args []js.Value) string{
		"handlers": func([]js.Value) string { return encode(handlers) },
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
	old := p.labs
	p.labs, p.problem = nil, ""
	p.number++
	number := p.number
	go func() {
		for _, l := range old {
			l.close()
		}
		labs, err := newLabs(s)
		p.mu.Lock()
		current := number == p.number
		switch {
		case current && err != nil:
			p.problem = err.Error()
		case current:
			p.labs, labs = labs, nil
		}
		p.mu.Unlock()
		for _, l := range labs {
			l.close()
		}
	}()
	return "{}"
}

// newLabs starts a lab for each strategy. Their times count from the same moment.
func newLabs(s settings) (labs []*lab, err error) {
	for _, s := range s.each() {
		l, err := newLab(context.Background(), s, "")
		if err != nil {
			for _, l := range labs {
				l.close()
			}
			return nil, err
		}
		labs = append(labs, l)
		l.began = labs[0].began
	}
	return labs, nil
}

// current is nil while a run starts.
func (p *page) current() (labs []*lab, problem string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.labs, p.problem
}

func (p *page) send(args []js.Value) string {
	labs, _ := p.current()
	for _, l := range labs {
		if err := l.send(args[0].String(), args[1].Int()); err != nil {
			return failure(err)
		}
	}
	return "{}"
}

// state is {} until a run has started. Side by side, each run shows fewer messages.
func (p *page) state(args []js.Value) string {
	labs, problem := p.current()
	if labs == nil {
		if problem != "" {
			return encode(map[string]string{"error": problem})
		}
		return "{}"
	}
	texts := make([]string, len(labs))
	for i, l := range labs {
		texts[i] = l.state(args[0].String(), shownMessages/len(labs), func(s state) string { return encode(s) })
	}
	return `{"labs":[` + strings.Join(texts, ",") + `]}`
}

// history is that of the run with a number, from 0.
func (p *page) history(args []js.Value) string {
	if labs, _ := p.current(); len(args) > 0 && args[0].Int() < len(labs) {
		return labs[args[0].Int()].history()
	}
	return ""
}

func (p *page) act(args []js.Value) string {
	labs, _ := p.current()
	for _, l := range labs {
		l.act(args[0].String(), args[1].String())
	}
	return "{}"
}
