package rabbitmq

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// sayFunc prints what is happening for a person, one line for each call.
type sayFunc func(format string, args ...any)

// during prints what is happening and, every ten seconds, that it still is,
// until the function that it returns is called.
func (say sayFunc) during(format string, args ...any) (done func()) {
	what := fmt.Sprintf(format, args...)
	say("%s", what)
	began := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		t := time.NewTicker(10 * time.Second)
		defer t.Stop()
		for {
			select {
			case <-stop:
				return
			case <-t.C:
				say("%s: %.0f s so far", what, time.Since(began).Seconds())
			}
		}
	}()
	return sync.OnceFunc(func() {
		close(stop)
		<-stopped
	})
}

// lineWriter keeps lines of several goroutines whole. Errors of the writer
// are ignored: nobody would see them.
type lineWriter struct {
	mu  sync.Mutex
	out io.Writer
	now func() time.Time
}

func newLineWriter(out io.Writer) *lineWriter {
	if out == nil {
		out = io.Discard
	}
	return &lineWriter{out: out, now: time.Now}
}

func (w *lineWriter) prefixed(prefix string) sayFunc {
	return func(format string, args ...any) {
		w.mu.Lock()
		defer w.mu.Unlock()
		_, _ = fmt.Fprintf(w.out, "%s %s: %s\n", w.now().Format(time.TimeOnly), prefix, fmt.Sprintf(format, args...))
	}
}
