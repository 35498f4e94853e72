package fair

import (
	"crypto/sha256"
	"encoding/hex"
	"math"
	"slices"
	"sync"
	"time"
)

const (
	// demandTime is over how many seconds a tenant's demand is averaged.
	demandTime = 2.0
	// episode is how long a tenant stays noisy after a message of it was moved or seen in a lane. Until
	// then its quiet level doesn't count: its earlier messages wait in the lane, and later ones must
	// not pass them for good.
	episode = 2 * time.Second
	// busy is how many messages in hand make a tenant noisy at once, by weight.
	busy = 3
	// maxTenants is how many tenants a worker knows. Others, with little demand, count as quiet.
	maxTenants = 4096
	// A tenant is bound to its lane when so many of its messages were moved within a short or a
	// longer time.
	shortMoves, longMoves = 20, 50
	shortTime, longTime   = 100 * time.Millisecond, 2 * time.Second
	// bindAgain is the least time between two bindings of a tenant: a binding takes a while, and
	// what came before it is still to be moved.
	bindAgain = 500 * time.Millisecond
)

// tenants is what a worker knows of the tenants, from the messages that it has seen itself.
type tenants struct {
	mu    sync.Mutex
	all   map[string]*tenant
	weigh func(string) int
	slots float64
	lanes int
	level float64 // demand by weight above which a tenant is noisy
	mean  float64 // seconds of a handler, of all tenants
	noted []change
}

// tenant is guarded by tenants.mu, except name and weight, which don't change.
type tenant struct {
	name   string
	weight float64
	known  bool // it is in tenants.all

	demand float64 // slots, decaying since at
	at     time.Time
	mean   float64 // seconds of a handler
	// waiting and running are its messages in hand from the main queue, laned are those from lanes,
	// and serving are those in handlers, of any queue; began is the sum of their beginnings, in seconds
	// since epoch.
	waiting, running, laned, serving int
	began                            float64
	// held are its handlers with quiet slots, and shifted are those that had one when it became noisy. over says
	// that it was noisy when its last message arrived.
	held, shifted int
	over          bool

	noisy bool
	bulk  time.Time // when a message was last moved or seen in a lane
	lane  int       // -1: none
	// routed says that its messages have its name as their routing key.
	routed      bool
	diverted    bool // it may be bound to a lane
	bound       time.Time
	checked     time.Time // when it was last considered to unbind it
	short, long int       // moves since shortAt and longAt
	shortAt     time.Time
	longAt      time.Time
}

// change is a call of Config.OnNoisy.
type change struct {
	tenant string
	noisy  bool
}

var epoch = time.Unix(1_700_000_000, 0)

func newTenants(weigh func(string) int, slots, lanes int) *tenants {
	return &tenants{all: map[string]*tenant{}, weigh: weigh, slots: float64(slots), lanes: lanes, level: math.Inf(1), mean: 0.005}
}

