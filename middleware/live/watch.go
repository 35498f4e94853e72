package live

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/link"
)

const (
	// showEvery is how often Watch calls show.
	showEvery = 2 * time.Second
	// perShow is how many workers answer in that time: more of them answer less often, so that a large fleet doesn't cost
	// more.
	perShow = 50
	// askEvery is how often Watch asks up to perAsk workers, for answers within twice that time. It asks more workers less
	// often, down to every maxFor/2.
	askEvery, perAsk = 10 * time.Second, 100
	// slack is for how much longer than announced an answer may take.
	slack = 3 * time.Second
)

// Watch calls show with what all workers do, about every 2 s until ctx ends, with less work for workers and broker than
// repeated calls of [Ask]. Workers answer by themselves: when something has changed, up to 50 of them every 2 s, up to
// 100 every 4 s, and so on; otherwise about every 6 s. So Watch notices within 10 s that a worker has started, or 20 s if
// there are over 100, and 30 s if there are over 200. It notices within about 12 s that one is gone, and with 200 workers
// within about 17 s. show must be quick.
//
// The errors are those of Ask, and nil if ctx has ended. After an error, call Watch again.
func Watch(ctx context.Context, conn *client.Conn, show func(Fleet)) error {
	switch {
	case conn == nil:
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	case show == nil:
		return argument.New("show", nil, "is nil", "pass a function that shows a Fleet")
	}
	parent := ctx
	ctx, a, err := newAsker(ctx, conn)
	if err != nil {
		return err
	}
	defer a.leave()
	w := &watch{known: map[string]*known{}}
	err = a.open(ctx, w.ask)
	for err == nil || errors.Is(err, errNobody) {
		if err = w.round(ctx, a.session); err != nil {
			break
		}
		show(w.fleet(time.Now()))
		if w.mayAsk(time.Since(w.asked)) {
			err = a.within(ctx, func(ctx context.Context) error { return w.ask(ctx, conn, a.to) })
		}
	}
	if parent.Err() != nil {
		return nil
	}
	return err
}

// watch is a call of Watch.
type watch struct {
	asked          time.Time
	every, again   time.Duration     // between answers, and until the next question
	known          map[string]*known // by ID
	bytes          int               // of their answers
	seen, received int               // answers and their bytes since the last show
	dropped        int
}

// known is a worker that has answered.
type known struct {
	worker Worker
	bytes  int
	until  time.Time // when it counts as gone
}

// ask asks for answers as often as the number of workers allows.
func (w *watch) ask(ctx context.Context, conn *client.Conn, replyTo string) error {
	w.asked = time.Now()
	w.every, w.again = w.pace()
	return askWith(ctx, conn, replyTo, map[string]any{propertyEvery: w.every.Milliseconds(), propertyFor: (2 * w.again).Milliseconds()})
}

// pace is how often so many workers answer, and are asked.
func (w *watch) pace() (every, again time.Duration) {
	times := func(per int) time.Duration { return time.Duration(max(1, (len(w.known)+per-1)/per)) }
	return showEvery * times(perShow), min(askEvery*times(perAsk), maxFor/2)
}

// mayAsk reports whether it is time for a question. It asks earlier if there are more or fewer workers than before, and
// at once if they answer too often.
func (w *watch) mayAsk(waited time.Duration) bool {
	switch every, _ := w.pace(); {
	case len(w.known) == 0 || every > w.every:
		return waited >= showEvery
	case every < w.every:
		return waited >= askEvery
	}
	return waited >= w.again
}

// round reads answers for a while.
func (w *watch) round(ctx context.Context, s link.ReplySession) error {
	lasts := showEvery
	if len(w.known) == 0 { // workers answer the first question at once
		lasts = quiet
	}
	reading, done := context.WithTimeout(ctx, lasts)
	defer done()
	w.seen, w.received, w.dropped = 0, 0, 0
	for w.seen < maxAnswers && w.received < maxAnswerBytes { // then the others wait in their queue, which is bounded
		reply, err := s.Receive(reading, 0)
		if err == nil {
			w.add(reply, time.Now())
		}
		switch {
		case ctx.Err() != nil:
			return ended(ctx)
		case reading.Err() != nil:
			return nil
		case err != nil:
			return err
		}
	}
	<-reading.Done()
	return nil
}

func (w *watch) add(reply link.Reply, now time.Time) {
	w.seen++
	size := len(reply.GetData())
	w.received += size
	one, every, ok := read(reply, now)
	before := w.known[one.ID]
	if before == nil {
		before = &known{}
	}
	if !ok || before.bytes == 0 && len(w.known) == maxWorkers || w.bytes-before.bytes+size > maxAnswerBytes {
		w.dropped++
		return
	}
	w.bytes += size - before.bytes
	if every == 0 { // it knows nothing of Watch, or has enough of these
		every = 2 * askEvery
	}
	w.known[one.ID] = &known{one, size, now.Add(every + slack)}
}

// fleet is what is known now.
func (w *watch) fleet(now time.Time) Fleet {
	f := Fleet{Workers: make([]Worker, 0, len(w.known)), Dropped: w.dropped}
	for id, k := range w.known {
		if now.After(k.until) {
			w.bytes -= k.bytes
			delete(w.known, id)
			continue
		}
		f.Workers = append(f.Workers, k.worker)
	}
	slices.SortFunc(f.Workers, func(a, b Worker) int { return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.ID, b.ID)) })
	return f
}
