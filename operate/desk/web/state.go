package web

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/operate/desk"
)

// queueLocks let one scan at a time read a queue: of two, each would see only a part.
type queueLocks struct {
	mu  sync.Mutex
	all map[string]*queueLock
}

type queueLock struct {
	free   chan struct{} // has one element while the lock is free
	holder string
	users  int // that have the lock or wait for it
}

// acquire waits for the queue. Pages that wait for it show the holder, which says what the queue is used for.
func (q *queueLocks) acquire(ctx context.Context, queue, holder string) (release func(), err error) {
	q.mu.Lock()
	if q.all == nil {
		q.all = map[string]*queueLock{}
	}
	l := q.all[queue]
	if l == nil {
		l = &queueLock{free: make(chan struct{}, 1)}
		l.free <- struct{}{}
		q.all[queue] = l
	}
	l.users++
	q.mu.Unlock()
	leave := func() {
		if l.users--; l.users == 0 {
			delete(q.all, queue)
		}
	}
	select {
	case <-l.free:
	case <-ctx.Done():
		q.mu.Lock()
		defer q.mu.Unlock()
		leave()
		return nil, context.Cause(ctx)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	l.holder = holder
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		l.holder = ""
		l.free <- struct{}{}
		leave()
	}, nil
}

// rename changes what the queue is in use for.
func (q *queueLocks) rename(queue, holder string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.all[queue].holder = holder
}

// holder is what the queue is in use for.
func (q *queueLocks) holder(queue string) string {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.all[queue]; l != nil {
		return l.holder
	}
	return ""
}

const (
	// countsFresh is how long counts are shown. The broker isn't asked more often, even if many
	// pages are open.
	countsFresh = 2 * time.Second
	// askLimit bounds a request to the broker that reads no message.
	askLimit = 5 * time.Second
)

// counts are the queues' counts and the broker's alarms, without reading a message.
type counts struct {
	mu     sync.Mutex
	last   desk.Survey
	at     time.Time
	err    error
	asking chan struct{} // closed when the answer is there
}

