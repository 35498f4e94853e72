package cli

import (
	"fmt"
	"sync"
	"time"
)

const (
	// progressAfter is when a command starts to report progress.
	progressAfter = time.Second
	// On a terminal the line is overwritten; otherwise each report is a new line.
	progressOnTerminal = 200 * time.Millisecond
	progressElsewhere  = 10 * time.Second
)

// progress reports on stderr how far an operation is that takes more than a second.
type progress struct {
	mu   sync.Mutex
	text string

	done chan struct{}
	over chan struct{}
}

// progress starts one. Callers must call end.
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

// set sets the text.
func (p *progress) set(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = fmt.Sprintf(format, args...)
}

// end removes the line.
func (p *progress) end() {
	close(p.done)
	<-p.over
}
