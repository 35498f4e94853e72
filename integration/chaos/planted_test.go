package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var planted = flag.Bool("simulate.planted", false, "plant faults in hopback and see that simulations find them")

// plants are faults that hopback could have. Each is a change of its code.
var plants = []struct {
	name, file string
	old, new   string
	// finds is what a simulation says of it, one of these.
	finds []ViolationKind
	// with are extra flags of the simulation. Flags that come later win.
	with []string
}{
	{"an original is accepted before its copy is confirmed", "client/consumer_results.go",
		"	f.forwardOriginal = f\n	rs.consumer.forwarder.Send(&f.pendingForward)\n",
		"	f.forwardOriginal = f\n	rs.deliveries.settle(d, link.Disposition{Kind: link.DispositionAccepted})\n	rs.consumer.forwarder.Send(&f.pendingForward)\n",
		[]ViolationKind{ViolationLost, ViolationStranded}, nil},
	{"a settlement is lost now and then", "client/consumer_settler.go",
		"func (t *settler) queue(x settlement, then *followUps) {\n",
		"func (t *settler) queue(x settlement, then *followUps) {\n	if data := x.delivery.message.Data; len(data) > 0 && len(data[0]) > 0 && data[0][len(data[0])-1] == 7 {\n		return\n	}\n",
		[]ViolationKind{ViolationLeft, ViolationStuck, Starved, ViolationStranded}, nil},
	{"the count of retries isn't raised", "retry/history.go",
		"	h[annotation.Retries] = int64(a.retries)\n",
		"	h[annotation.Retries] = int64(max(a.retries-1, 0))\n",
		[]ViolationKind{ViolationWrongCount, ViolationStuck, ViolationLeft}, nil},
	{"the guards don't look", "retry/watch.go",
		"func (w *watch) start(ctx context.Context) error {\n",
		"func (w *watch) start(ctx context.Context) error {\n	if w != nil {\n		return nil\n	}\n",
		[]ViolationKind{Silence, ViolationStranded, ViolationEarly}, nil},
	{"a forward that is stuck holds its slot", "client/forwarder.go",
		"		f.aside, returned = f.SetAside(mayReturn)\n",
		"		f.aside = true\n",
		// It takes as many failures as the consumer may hold messages, while their address
		// takes nothing.
		[]ViolationKind{Starved}, []string{"-simulate.messages", "20000", "-simulate.faults", "20", "-simulate.kinds", beforePeople}},

	// The rest takes other people, or a full queue.
	{"a forwarded copy keeps its count", "retry/history.go",
		`	if p.in == "" || p.named == "" ||`,
		`	if true || p.in == "" || p.named == "" ||`,
		[]ViolationKind{ViolationWrongCount}, nil},
	{"a key that a sender wrote is believed", "partition/config.go",
		"ok && key == d.Queue() {\n",
		"ok {\n",
		[]ViolationKind{ViolationOrder}, []string{"-simulate.kinds", "worker-drained", "-simulate.faults", "10", "-simulate.messages", "2000"}},
	{"every marker is believed", "partition/marker.go",
		"	if !ok || was.ordinary {\n",
		"	if _, forged := d.Message().Annotations[markerKey]; forged && !ok {\n		return false, nil\n	}\n	if !ok || was.ordinary {\n",
		[]ViolationKind{ViolationLost}, nil},
	{"a message without a key is handled", "client/consumer_delivery.go",
		"		d.unordered = DeadLetter{",
		"		_ = DeadLetter{",
		[]ViolationKind{ViolationOrder}, []string{"-simulate.kinds", "worker-drained", "-simulate.faults", "10", "-simulate.seed", "2"}},
	{"a consumer with retries waits for the end of an alarm", "internal/inside/later.go",
		"	a, _ := ctx.Value(alarmsKey{}).(Alarms)\n	return a\n",
		"	return nil\n",
		[]ViolationKind{Starved}, []string{"-simulate.kinds", "alarm-at-start", "-simulate.faults", "8", "-simulate.messages", "4000"}},
	{"a refused copy counts as confirmed", "client/forwarder.go",
		"func (f *pendingForward) Answered(_ *outgoing, err error) {\n",
		"func (f *pendingForward) Answered(_ *outgoing, err error) {\n	if err != nil && !SafeToRetry(err) {\n		err = nil\n	}\n",
		[]ViolationKind{ViolationLost, ViolationStranded}, []string{"-simulate.kinds", "delay-full,foreign-full,permissions-gone", "-simulate.faults", "12", "-simulate.messages", "4000"}},
	{"a decoder makes room for what is claimed", "internal/frames/value.go",
		"	return count >= 0 && b.elements >= 0\n",
		"	return count >= 0\n",
		[]ViolationKind{Memory}, nil},
	{"a worker of a group trusts its own clock", "partition/clock.go",
		"	if c.read.Own.IsZero() {\n",
		"	if c != nil {\n",
		[]ViolationKind{ViolationEarly, ViolationWrongReason, ViolationWrongEnd}, []string{"-simulate.kinds", "clock-differs,clock-jumps,worker-drained", "-simulate.faults", "60", "-simulate.messages", "3000"}},
	{"a scheduled message's delay is rounded down", "internal/ladder/ladder.go",
		"return uint64((d + unit - 1) / unit) }",
		"return uint64(d / unit) }",
		[]ViolationKind{ViolationEarly}, []string{"-simulate.kinds", "worker-drained", "-simulate.faults", "2", "-simulate.seeds", "2"}},
	{"a message that crashes its workers isn't looked for", "partition/poison.go",
		"func (s suspicion) poison() bool { return s.failures",
		"func (s suspicion) poison() bool { return s.failures < 0 && s.failures",
		[]ViolationKind{ViolationLost, ViolationLeft, ViolationStuck, Starved, ViolationWrongReason}, []string{"-simulate.kinds", "poisoned,reset", "-simulate.faults", "10"}},

	// Fair queues, and recurring messages.
	{"a stuck tenant gets the reserve", "fair/tenants.go",
		"		if x.over || x.bulky(now) {\n			return false\n",
		"		if x.over && x.bulky(now) && now.IsZero() {\n			return false\n",
		[]ViolationKind{Unfair, Starved}, []string{"-simulate.lanes", Fair, "-simulate.faults", "12"}},
	{"slots of slow handlers never return", "fair/consume.go",
		"		h.slots.give(from, now.Sub(began), x.weight)\n",
		"		if now.Sub(began).Seconds() < 20 {\n			h.slots.give(from, now.Sub(began), x.weight)\n		}\n",
		[]ViolationKind{Unfair, Starved, ViolationStuck, ViolationLeft}, []string{"-simulate.lanes", Fair, "-simulate.kinds", "worker-drained,reset", "-simulate.faults", "6"}},
	{"a message that waits for a slot when its worker stops is accepted", "fair/consume.go",
		"	h.tenants.leave(x, h.lane)\n	return client.Requeue{}\n",
		"	h.tenants.leave(x, h.lane)\n	return nil\n",
		[]ViolationKind{ViolationLost, ViolationStranded}, []string{"-simulate.lanes", Fair, "-simulate.kinds", "worker-drained,handlers-hang", "-simulate.faults", "12"}},
	{"times that the broker refused count as published", "schedule/group_run.go",
		"	if !failed.IsZero() {\n		s.Done =",
		"	if failed.After(now) {\n		s.Done =",
		[]ViolationKind{ViolationLost}, []string{"-simulate.lanes", Recurring, "-simulate.kinds", "policy-redeclared,queue-forgotten", "-simulate.faults", "24", "-simulate.messages", "600"}},
	{"a worker forgets pauses", "schedule/group_run.go",
		"	s.Holds = current(s.Holds, s.Done)\n",
		"	s.Holds = nil\n",
		[]ViolationKind{Recurred}, []string{"-simulate.lanes", Recurring, "-simulate.kinds", "worker-drained,reset", "-simulate.faults", "12", "-simulate.messages", "600"}},
}

