package cli

import (
	"fmt"
	"sync"
	"time"
)

const (
	// progressAfter is when a command begins to say that it is still busy.
	progressAfter = time.Second
	// On a terminal its line is written over so often; elsewhere there is a new one.
	progressOnTerminal = 200 * time.Millisecond
	progressElsewhere  = 10 * time.Second
)

// progress says on stderr how far something is that takes more than a second.
type progress struct {
	mu   sync.Mutex
	text string

	done chan struct{}
	over chan struct{}
}

// progress begins one. Its end must be called.
func (c *command) progress(what string) *progress {
	p := &progress{text: what, done: make(chan struct{}), over: make(chan struct{})}
	go func() {
		defer close(p.over)
		p.run(c)
	}()
	return p
}

func (p *progress) run(c *command) {
	began := time.Now()
	timer := time.NewTimer(progressAfter)
	defer timer.Stop()
	shown := false
	for {
		select {
		case <-p.done:
			if shown && c.io.StderrIsTerminal {
				_, _ = fmt.Fprint(c.stderr.w, "\r\x1b[K")
			}
			return
		case <-timer.C:
		}
		p.mu.Lock()
		line := fmt.Sprintf("%s (%v)", p.text, time.Since(began).Round(time.Second))
		p.mu.Unlock()
		if c.io.StderrIsTerminal {
			_, _ = fmt.Fprintf(c.stderr.w, "\r\x1b[K%s", line)
			timer.Reset(progressOnTerminal)
		} else {
			_, _ = fmt.Fprintln(c.stderr.w, line)
			timer.Reset(progressElsewhere)
		}
		shown = true
	}
}

// set is what is going on now.
func (p *progress) set(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = fmt.Sprintf(format, args...)
}

// end takes the line away.
func (p *progress) end() {
	close(p.done)
	<-p.over
}
