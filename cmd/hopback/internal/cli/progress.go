package cli

import (
	"fmt"
	"sync"
	"time"
)

const (
	// On a terminal, a command reports progress after a second, in a line that it overwrites.
	progressAfter = time.Second
	progressEvery = 200 * time.Millisecond
	// Elsewhere it writes a line every half minute, so that the log of a long command shows that it
	// is alive, and how to continue it if it is killed. A shorter command writes nothing.
	progressElsewhere = 30 * time.Second
)

// progress reports on stderr how far a long operation is.
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
	first, next := progressElsewhere, progressElsewhere
	if c.overwrites {
		first, next = progressAfter, progressEvery
	}
	timer := time.NewTimer(first)
	defer timer.Stop()
	shown := false
	for {
		select {
		case <-p.done:
			if shown && c.overwrites {
				_, _ = fmt.Fprint(c.stderr.w, "\r\x1b[K")
			}
			return
		case <-timer.C:
		}
		p.mu.Lock()
		line := fmt.Sprintf("%s (%v)", p.text, time.Since(began).Round(time.Second))
		p.mu.Unlock()
		if c.overwrites {
			_, _ = fmt.Fprintf(c.stderr.w, "\r\x1b[K%s", line)
		} else {
			_, _ = fmt.Fprintln(c.stderr.w, line)
		}
		timer.Reset(next)
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
