package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/integration/rabbitmq"
)

var planted = flag.Bool("simulate.planted", false, "plant faults in hopback and see that simulations find them")

// plants are faults that hopback could have. Each is a change of its code that has an effect where PLANTED is true.
var plants = []struct {
	name, file string
	old, new   string
	// finds is what a simulation says of it, one of these.
	finds []ViolationKind
	// with are extra flags of the simulation. Flags that come later win.
	with []string
	// quick ones are found in seconds, so they are always planted, and the others by make planted.
	quick bool
}{
	{"an original is accepted before its copy is confirmed", "client/consumer_results.go",
		"	f.forwardOriginal = f\n",
		"	f.forwardOriginal = f\n	if PLANTED {\n		rs.deliveries.settle(d, link.Disposition{Kind: link.DispositionAccepted})\n	}\n",
		[]ViolationKind{ViolationLost, ViolationStranded}, []string{"-simulate.lanes", Neighbor, "-simulate.kinds", "delay-full,everything-reset,worker-killed", "-simulate.faults", "12"}, true},
	{"a settlement is lost now and then", "client/consumer_settler.go",
		"func (t *settler) queue(x settlement, then *followUps) {\n",
		"func (t *settler) queue(x settlement, then *followUps) {\n	if data := x.delivery.message.Data; PLANTED && len(data) > 0 && len(data[0]) > 0 && data[0][len(data[0])-1] == 7 {\n		return\n	}\n",
		[]ViolationKind{ViolationLeft, ViolationStuck, Starved, ViolationStranded}, []string{"-simulate.lanes", Neighbor, "-simulate.kinds", "worker-drained", "-simulate.faults", "4"}, true},
	{"the count of retries isn't raised", "retry/history.go",
		"	h[annotation.Retries] = int64(a.retries)\n",
		"	h[annotation.Retries] = int64(a.retries)\n	if PLANTED {\n		h[annotation.Retries] = int64(max(a.retries-1, 0))\n	}\n",
		[]ViolationKind{ViolationWrongCount, ViolationStuck, ViolationLeft}, nil, false},
	{"the guards don't look", "retry/watch.go",
		"func (w *watch) start(ctx context.Context) error {\n",
		"func (w *watch) start(ctx context.Context) error {\n	if PLANTED {\n		return nil\n	}\n",
		[]ViolationKind{Silence, ViolationStranded, ViolationEarly}, nil, false},
	{"a forward that is stuck holds its slot", "client/forwarder.go",
		"		f.aside, returned = f.SetAside(mayReturn)\n",
		"		if f.aside = PLANTED; !f.aside {\n			f.aside, returned = f.SetAside(mayReturn)\n		}\n",
		// It takes as many failures as the consumer may hold messages, while their address
		// takes nothing.
		[]ViolationKind{Starved}, []string{"-simulate.messages", "20000", "-simulate.faults", "20", "-simulate.kinds", beforePeople}, false},

	// The rest takes other people, or a full queue.
	{"a forwarded copy keeps its count", "retry/history.go",
		`	if p.in == "" || p.named == "" ||`,
		`	if PLANTED || p.in == "" || p.named == "" ||`,
		[]ViolationKind{ViolationWrongCount}, []string{"-simulate.lanes", Forwarder, "-simulate.kinds", "worker-drained", "-simulate.faults", "2"}, true},
	{"a key that a sender wrote is believed", "partition/config.go",
		"ok && key == d.Queue() {\n",
		"ok && (PLANTED || key == d.Queue()) {\n",
		[]ViolationKind{ViolationOrder}, []string{"-simulate.lanes", Partitioned + "," + Stranger, "-simulate.kinds", "worker-drained", "-simulate.faults", "10", "-simulate.messages", "2000"}, false},
	{"every marker is believed", "partition/marker.go",
		"	if !ok || was.ordinary {\n",
		"	if _, forged := d.Message().Annotations[markerKey]; PLANTED && forged && !ok {\n		return false, nil\n	}\n	if !ok || was.ordinary {\n",
		[]ViolationKind{ViolationLost}, []string{"-simulate.lanes", Partitioned + "," + Stranger, "-simulate.kinds", "worker-drained", "-simulate.faults", "2"}, true},
	{"a message without a key is handled", "client/consumer_delivery.go",
		"		d.unordered = DeadLetter{",
		"		unordered := &d.unordered\n		if PLANTED {\n			unordered = new(error)\n		}\n		*unordered = DeadLetter{",
		[]ViolationKind{ViolationOrder}, []string{"-simulate.lanes", Partitioned + "," + Stranger, "-simulate.kinds", "worker-drained", "-simulate.faults", "10", "-simulate.seed", "2"}, true},
	{"a consumer with retries waits for the end of an alarm", "internal/inside/later.go",
		"	a, _ := ctx.Value(alarmsKey{}).(Alarms)\n	return a\n",
		"	if PLANTED {\n		return nil\n	}\n	a, _ := ctx.Value(alarmsKey{}).(Alarms)\n	return a\n",
		[]ViolationKind{Starved}, []string{"-simulate.kinds", "alarm-at-start", "-simulate.faults", "8", "-simulate.messages", "4000"}, false},
	{"a refused copy counts as confirmed", "client/forwarder.go",
		"func (f *pendingForward) Answered(_ *outgoing, err error) {\n",
		"func (f *pendingForward) Answered(_ *outgoing, err error) {\n	if PLANTED && err != nil && !SafeToRetry(err) {\n		err = nil\n	}\n",
		[]ViolationKind{ViolationLost, ViolationStranded}, []string{"-simulate.kinds", "delay-full,foreign-full,permissions-gone", "-simulate.faults", "12", "-simulate.messages", "4000"}, false},
	// It takes more than a gigabyte of memory, so it is never quick.
	{"a decoder makes room for what is claimed", "internal/frames/value.go",
		"	return count >= 0 && b.elements >= 0\n",
		"	return count >= 0 && (PLANTED || b.elements >= 0)\n",
		[]ViolationKind{Memory}, nil, false},
	{"a worker of a group trusts its own clock", "partition/clock.go",
		"	if c.read.Own.IsZero() {\n",
		"	if PLANTED || c.read.Own.IsZero() {\n",
		[]ViolationKind{ViolationEarly, ViolationWrongReason, ViolationWrongEnd}, []string{"-simulate.kinds", "clock-differs,clock-jumps,worker-drained", "-simulate.faults", "60", "-simulate.messages", "3000"}, false},
	{"a scheduled message's delay is rounded down", "internal/ladder/ladder.go",
		"func Units(d, unit time.Duration) uint64 { return",
		"func Units(d, unit time.Duration) uint64 {\n	if PLANTED {\n		return uint64(d / unit)\n	}\n	return",
		[]ViolationKind{ViolationEarly}, []string{"-simulate.kinds", "worker-drained", "-simulate.faults", "2", "-simulate.seeds", "2"}, true},
	{"a message that crashes its workers isn't looked for", "partition/poison.go",
		"func (s suspicion) poison() bool { return s.failures",
		"func (s suspicion) poison() bool { return !PLANTED && s.failures",
		[]ViolationKind{ViolationLost, ViolationLeft, ViolationStuck, Starved, ViolationWrongReason}, []string{"-simulate.kinds", "poisoned,reset", "-simulate.faults", "10"}, false},

	// Fair queues, shared limits, and recurring messages.
	{"a stuck tenant gets the reserve", "fair/tenants.go",
		"		if x.over || x.bulky(now) {\n			return false\n",
		"		if (x.over || x.bulky(now)) && !PLANTED {\n			return false\n",
		[]ViolationKind{Unfair, Starved}, []string{"-simulate.lanes", Fair, "-simulate.faults", "12"}, true},
	{"slots of slow handlers never return", "fair/consume.go",
		"		h.slots.give(from, now.Sub(began), x.weight)\n",
		"		if !PLANTED || now.Sub(began).Seconds() < 20 {\n			h.slots.give(from, now.Sub(began), x.weight)\n		}\n",
		[]ViolationKind{Unfair, Starved, ViolationStuck, ViolationLeft}, []string{"-simulate.lanes", Fair, "-simulate.kinds", "worker-drained,reset", "-simulate.faults", "6"}, true},
	{"a message that waits for a slot when its worker stops is accepted", "fair/consume.go",
		"	h.tenants.leave(x, h.lane)\n	return client.Requeue{}\n",
		"	h.tenants.leave(x, h.lane)\n	if PLANTED {\n		return nil\n	}\n	return client.Requeue{}\n",
		[]ViolationKind{ViolationLost, ViolationStranded}, []string{"-simulate.lanes", Fair, "-simulate.kinds", "worker-drained,handlers-hang", "-simulate.faults", "12"}, false},
	{"a slot that another worker has is used", "middleware/ratelimit/slots.go",
		"		case ok:\n			got++\n",
		"		case ok || PLANTED:\n			got++\n",
		[]ViolationKind{Exceeded}, []string{"-simulate.lanes", Limited, "-simulate.kinds", "worker-drained", "-simulate.faults", "4", "-simulate.messages", "1000"}, false},
	{"a worker that notices a pause handles on", "middleware/pause/with.go",
		"		w.resume = w.pause()\n",
		"		if w.resume = func() {}; !PLANTED {\n			w.resume = w.pause()\n		}\n",
		[]ViolationKind{PauseBroke}, []string{"-simulate.lanes", Limited, "-simulate.kinds", "paused", "-simulate.faults", "4", "-simulate.messages", "1000"}, false},
	{"a worker of a paused group handles on", "partition/consume.go",
		"	w.seals.ask = func()",
		"	if PLANTED {\n		w.pausable.Pausing = new(client.Control)\n	}\n	w.seals.ask = func()",
		[]ViolationKind{PauseBroke}, []string{"-simulate.lanes", Partitioned, "-simulate.kinds", "group-paused", "-simulate.faults", "1", "-simulate.messages", "200"}, true},
	{"a worker that is gone is still shown", "middleware/live/watch.go",
		"		if now.After(k.until) {\n",
		"		if !PLANTED && now.After(k.until) {\n",
		[]ViolationKind{Misshown}, []string{"-simulate.lanes", Limited, "-simulate.kinds", "worker-drained", "-simulate.faults", "2", "-simulate.messages", "200"}, true},
	{"times that the broker refused count as published", "schedule/group_run.go",
		"	if !failed.IsZero() {\n		s.Done =",
		"	if PLANTED && failed.After(now) || !PLANTED && !failed.IsZero() {\n		s.Done =",
		[]ViolationKind{ViolationLost}, []string{"-simulate.lanes", Recurring, "-simulate.kinds", "policy-redeclared,queue-forgotten", "-simulate.faults", "24", "-simulate.messages", "600"}, true},
	{"a worker forgets pauses", "schedule/group_run.go",
		"	s.Holds = current(s.Holds, s.Done)\n",
		"	if s.Holds = current(s.Holds, s.Done); PLANTED {\n		s.Holds = nil\n	}\n",
		[]ViolationKind{Recurred}, []string{"-simulate.lanes", Recurring, "-simulate.kinds", "worker-drained,reset", "-simulate.faults", "12", "-simulate.messages", "600"}, true},
}