// nameOf bounds a tenant's name.
func nameOf(tenant string) string {
	if len(tenant) <= maxTenant {
		return tenant
	}
	sum := sha256.Sum256([]byte(tenant))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// of returns a tenant.
func (t *tenants) of(key string) *tenant {
	name := nameOf(key)
	t.mu.Lock()
	known := t.all[name]
	t.mu.Unlock()
	if known != nil {
		return known
	}
	weight := 1
	if t.weigh != nil {
		weight = min(max(t.weigh(key), 1), maxWeight)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if known := t.all[name]; known != nil {
		return known
	}
	x := &tenant{name: name, weight: float64(weight), lane: -1, mean: t.mean, at: time.Now()}
	if len(t.all) < maxTenants {
		x.known = true
		t.all[name] = x
	}
	return x
}

// arrive counts a message of the main queue, and reports whether its tenant is noisy. shift is how
// many quiet messages of it are in handlers then.
func (t *tenants) arrive(x *tenant, routed bool, now time.Time) (noisy bool, shift int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.routed = x.routed || routed
	noisy = x.bulky(now) || float64(x.waiting+x.running) >= busy*x.weight || x.wants(now) > t.level*x.weight
	x.add(x.mean, now)
	x.waiting++
	if x.over = noisy; noisy {
		shift = x.shift()
	}
	return noisy, shift
}

// wants is its demand in slots. Handlers that run count by their age, since a slow one is otherwise
// seen only when it returns.
func (x *tenant) wants(now time.Time) float64 {
	demand := x.demand * math.Exp(-now.Sub(x.at).Seconds()/demandTime)
	if x.serving > 0 {
		age := now.Sub(epoch).Seconds() - x.began/float64(x.serving)
		demand = max(demand, float64(x.serving)*(1-math.Exp(-age/demandTime)))
	}
	return demand
}

// add adds handler time to the demand.
func (x *tenant) add(seconds float64, now time.Time) {
	x.demand = x.demand*math.Exp(-now.Sub(x.at).Seconds()/demandTime) + seconds/demandTime
	x.at = now
}

// enter counts a message of a lane. If it was routed there, the tenant is bound. shift is that of arrive.
func (t *tenants) enter(x *tenant, lane int, routed bool, now time.Time) (shift int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.laned++
	x.add(x.mean, now)
	x.bulk, x.lane = now, lane
	x.routed = x.routed || routed
	x.diverted = x.diverted || routed
	t.note(x, true)
	return x.shift()
}

// shift moves the tenant's handlers from quiet slots, because it is noisy, and returns how many there are.
func (x *tenant) shift() (n int) {
	n, x.held, x.over = x.held, 0, true
	x.shifted += n
	return n
}

// begin counts a handler by where its slot comes from. It counts nothing and returns false if that is a quiet one,
// and the tenant is noisy by now.
func (t *tenants) begin(x *tenant, from int, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if from == quiet {
		if x.over || x.bulky(now) {
			return false
		}
		x.held++
	}
	if t.ofMain(from) {
		x.waiting--
		x.running++
	}
	x.serving++
	x.began += now.Sub(epoch).Seconds()
	return true
}

// ofMain reports whether a slot that comes from there serves a message of the main queue.
func (t *tenants) ofMain(from int) bool { return from == quiet || from == t.lanes }

// bulky reports whether messages of the tenant were moved or in a lane.
func (x *tenant) bulky(now time.Time) bool { return x.laned > 0 || now.Sub(x.bulk) < episode }

func (t *tenants) note(x *tenant, noisy bool) {
	if x.noisy != noisy && x.known {
		x.noisy = noisy
		t.noted = append(t.noted, change{x.name, noisy})
	}
}

// end counts the end of a handler that has begun at that time. It returns where its slot comes from.
func (t *tenants) end(x *tenant, from int, began, now time.Time) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	main := t.ofMain(from)
	if from == quiet && x.shifted > 0 {
		x.shifted--
		from = t.lanes
	} else if from == quiet {
		x.held--
	}
	if main {
		x.running--
	} else {
		x.laned--
	}
	x.serving--
	x.began -= began.Sub(epoch).Seconds()
	if x.serving == 0 {
		x.began = 0
	}
	took := now.Sub(began).Seconds()
	x.add(min(max(took-x.mean, 0), demandTime), now)
	x.mean += (took - x.mean) / 8
	t.mean += (took - t.mean) / 64
	return from
}

// leave uncounts a message that returns to its queue.
func (t *tenants) leave(x *tenant, lane int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if lane < 0 {
		x.waiting--
	} else {
		x.laned--
	}
}

// move uncounts a message that is moved, and returns its lane. bind says that the tenant is to be
// bound.
func (t *tenants) move(x *tenant, now time.Time) (lane int, bind bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.waiting--
	if x.lane < 0 || now.Sub(x.bulk) >= episode && !x.diverted {
		x.lane = 0
		counts := t.crowd(x, now)
		for i, n := range counts {
			if n < counts[x.lane] {
				x.lane = i
			}
		}
	}
	x.bulk = now
	t.note(x, true)
	x.short, x.shortAt = windowed(x.short, x.shortAt, shortTime, now)
	x.long, x.longAt = windowed(x.long, x.longAt, longTime, now)
	if (x.short < shortMoves && x.long < longMoves) || !x.routed || !x.known || now.Sub(x.bound) < bindAgain {
		return x.lane, false
	}
	x.bound = now
	x.short, x.long = 0, 0
	return x.lane, true
}

// windowed counts an event within a time.
func windowed(n int, since time.Time, within time.Duration, now time.Time) (int, time.Time) {
	if now.Sub(since) > within {
		return 1, now
	}
	return n + 1, since
}

// crowd is how many noisy tenants each lane has that this worker knows of, except one.
func (t *tenants) crowd(without *tenant, now time.Time) []int {
	counts := make([]int, t.lanes)
	for _, x := range t.all {
		if x != without && x.lane >= 0 && now.Sub(x.bulk) < episode {
			counts[x.lane]++
		}
	}
	return counts
}

// settle notes that a tenant is bound to a lane, or to none: -1.
func (t *tenants) settle(x *tenant, lane int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.lane, x.diverted = lane, lane >= 0
	x.short, x.long = 0, 0
	if lane < 0 {
		t.note(x, false)
	}
}

// review computes the level, forgets tenants, and returns those that may be unbound. idle says that there is
// none left.
func (t *tenants) review(now time.Time) (unbind []*tenant, changes []change, idle bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	type share struct{ demand, weight float64 }
	shares := make([]share, 0, len(t.all))
	total, weights := 0.0, 0.0
	for name, x := range t.all {
		if x.laned > 0 {
			x.bulk = now
		}
		calm := now.Sub(x.bulk) >= episode
		if calm && x.diverted && now.Sub(x.checked) >= episode {
			x.checked = now
			unbind = append(unbind, x)
		} else if calm && !x.diverted {
			t.note(x, false)
		}
		demand := x.wants(now)
		if calm && demand < 1e-4 && x.waiting+x.serving == 0 && !x.diverted {
			x.known = false
			delete(t.all, name)
			continue
		}
		shares = append(shares, share{demand, x.weight})
		total += demand
		weights += x.weight
	}
	t.level = math.Inf(1)
	if left := t.slots; total > left {
		slices.SortFunc(shares, func(a, b share) int {
			if a.demand*b.weight < b.demand*a.weight {
				return -1
			}
			return 1
		})
		for _, s := range shares {
			if s.demand > left/weights*s.weight {
				t.level = left / weights
				break
			}
			left -= s.demand
			weights -= s.weight
		}
	}
	changes, t.noted = t.noted, nil
	return unbind, changes, len(t.all) == 0
}
