package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
)

// Kind of fault.
type Kind string

// The faults.
const (
	Reset         Kind = "reset"          // TCP connections end by RST
	HalfOpen      Kind = "half-open"      // what is sent on open connections is dropped, both ways, permanently
	Freeze        Kind = "freeze"         // nothing gets through for a while, and then all of it
	SlowLink      Kind = "slow-link"      // 30 ms and 200 kB/s each way
	Refuse        Kind = "refuse"         // connections end, and new ones are refused for a while
	BrokerKilled  Kind = "broker-killed"  // kill -9, and started again
	BrokerPaused  Kind = "broker-paused"  // SIGSTOP, and SIGCONT
	MemoryAlarm   Kind = "memory-alarm"   // raised and cleared
	DiskAlarm     Kind = "disk-alarm"     // raised and cleared
	QueueDeleted  Kind = "queue-deleted"  // and declared again, with what it held lost by the operator's deed
	WorkerKilled  Kind = "worker-killed"  // kill -9, and started again
	WorkerPaused  Kind = "worker-paused"  // SIGSTOP, and SIGCONT
	WorkerDrained Kind = "worker-drained" // ended in order, and started again

	NodeKilled     Kind = "node-killed"     // kill -9 of one of three, and started again
	NodePaused     Kind = "node-paused"     // SIGSTOP or similar
	NodeIsolated   Kind = "node-isolated"   // cut off from its peers, and back
	RollingRestart Kind = "rolling-restart" // every node stopped in order and started, one after the other
	LeaderMoved    Kind = "leader-moved"    // the work queue's leader moves to another node
)

// SingleKinds are the faults for one node, ClusterKinds those for three.
var (
	SingleKinds = []Kind{Reset, HalfOpen, Freeze, SlowLink, Refuse, BrokerKilled, BrokerPaused, MemoryAlarm, DiskAlarm, QueueDeleted, WorkerKilled, WorkerPaused, WorkerDrained}

	ClusterKinds = []Kind{Reset, HalfOpen, Freeze, SlowLink, Refuse, MemoryAlarm, DiskAlarm, QueueDeleted, WorkerKilled, WorkerPaused, WorkerDrained, NodeKilled, NodePaused, NodeIsolated, RollingRestart, LeaderMoved}
)

// Side is whose connections a fault of the network is for.
type Side string

// The sides.
const (
	SidePublishers Side = "publishers"
	SideWorkers    Side = "workers"
	SideBoth       Side = "both"
)

// Fault is one fault of a schedule. Which of its fields count depends on Kind.
type Fault struct {
	Kind Kind `json:"kind"`
	// At is when, as the part of the fault's share of the messages that has been
	// published by then.
	At     float64       `json:"at"`
	For    time.Duration `json:"for_ns"`
	Side   Side          `json:"side"`
	Node   int           `json:"node"`
	Lane   int           `json:"lane"`
	Worker int           `json:"worker"` // -1: all of the lane
}

func (f Fault) String() string {
	switch f.Kind {
	case Reset, HalfOpen, Freeze, SlowLink, Refuse:
		return fmt.Sprintf("%s (%s, %v)", f.Kind, f.Side, f.For)
	case WorkerKilled, WorkerPaused, WorkerDrained:
		who := fmt.Sprintf("worker %d", f.Worker)
		if f.Worker < 0 {
			who = "all workers"
		}
		return fmt.Sprintf("%s (%s of lane %d, %v)", f.Kind, who, f.Lane, f.For)
	case LeaderMoved:
		return fmt.Sprintf("%s (lane %d, to node %d)", f.Kind, f.Lane, f.Node)
	case QueueDeleted:
		return fmt.Sprintf("%s (%v)", f.Kind, f.For)
	}
	return fmt.Sprintf("%s (node %d, %v)", f.Kind, f.Node, f.For)
}

// Plan is what a schedule is made of.
type Plan struct {
	Seed   uint64
	Faults int
	Kinds  []Kind
	Nodes  int
	Lanes  int
	// Workers is how many processes each lane has.
	Workers int
}

// Schedule is the faults of a run: a pure function of the plan. Every kind comes
// once before one comes again.
func (p Plan) Schedule() []Fault {
	r := rand.New(rand.NewPCG(p.Seed, 0x6368616f73))
	faults := make([]Fault, 0, p.Faults)
	var bag []Kind
	for range p.Faults {
		if len(bag) == 0 {
			bag = slices.Clone(p.Kinds)
			r.Shuffle(len(bag), func(i, j int) { bag[i], bag[j] = bag[j], bag[i] })
		}
		f := Fault{
			Kind: bag[0], At: 0.05 + 0.6*r.Float64(), Side: []Side{SidePublishers, SideWorkers, SideBoth}[r.IntN(3)],
			Node: r.IntN(p.Nodes), Lane: r.IntN(p.Lanes), Worker: r.IntN(p.Workers+1) - 1,
		}
		bag = bag[1:]
		least, most := time.Duration(0), time.Duration(0)
		switch f.Kind {
		case Freeze, SlowLink, Refuse, BrokerPaused:
			least, most = 500*time.Millisecond, 4*time.Second
		case BrokerKilled, NodeKilled, QueueDeleted, WorkerKilled, WorkerDrained:
			most = 2 * time.Second
		case MemoryAlarm, DiskAlarm:
			least, most = time.Second, 3*time.Second
		case WorkerPaused:
			least, most = time.Second, 12*time.Second // longer than the broker waits for a sign of life
		case NodePaused, NodeIsolated:
			least, most = 2*time.Second, 15*time.Second
		}
		u := r.Float64() // always, so that kinds don't shift what follows
		f.For = (least + time.Duration(u*float64(most-least))).Round(time.Millisecond)
		faults = append(faults, f)
	}
	return faults
}

// ParseKinds reads a list of kinds, separated by commas; "all" is all for that many
// nodes.
func ParseKinds(list string, nodes int) ([]Kind, error) {
	all := SingleKinds
	if nodes > 1 {
		all = ClusterKinds
	}
	if list == "all" || list == "" {
		return all, nil
	}
	var kinds []Kind
	for name := range strings.SplitSeq(list, ",") {
		k := Kind(strings.TrimSpace(name))
		if !slices.Contains(all, k) {
			return nil, argument.New("faults", string(k), fmt.Sprintf("is no fault for %d node(s)", nodes), fmt.Sprintf("use some of %v", all))
		}
		kinds = append(kinds, k)
	}
	return kinds, nil
}
