package stream

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/loglines"
)

// saver saves positions in parallel with the handler: one at a time, and always the newest.
type saver struct {
	store            OffsetStore // nil: nothing is saved
	consumer, stream string
	every, most      int // save, and wait, with so many unsaved
	interval         time.Duration
	log              *slog.Logger

	stop   context.CancelFunc
	ended  chan struct{}
	marked time.Time     // when a mark was saved last; owned by run, and then by close
	signal chan struct{} // there is something to save, or enough of it
	room   chan struct{} // something was saved

	mu      sync.Mutex
	next    uint64 // behind what was handled
	mark    mark   // of a message before it
	unsaved int
}

var errSaveHangs = errors.New("OffsetStore.Save doesn't return")

const (
	saveTimeout  = 10 * time.Second // of one attempt
	saveRetryMin = 100 * time.Millisecond
	saveRetryMax = 5 * time.Second
	// lastSave bounds the save at the end.
	lastSave = 10 * time.Second
	// markInterval is the shortest time from one mark to the next.
	markInterval = time.Minute
)

func newSaver(stream string, cfg Config) *saver {
	ctx, cancel := context.WithCancel(context.Background())
	s := &saver{
		store: cfg.Offsets, consumer: cfg.Consumer, stream: stream, every: cfg.SaveEvery, most: 2 * cfg.SaveEvery,
		interval: cfg.SaveInterval, log: cfg.Logger, stop: cancel, ended: make(chan struct{}),
		signal: make(chan struct{}, 1), room: make(chan struct{}, 1),
	}
	if s.every == 1 {
		s.most = 1
	}
	if s.store == nil {
		close(s.ended)
		return s
	}
	go s.run(ctx)
	return s
}

// handled records that everything before next is handled. If too much is unsaved, it waits until
// something is saved or ctx is done.
func (s *saver) handled(ctx context.Context, next uint64, m mark) {
	if s.store == nil {
		return
	}
	s.mu.Lock()
	s.next, s.mark = next, m
	s.unsaved++
	unsaved := s.unsaved
	s.mu.Unlock()
	if unsaved == 1 || unsaved == s.every {
		select {
		case s.signal <- struct{}{}:
		default:
		}
	}
	for unsaved >= s.most {
		select {
		case <-s.room:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		unsaved = s.unsaved
		s.mu.Unlock()
	}
}

// run saves until it is stopped.
func (s *saver) run(ctx context.Context) {
	defer close(s.ended)
	timer := time.NewTimer(0)
	<-timer.C
	defer timer.Stop()
	failures := 0
	var outage loglines.Outage
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.signal:
			if s.pending() < s.every && failures == 0 {
				timer.Reset(s.interval)
				continue
			}
		case <-timer.C:
		}
		timer.Stop()
		if s.pending() == 0 {
			continue
		}
		if err := s.save(ctx, saveTimeout, false); err != nil {
			if ctx.Err() == nil {
				s.log.Log(ctx, outage.Level(time.Now()), "hopback: saving a stream consumer's position failed; trying again", "stream", s.stream, "consumer", s.consumer, "error", err)
			}
			pause := min(saveRetryMin<<min(failures, 10), saveRetryMax)
			failures++
			timer.Reset(pause)
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
				timer.Reset(0)
			}
			continue
		}
		failures, outage = 0, loglines.Outage{}
		switch left := s.pending(); {
		case left >= s.every:
			timer.Reset(0)
		case left > 0:
			timer.Reset(s.interval)
		}
	}
}

func (s *saver) pending() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unsaved
}

// save saves the position, and now and then a mark. last says that nothing is saved after it.
func (s *saver) save(ctx context.Context, limit time.Duration, last bool) error {
	s.mu.Lock()
	next, m, n := s.next, s.mark, s.unsaved
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := s.store.Save(ctx, s.consumer, s.stream, next); err != nil {
		return err
	}
	s.saveMark(ctx, m, last)
	s.mu.Lock()
	s.unsaved -= n
	s.mu.Unlock()
	select {
	case s.room <- struct{}{}:
	default:
	}
	return nil
}

// saveMark saves a mark if the store keeps marks. An older one is as true, as long as the stream has
// its message, so they aren't saved with each position.
func (s *saver) saveMark(ctx context.Context, m mark, last bool) {
	marks, ok := s.store.(MarkStore)
	if !ok || !m.known || !last && !s.marked.IsZero() && time.Since(s.marked) < markInterval {
		return
	}
	if err := marks.SaveMark(ctx, s.consumer, s.stream, m.String()); err != nil {
		s.log.Warn("hopback: saving a mark of a stream failed; it will be tried again with the next position", "stream", s.stream, "consumer", s.consumer, "error", err)
		return
	}
	s.marked = time.Now()
}

// close saves the last position, and returns why it couldn't.
func (s *saver) close() error {
	s.stop()
	select {
	case <-s.ended:
	case <-time.After(lastSave):
		return &SaveError{Stream: s.stream, Consumer: s.consumer, Err: errSaveHangs}
	}
	if s.store == nil || s.pending() == 0 {
		return nil
	}
	if err := s.save(context.Background(), lastSave, true); err != nil {
		return &SaveError{Stream: s.stream, Consumer: s.consumer, Err: err}
	}
	return nil
}
