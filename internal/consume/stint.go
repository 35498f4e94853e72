package consume

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/oldbroker"

	"github.com/hopback/hopback/internal/link"
)

// stint is the life of one receiver link. Four kinds of goroutines share the
// work, so that none waits for another's broker:
//
//	receive ──crew──▶ workers ──settles──▶ settle
//	                     └──▶ forwarder ──────┘
type Stint struct {
	consumer *Consumer
	sess     link.Session
	link     link.ReceiverLink
	crew     *crew
	settles  backlog[settlement]
	// dead is closed when the link is gone: nothing can be settled any more.
	dead     chan struct{}
	deadOnce sync.Once
	why      error
	// unsettled is how many deliveries were when the link was lost.
	unsettled int
	// aside counts the deliveries whose forwards wait, and that the window doesn't count
	// any more; asideBytes is how large their copies are.
	aside, asideBytes atomic.Int64
	// window grants credit; when it counts nothing unsettled any more, idle is
	// signalled.
	window     *window
	idle       chan struct{}
	Quarantine *Quarantine
	lanes      *lanes
	silent     atomic.Bool // the broker answers nothing
	resizing   sync.Mutex
	// worn is signalled when the session has carried as many deliveries as it should.
	worn chan struct{}
	// old are the quirks of the broker.
	old    oldbroker.Quirks
	leases *leases // nil where the broker takes no delivery back
	// held are deliveries that nobody can read; guarded by mu. holding are those
	// that are about to be, which only the goroutine that receives adds to.
	mu      sync.Mutex
	held    []*Delivery
	holding sync.WaitGroup
	// deciding are the goroutines that deal with forwards that were given up.
	deciding group
	// keeps says that the queue is known to have a dead-letter exchange.
	keeps atomic.Bool
	// lastTarget is where the last forward went to: mostly the next goes there, too.
	lastTarget atomic.Pointer[builtAddress]
	// closing is closed when workers are to take no more deliveries. returning says that
	// what no handler has begun goes back to the queue then.
	closing    chan struct{}
	returning  atomic.Bool
	settler    settler
	handlerCtx context.Context
}

// settler runs the goroutine that settles, from the first settlement on.
type settler struct {
	of     interface{ settle(finish <-chan struct{}) }
	once   sync.Once
	ended  chan struct{} // closed: no further settlement will come
	exited chan struct{}
}

func newSettler(of interface{ settle(finish <-chan struct{}) }) settler {
	return settler{of: of, ended: make(chan struct{}), exited: make(chan struct{})}
}

func (x *settler) start() {
	x.once.Do(func() {
		go func() {
			defer close(x.exited)
			x.of.settle(x.ended)
		}()
	})
}

// finish returns when all that was to be settled is written.
func (x *settler) finish() {
	close(x.ended)
	x.start()
	<-x.exited
}

// group is goroutines that may be started until finish is called.
type group struct {
	mu       sync.Mutex
	finished bool
	running  sync.WaitGroup
}

// start runs f on a goroutine, unless finish was called.
func (g *group) start(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.finished {
		g.running.Go(f)
	}
}

// finish returns when all have ended. No more are started.
func (g *group) finish() {
	g.mu.Lock()
	g.finished = true
	g.mu.Unlock()
	g.running.Wait()
}

func (s *Stint) over() bool {
	select {
	case <-s.dead:
		return true
	default:
		return false
	}
}

func (s *Stint) die(err error) {
	s.deadOnce.Do(func() {
		s.why = err
		close(s.dead)
		s.crew.stop()
	})
}

// open counts the deliveries that are neither settled nor held for good.
func (s *Stint) open() int { return s.window.open() + int(s.aside.Load()) }

// begun counts those of them that don't wait for a handler. While deliveries are handed
// on, it may count one too many; enqueue has the drain look again.
func (s *Stint) begun() int {
	return s.open() - s.crew.count() - s.lanes.count() - s.Quarantine.count()
}

type settlement struct {
	delivery *Delivery
	d        link.Disposition
}

// prompt returns a ctx for what the stint asks the broker on the way. It ends with the stint,
// or when the drain begins, and after askLimit.
func (s *Stint) prompt() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	go func() {
		defer cancel()
		select {
		case <-s.closing:
		case <-s.dead:
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// builtAddress is an address with what Build makes of it.
type builtAddress struct {
	of      address.Address
	encoded string
}