// beforePeople are faults that need nobody else.
const beforePeople = "forwards-stuck,everything-reset,latency,refuse,worker-killed,delay-full"

// plantedNow names the variable with the number of the fault that a simulation has.
const plantedNow = "HOPBACK_TEST_PLANTED"

// plantedSource is added to each package that has a fault.
const plantedSource = `
import "os"

var plantedNumber = os.Getenv("` + plantedNow + `")

func planted(number string) bool { return plantedNumber == number }
`

// plant builds a simulation in which each of the faults can be switched on. Unless build is set, it only checks that
// the code to change is there.
func plant(t *testing.T, root string, build bool) (binary string) {
	dir := t.TempDir()
	replaced, code := map[string]string{}, map[string]string{}
	write := func(path, text string) {
		at := filepath.Join(dir, fmt.Sprint(len(replaced), ".go"))
		require.NoError(t, os.WriteFile(at, []byte(text), 0o600))
		replaced[path] = at
	}
	for i, p := range plants {
		path := filepath.Join(root, p.file)
		if code[path] == "" {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			code[path] = string(text)
		}
		require.Equal(t, 1, strings.Count(code[path], p.old), "the code to change is in %s once: %s", p.file, p.name)
		code[path] = strings.Replace(code[path], p.old, strings.ReplaceAll(p.new, "PLANTED", fmt.Sprintf("planted(\"%d\")", i)), 1)
	}
	if !build {
		return ""
	}
	for path, text := range code {
		write(path, text)
		if added := filepath.Join(filepath.Dir(path), "planted.go"); replaced[added] == "" {
			write(added, "package "+filepath.Base(filepath.Dir(path))+"\n"+plantedSource)
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replaced})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	binary = filepath.Join(dir, "simulate.test")
	out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", binary, "-overlay", filepath.Join(dir, "overlay.json"), ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return binary
}

