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
	labs    []*lab // one, or one for each strategy
	problem error  // why the latest run didn't start
	number  int    // of the run, so that a slow start doesn't replace a later one
}

// main gives the page the object hopback. Its functions return JSON.
func main() {
	p := &page{}
	api := js.Global().Get("Object").New()
	for name, f := range map[string]func(args []js.Value) (any, error){
		"handlers": func([]js.Value) (any, error) { return handlers, nil },
		"start":    p.start, "send": p.send, "state": p.state, "history": p.history, "act": p.act,
		"code": func(args []js.Value) (any, error) {
			s, err := decode(args)
			if err != nil {
				return nil, err
			}
			text, err := s.code()
			return map[string]string{"code": text}, err
		},
		"doctor": func(args []js.Value) (any, error) {
			text := make([]byte, min(args[0].Length(), maxDefinitions+1))
			js.CopyBytesToGo(text, args[0])
			return diagnose(context.Background(), text)
		},
	} {
		api.Set(name, js.FuncOf(func(_ js.Value, args []js.Value) any {
			v, err := f(args)
			if err == nil {
				var text []byte
				if text, err = json.Marshal(v); err == nil {
					return string(text)
				}
			}
			text, _ := json.Marshal(map[string]string{"error": err.Error()}) // a map of texts can be encoded
			return string(text)
		}))
	}
	js.Global().Set("hopback", api)
	js.Global().Call("dispatchEvent", js.Global().Get("Event").New("hopback"))
	select {}
}

func decode(args []js.Value) (s settings, err error) {
	err = json.Unmarshal([]byte(args[0].String()), &s)
	return s, err
}

// start replaces the run. Bad settings are refused at once; the rest happens on a goroutine.
func (p *page) start(args []js.Value) (any, error) {
	s, err := decode(args)
	if err == nil {
		_, _, _, err = s.parse()
	}
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.labs
	p.labs, p.problem = nil, nil
	p.number++
	number := p.number
	go func() {
		closeAll(old)
		labs, err := newLabs(s)
		p.mu.Lock()
		if number == p.number {
			p.labs, p.problem, labs = labs, err, nil
		}
		p.mu.Unlock()
		closeAll(labs)
	}()
	return struct{}{}, nil
}

// newLabs starts a lab for each strategy. Their times count from the same moment.
func newLabs(s settings) (labs []*lab, err error) {
	each := s.each()
	for _, s := range each {
		l, err := newLab(context.Background(), s)
		if err != nil {
			closeAll(labs)
			return nil, err
		}
		labs = append(labs, l)
		l.began, l.most = labs[0].began, maxMessages/len(each)
	}
	return labs, nil
}

func closeAll(labs []*lab) {
	for _, l := range labs {
		l.close()
	}
}

// current is empty while a run starts.
func (p *page) current() (labs []*lab, problem error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.labs, p.problem
}

// each calls a function with each run.
func (p *page) each(do func(l *lab) error) (any, error) {
	labs, _ := p.current()
	for _, l := range labs {
		if err := do(l); err != nil {
			return nil, err
		}
	}
	return struct{}{}, nil
}

func (p *page) send(args []js.Value) (any, error) {
	return p.each(func(l *lab) error { return l.send(args[0].String(), args[1].Int()) })
}

func (p *page) act(args []js.Value) (any, error) {
	return p.each(func(l *lab) error { l.act(args[0].String(), args[1].String()); return nil })
}

// state is that of each run. Side by side, each one shows fewer messages.
func (p *page) state(args []js.Value) (any, error) {
	labs, problem := p.current()
	all := make([]state, len(labs))
	for i, l := range labs {
		all[i] = l.state(args[0].String(), shownMessages/len(labs))
	}
	return all, problem
}

// history is that of the run with a number, from 0.
func (p *page) history(args []js.Value) (any, error) {
	if labs, _ := p.current(); args[0].Int() < len(labs) {
		return labs[args[0].Int()].history(), nil
	}
	return "", nil
}