// beforePeople are faults that need nobody else.
const beforePeople = "forwards-stuck,everything-reset,latency,refuse,worker-killed,delay-full"

// Each fault is found within a minute on two cores. This takes minutes, so it runs with
// -simulate.planted only. What is always checked is that the code to change is there.
func TestPlantedFaultsAreFound(t *testing.T) {
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	for _, p := range plants {
		t.Run(p.name, func(t *testing.T) {
			path := filepath.Join(root, p.file)
			code, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, 1, strings.Count(string(code), p.old), "the code to change is in %s once", p.file)
			if !*planted {
				return
			}
			dir := t.TempDir()
			changed := filepath.Join(dir, "changed.go")
			require.NoError(t, os.WriteFile(changed, []byte(strings.Replace(string(code), p.old, p.new, 1)), 0o600))
			overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{path: changed}})
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
			binary := filepath.Join(dir, "simulate.test")
			out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", binary, "-overlay", filepath.Join(dir, "overlay.json"), ".").CombinedOutput()
			require.NoError(t, err, "%s", out)

			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			args := append([]string{"-test.run", "^TestSimulate$", "-test.v", "-simulate.seeds", "20", "-simulate.versions", "4.3.6", "-simulate.faults", "54"}, p.with...)
			cmd := exec.CommandContext(ctx, binary, args...)
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