// Each fault is found within a minute on two cores; "make test" plants twelve that are found in seconds.
func TestPlantedFaultsAreFound(t *testing.T) {
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	binary := plant(t, root, *planted || rabbitmq.MayStart() && !explore.UnderRace)
	for i, p := range plants {
		t.Run(p.name, func(t *testing.T) {
			if binary == "" || !*planted && !p.quick {
				t.Skip("make test plants twelve, without the race detector, and make planted all")
			}
			t.Parallel()
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			args := append([]string{"-test.run", "^TestSimulate$", "-test.v", "-simulate.seeds", "20", "-simulate.versions", "4.3.6", "-simulate.faults", "54"}, p.with...)
			cmd := exec.CommandContext(ctx, binary, args...)
			cmd.Env = append(os.Environ(), fmt.Sprint(plantedNow, "=", i))
			cmd.WaitDelay = 5 * time.Second
			logged := &firstOf{until: func(line string) bool {
				for _, k := range p.finds {
					if strings.Contains(line, ": "+string(k)+": lane ") {
						return true
					}
				}
				return false
			}, end: cancel}
			cmd.Stdout, cmd.Stderr = logged, logged
			err = cmd.Run()
			require.Error(t, err, "nothing was found")
			require.NotEmpty(t, logged.found, "none of %v in: %s", p.finds, logged.all.String())
			// A minute on two cores is two of CPU, however busy the machine is.
			cpu := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
			t.Logf("REPORT simulate: %q: found after %.0f s, %.0f s of CPU: %s", p.name, time.Since(began).Seconds(), cpu.Seconds(), logged.found)
			assert.Less(t, cpu, 2*time.Minute)
		})
	}
}

// firstOf keeps what a process says, and ends it at the first line that is looked for.
type firstOf struct {
	until func(line string) bool
	end   func()
	all   bytes.Buffer
	rest  string
	found string
}

func (f *firstOf) Write(b []byte) (int, error) {
	f.all.Write(b)
	f.rest += string(b)
	for {
		line, rest, whole := strings.Cut(f.rest, "\n")
		if !whole {
			return len(b), nil
		}
		f.rest = rest
		if f.found == "" && f.until(line) {
			f.found = strings.TrimSpace(line)
			f.end()
		}
	}
}
