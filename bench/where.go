package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/pprof/profile"
)

// where is how much of the CPU each kind of work took, of a set of profiles.
type where map[string]int64

// kinds of work, in the order of the table
const (
	kNetwork  = "kernel: read and write"
	kWakeups  = "wake-ups and scheduler, with futex and epoll"
	kCodec    = "encoding and decoding"
	kEngine   = "the AMQP engine's states and frames"
	kHopback  = "hopback's own logic"
	kAlloc    = "allocation"
	kGC       = "garbage collection"
	kBench    = "the benchmark itself"
	kUnplaced = "other"
)

var kinds = []string{kNetwork, kWakeups, kCodec, kEngine, kHopback, kAlloc, kGC, kBench, kUnplaced}

// wholeStack finds kinds by any function on the stack: what the garbage collector calls is
// its own, and so is what a read does in the kernel.
var wholeStack = []struct {
	kind string
	in   *regexp.Regexp
}{
	{kGC, regexp.MustCompile(`^runtime\.(gcBgMarkWorker|gcAssistAlloc|gcStart|gcMarkTermination|gcMarkDone|bgsweep|bgscavenge|gcDrain|wbBufFlush|deductSweepCredit|runfinq|runFinalizers)\b`)},
	{kNetwork, regexp.MustCompile(`^internal/poll\.\(\*FD\)\.(Read|Write|Writev)$`)},
}

// byFrame finds kinds by the first function from the leaf on that is of one. The rest of
// the runtime and of the standard library, such as memmove, belongs to its caller.
var byFrame = []struct {
	kind string
	is   *regexp.Regexp
}{
	{kAlloc, regexp.MustCompile(`^sync\.\(\*Pool\)|^runtime\.(mallocgc|newobject|makeslice|growslice|makemap|makechan|rawstring|slicebytetostring|stringtoslicebyte|concatstring|morestack|newstack|copystack)`)},
	{kWakeups, regexp.MustCompile(`^runtime\.(schedule|findRunnable|mcall|park_m|gopark|goready|ready|wakep|startm|stopm|futex|futexwakeup|futexsleep|notewakeup|notesleep|netpoll|chansend|chanrecv|selectgo|sellock|selunlock|lock2|unlock2|lock|unlock|semacquire|semrelease|semawakeup|semasleep|goschedImpl|gosched_m|mstart|sysmon|usleep|osyield|newproc|goexit0|gdestroy|exitsyscall|entersyscall|reentersyscall|exitsyscallfast|retake|runqgrab|stealWork|checkTimers|resetspinning|execute|acquireSudog|releaseSudog|closechan|asyncPreempt|gopreempt_m|preemptone|mPark|casgstatus|timeSleep|timer|\(\*timers?\)|doSigPreempt|sigtramp|sighandler|gogo|procyield)\b|^(sync\.|internal/sync\.|sync/atomic\.|internal/runtime/atomic\.|runtime/internal/atomic\.)|^context\.|^time\.\(\*(Timer|Ticker)\)`)},
	{kCodec, regexp.MustCompile(`^github\.com/Azure/go-amqp/internal/(encoding|buffer|frames)\.|^github\.com/Azure/go-amqp\.\(\*?(Message|MessageHeader|MessageProperties|Annotations|StateAccepted)\)?\.|[./](M|m)arshal|[./](U|u)nmarshal|^github\.com/hopback/hopback/internal/(frames|message)\.|^github\.com/rabbitmq/amqp091-go\.(\(\*reader\)|write|read|\(\*?[a-zA-Z0-9]+\)\.(read|write)\b)|^(encoding/|bytes\.|bufio\.|strconv\.)`)},
	{kEngine, regexp.MustCompile(`^github\.com/(Azure/go-amqp|rabbitmq/amqp091-go|hopback/hopback/internal/amqp)[./]`)},
	{kHopback, regexp.MustCompile(`^github\.com/hopback/hopback/`)},
	{kBench, regexp.MustCompile(`^main\.|^github\.com/hopback/hopback/bench[./]`)},
}

// kindOf names the kind of a sample by its functions, leaf first.
func kindOf(stack []string) string {
	for _, k := range wholeStack {
		if slices.ContainsFunc(stack, k.in.MatchString) {
			return k.kind
		}
	}
	for _, f := range stack {
		for _, k := range byFrame {
			if k.is.MatchString(f) {
				// hopback's bench lies in hopback's folder.
				if k.kind == kHopback && strings.HasPrefix(f, "github.com/hopback/hopback/bench.") {
					return kBench
				}
				return k.kind
			}
		}
	}
	// A stack of the runtime alone is the scheduler's.
	if len(stack) > 0 && strings.HasPrefix(stack[len(stack)-1], "runtime.") && !strings.HasPrefix(stack[len(stack)-1], "runtime.goexit") {
		return kWakeups
	}
	return kUnplaced
}

// whereOf reads profiles and adds them up.
func whereOf(files []string) (where, error) {
	w := where{}
	for _, name := range files {
		if err := w.read(name); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return w, nil
}

func (w where) read(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	p, err := profile.Parse(f)
	if err != nil {
		return err
	}
	if len(p.SampleType) == 0 || p.SampleType[len(p.SampleType)-1].Type != "cpu" {
		return fmt.Errorf("it isn't a CPU profile")
	}
	for _, s := range p.Sample {
		var stack []string
		for _, l := range s.Location {
			for _, line := range l.Line {
				if line.Function != nil {
					stack = append(stack, line.Function.Name)
				}
			}
		}
		w[kindOf(stack)] += s.Value[len(s.Value)-1]
	}
	return nil
}

// print writes the table. each is the CPU of a message in microseconds, 0 if that isn't
// known.
func (w where) print(out io.Writer, each float64) {
	var sum int64
	for _, v := range w {
		sum += v
	}
	for _, k := range kinds {
		if sum == 0 || w[k] == 0 {
			continue
		}
		share := float64(w[k]) / float64(sum)
		line := fmt.Sprintf("  | %-46s | %3.0f %% |", k, 100*share)
		if each > 0 {
			line += fmt.Sprintf(" %5.1f us |", each*share)
		}
		fmt.Fprintln(out, line)
	}
}

var unfit = regexp.MustCompile(`[^a-zA-Z0-9.]+`)

// profileName is the file for one run's profile.
func profileName(dir, contest, contestant string, round int) string {
	clean := func(s string) string { return strings.Trim(unfit.ReplaceAllString(s, "-"), "-") }
	return filepath.Join(dir, fmt.Sprintf("%s_%s_%d.pprof", clean(contest), clean(contestant), round))
}

// printWhere shows where the CPU of each contestant goes, if its runs were profiled.
func (res *result) printWhere(out io.Writer) {
	for _, name := range res.order {
		files := res.profiles[name]
		if len(files) == 0 {
			continue
		}
		w, err := whereOf(files)
		if err != nil {
			fmt.Fprintf(out, "\n%s, %s: %v\n", res.Name, name, err)
			continue
		}
		each := 0.0
		if v := column(res.Runs[name], cpu); len(v) > 0 {
			each = spreadOf(v).Median
		}
		fmt.Fprintf(out, "\n%s, %s: %.1f us of CPU a message\n", res.Name, name, each)
		w.print(out, each)
	}
}