// get returns the latest counts and when they were requested. After an error they are old.
func (c *counts) get(ctx context.Context, h *Handler) (desk.Survey, time.Time, error) {
	c.mu.Lock()
	if time.Since(c.at) < countsFresh {
		defer c.mu.Unlock()
		return c.last, c.at, c.err
	}
	asking := c.asking
	if asking == nil {
		asking = make(chan struct{})
		ok := h.spawn(func() {
			ctx, cancel := context.WithTimeout(h.ctx, askLimit)
			defer cancel()
			s, err := h.desk.Survey(ctx, desk.SurveyConfig{Queues: h.cfg.Queues, CountsOnly: true})
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.at, c.err = time.Now(), err; err == nil {
				c.last = s
			}
			c.asking = nil
			close(asking)
		})
		if !ok {
			c.mu.Unlock()
			return desk.Survey{}, time.Time{}, errEnding
		}
		c.asking = asking
	}
	known := c.last.Queues != nil
	c.mu.Unlock()
	wait := time.NewTimer(patience)
	defer wait.Stop()
	var enough <-chan time.Time
	if known { // old counts are better than none
		enough = wait.C
	}
	select {
	case <-asking:
	case <-enough:
	case <-ctx.Done():
		return desk.Survey{}, time.Time{}, context.Cause(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last, c.at, c.err
}

// there returns an error if the broker doesn't answer, or if reading the queue is refused.
// Without it a scan waits for a broker that is down.
func (h *Handler) there(ctx context.Context, queue string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, askLimit, errSilent)
	defer cancel()
	_, err := h.desk.SideEffects(ctx, queue)
	if err != nil && context.Cause(ctx) == errSilent {
		return errors.Join(errSilent, err)
	}
	return err
}

var errSilent = errors.New("the broker didn't answer within 5 s: it may be down, or have a memory or disk alarm; the page reconnects automatically")

// surveyor counts dead letters by group, one survey at a time, and keeps the last result.
type surveyor struct {
	mu      sync.Mutex
	running *surveying
	last    *surveyed
	stale   bool // something has been replayed or discarded since
}

// surveying is a survey that is running.
type surveying struct {
	who    string
	began  time.Time
	cancel context.CancelCauseFunc
	queue  string // being read
	seen   uint64
	of     uint64
}

// surveyed is the result of a survey.
type surveyed struct {
	at     time.Time // when it began
	took   time.Duration
	who    string
	queues map[string]desk.QueueSurvey
	groups []desk.Group
	others uint64
	err    error // why it ended early
}

// fewQueues is up to how many dead-letter queues a survey also reads those that seem to be empty.
const fewQueues = 20

// maxGroups bounds the groups that are kept.
const maxGroups = 1000

var errStopped = errors.New("stopped")

// start starts a survey, unless one is running.
func (s *surveyor) start(h *Handler, who string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running != nil {
		return false
	}
	ctx, cancel := context.WithCancelCause(h.ctx)
	now := &surveying{who: who, began: time.Now(), cancel: cancel}
	ok := h.spawn(func() {
		defer cancel(nil)
		result := s.run(ctx, h, now)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.running = nil
		if result.err != nil && s.last != nil && errors.Is(result.err, errStopped) {
			s.last.err = result.err // the last complete one is better than a part
			return
		}
		s.last = result
	})
	if !ok {
		cancel(nil)
		return false
	}
	s.running, s.stale = now, false
	return true
}

func (s *surveyor) run(ctx context.Context, h *Handler, now *surveying) *surveyed {
	result := &surveyed{at: now.began, who: now.who, queues: map[string]desk.QueueSurvey{}}
	defer func() { result.took = time.Since(now.began) }()
	asking, cancel := context.WithTimeoutCause(ctx, askLimit, errSilent)
	all, err := h.desk.Survey(asking, desk.SurveyConfig{Queues: h.cfg.Queues, CountsOnly: true})
	cancel()
	if err != nil {
		result.err = err
		return result
	}
	dead := 0
	for _, q := range all.Queues {
		if isDead(q) {
			dead++
			s.notify(func() { now.of += deadIn(q) })
		}
	}
	var before uint64
	for _, q := range all.Queues {
		// The counts of the HTTP API are some seconds old, and those of a new queue aren't
		// there yet. If there are few queues, the empty ones are read, too.
		if !isDead(q) || deadIn(q) == 0 && dead > fewQueues {
			continue
		}
		part, err := s.peek(ctx, h, now, q, before)
		if err != nil {
			if ctx.Err() != nil {
				result.err = context.Cause(ctx)
				break
			}
			q.Unread = err.Error()
			result.queues[q.Name] = q
			continue
		}
		for _, q := range part.Queues {
			trimQueue(&q)
			result.queues[q.Name] = q
			before += q.Seen
		}
		for _, g := range part.Groups {
			trimGroup(&g)
			result.groups = append(result.groups, g)
		}
		result.others += part.Others
	}
	slices.SortStableFunc(result.groups, func(a, b desk.Group) int { return cmp.Compare(b.Count, a.Count) })
	for _, g := range result.groups[min(len(result.groups), maxGroups):] {
		result.others += g.Count
	}
	result.groups = slices.Clone(result.groups[:min(len(result.groups), maxGroups)])
	return result
}

// peek surveys one queue.
func (s *surveyor) peek(ctx context.Context, h *Handler, now *surveying, q desk.QueueSurvey, before uint64) (desk.Survey, error) {
	s.notify(func() { now.queue = q.Name })
	release, err := h.queues.acquire(ctx, q.Name, "a survey")
	if err != nil {
		return desk.Survey{}, err
	}
	defer release()
	if err := h.there(ctx, q.Name); err != nil {
		return desk.Survey{}, err
	}
	return h.desk.Survey(ctx, desk.SurveyConfig{Queues: []string{q.Name}, OnProgress: func(_ string, p desk.Progress) {
		s.notify(func() { now.seen = before + p.Seen })
	}})
}

func (s *surveyor) notify(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// state returns copies of what there is.
func (s *surveyor) state() (running *surveying, last *surveyed, stale bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running != nil {
		copied := *s.running
		running = &copied
	}
	if s.last != nil {
		copied := *s.last
		last = &copied
	}
	return running, last, s.stale
}

// find returns a group of the last survey.
func (s *surveyor) find(queue, id string) (desk.Group, bool) {
	_, last, _ := s.state()
	if last != nil {
		for _, g := range last.groups {
			if g.In == queue && g.ID == id {
				return g, true
			}
		}
	}
	return desk.Group{}, false
}

func (s *surveyor) stop() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running == nil {
		return false
	}
	s.running.cancel(errStopped)
	return true
}

func isDead(q desk.QueueSurvey) bool { return q.Role == "dead-letter" || q.Role == "parking" }

// deadIn is how many dead letters a queue has, including those that a scan or a replay has
// not yet acknowledged or returned.
func deadIn(q desk.QueueSurvey) uint64 { return q.Messages + q.Unacknowledged }

const (
	// patience is how long a request waits for a scan before it answers with the progress.
	patience = 1500 * time.Millisecond
	// orderPatience is how long a request waits, once its scan has found what it shows, for
	// the queue to be in order again. Usually that takes no time.
	orderPatience = 300 * time.Millisecond
	// peekIdle is how long a scan continues after the last request for it, if it hasn't found
	// what it shows.
	peekIdle = 20 * time.Second
	// peekFresh is how long the result of a scan is shown; that of a long scan is shown for
	// longer.
	peekFresh = time.Minute
	maxPeeks  = 64 // that are kept
	maxOpen   = 16 // that are running
	// maxRaw bounds the whole bodies that are kept for downloads, in bytes.
	maxRaw = 64 << 20
)

// peeks are scans for a page: a list, or one message. A page doesn't wait for long. It shows
// the progress, and reloads itself.
type peeks struct {
	mu  sync.Mutex
	all map[string]*peek
}

type peek struct {
	key, queue string
	began      time.Time
	done       chan struct{} // closed in the end
	cancel     context.CancelCauseFunc
	idle       *time.Timer

	mu       sync.Mutex
	held     bool // it has the queue
	progress desk.Progress

	// The mutex of peeks guards these. raw may be dropped later.
	peekResult
	there chan struct{} // closed when there is something to show
	early bool          // it was there before the end
	at    time.Time     // when it was there
	err   error         // known in the end
	old   *time.Timer
}

var errIdle = errors.New("no page waits for it anymore")

// peekResult is what a scan has found.
type peekResult struct {
	value any
	raw   []byte
}

// reader reads for a page. It calls found as soon as it has what the page needs, unless it
// fails. It returns when the queue is in order again.
type reader func(ctx context.Context, found func(peekResult), notify func(desk.Progress)) (peekResult, error)

// get returns the scan of that key. It starts one if there is none, and waits a moment for
// its result.
func (l *peeks) get(h *Handler, v *visit, key, queue string, read reader) (*peek, *refusal) {
	l.mu.Lock()
	if l.all == nil {
		l.all = map[string]*peek{}
	}
	k := l.all[key]
	if k == nil {
		no := l.room()
		if no == nil {
			if k = l.begin(h, key, queue, read); k == nil {
				no = errEnding
			}
		}
		if no != nil {
			l.mu.Unlock()
			return nil, no
		}
	}
	if !k.early { // restoring the order isn't interrupted
		k.idle.Reset(peekIdle)
	}
	l.mu.Unlock()
	wait := time.NewTimer(patience)
	defer wait.Stop()
	select {
	case <-k.there:
		wait.Reset(orderPatience)
		select {
		case <-k.done:
		case <-wait.C:
		case <-v.Context().Done():
		}
	case <-wait.C:
	case <-v.Context().Done():
	}
	return k, nil
}

// room forgets the oldest result if there are too many.
func (l *peeks) room() *refusal {
	open := 0
	var oldest *peek
	for _, k := range l.all {
		select {
		case <-k.done:
			if oldest == nil || k.at.Before(oldest.at) {
				oldest = k
			}
		default:
			open++
		}
	}
	if open >= maxOpen {
		return refuse(http.StatusServiceUnavailable, "Too many scans", "Too many queues are being read for other pages. Try again in a moment.")
	}
	if len(l.all) >= maxPeeks && oldest != nil {
		l.drop(oldest)
	}
	return nil
}

func (l *peeks) begin(h *Handler, key, queue string, read reader) *peek {
	ctx, cancel := context.WithCancelCause(h.ctx)
	k := &peek{key: key, queue: queue, began: time.Now(), done: make(chan struct{}), there: make(chan struct{}), cancel: cancel}
	k.idle = time.AfterFunc(peekIdle, func() { cancel(errIdle) })
	ok := h.spawn(func() {
		defer cancel(nil)
		var result peekResult
		release, err := h.queues.acquire(ctx, queue, "another page")
		if err == nil {
			k.mu.Lock()
			k.held = true
			k.mu.Unlock()
			err = h.there(ctx, queue)
		}
		if err == nil {
			result, err = read(ctx, func(r peekResult) {
				h.queues.rename(queue, "another page, which is restoring its order")
				l.found(k, r)
			}, func(p desk.Progress) {
				k.mu.Lock()
				defer k.mu.Unlock()
				k.progress = p
			})
		}
		if release != nil {
			release()
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		k.idle.Stop()
		ended := time.Now()
		if k.err = err; !k.early {
			k.peekResult, k.at = result, ended
			close(k.there)
			l.boundRaw(k)
		}
		close(k.done)
		if l.all[key] != k {
			return
		}
		if ctx.Err() != nil {
			l.drop(k)
			return
		}
		fresh := max(peekFresh, 10*ended.Sub(k.began))
		if err != nil && !k.early {
			fresh = 2 * patience // long enough for the page that waits
		}
		k.old = time.AfterFunc(fresh, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.all[key] == k {
				l.drop(k)
			}
		})
	})
	if !ok {
		k.idle.Stop()
		cancel(nil)
		return nil
	}
	l.all[key] = k
	return k
}

// found keeps what a scan has found. The scan continues, even if no page asks for it: if it
// stopped now, the queue would be out of order.
func (l *peeks) found(k *peek, r peekResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k.idle.Stop()
	k.peekResult, k.early, k.at = r, true, time.Now()
	close(k.there)
	l.boundRaw(k)
}

// peekShown is what a page shows of a scan.
type peekShown struct {
	value any
	there bool
	early bool // it was there before the scan had ended
	over  bool
	at    time.Time
	err   error
}

// state returns the result of a scan so far.
func (l *peeks) state(k *peek) peekShown {
	l.mu.Lock()
	defer l.mu.Unlock()
	return peekShown{value: k.value, there: !k.at.IsZero(), early: k.early, over: k.over(), at: k.at, err: k.err}
}

// boundRaw drops whole bodies, the oldest first.
func (l *peeks) boundRaw(newest *peek) {
	if len(newest.raw) > maxRaw {
		newest.raw = nil
	}
	for {
		sum := 0
		var oldest *peek
		for _, k := range l.all {
			if len(k.raw) == 0 {
				continue
			}
			sum += len(k.raw)
			if k != newest && (oldest == nil || k.at.Before(oldest.at)) {
				oldest = k
			}
		}
		if sum <= maxRaw || oldest == nil {
			return
		}
		oldest.raw = nil
	}
}

// rawOf returns the whole body, if it was kept.
func (l *peeks) rawOf(k *peek) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return k.raw
}

func (l *peeks) drop(k *peek) {
	if k.old != nil {
		k.old.Stop()
	}
	delete(l.all, k.key)
}

// forget drops the results of a queue that has changed; with a key, that one alone.
func (l *peeks) forget(queue, key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.all {
		select {
		case <-k.done:
			if k.queue == queue && (key == "" || k.key == key) {
				l.drop(k)
			}
		default:
		}
	}
}

func (l *peeks) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.all {
		l.drop(k)
	}
}

// over reports whether the scan has ended.
func (k *peek) over() bool {
	select {
	case <-k.done:
		return true
	default:
		return false
	}
}

// now is the scan's progress, and whether it has the queue.
func (k *peek) now() (p desk.Progress, held bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.progress, k.held
}
