package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/retry"
)

// handler is one of the list that the page offers. Each is a script.
type handler struct {
	Name   string `json:"name"`
	Text   string `json:"text"`
	Script string `json:"script"`
}

var handlers = []handler{
	{"fails", "fails twice, then succeeds", "fail 2, succeed"},
	{"always", "always fails", "fail"},
	{"succeeds", "succeeds", "succeed"},
	{"permanent", "fails, and says that retries are useless", "permanent"},
	{"after", "is asked to wait 30 s once, then succeeds", "after 30s, succeed"},
	{"slow", "takes 5 s, then succeeds", "slow 5s"},
	{"panics", "panics", "panic"},
	{"crashes", "crashes its worker each time (a poison message)", "crash"},
}

// outcomes are what a step can do, in Go, and when it runs.
var outcomes = map[string]struct {
	code string
	run  func(s step) error
}{
	"succeed":   {`return nil`, func(step) error { return nil }},
	"fail":      {`return errors.New("the shop doesn't answer")`, func(step) error { return errors.New("the shop doesn't answer") }},
	"permanent": {`return retry.Permanent(errors.New("there is no such customer"))`, func(step) error { return retry.Permanent(errors.New("there is no such customer")) }},
	"after":     {`return retry.After(WAIT, errors.New("429 Too Many Requests"))`, func(s step) error { return retry.After(s.wait, errors.New("429 Too Many Requests")) }},
	"panic":     {`panic("index out of range")`, func(step) error { panic("index out of range") }},
	"crash":     {"os.Exit(1) // and something starts the worker again\nreturn nil", func(step) error { return errCrash }},
}

// errCrash is the result of a handler whose worker crashes. Nothing of it reaches the broker, since handle cuts
// the connection.
var errCrash = errors.New("its process is gone")

// step is what a scripted handler does in some attempts of a message.
type step struct {
	slow  time.Duration // before the rest; 0 for none
	do    string        // one of outcomes
	times int           // how many attempts do this
	wait  time.Duration // of "after"
}

const (
	maxScript = 200 // bytes
	maxSteps  = 20
	maxTimes  = 100
)

var stepForm = regexp.MustCompile(`^(?:slow (\S+) ?)?(?:(succeed|permanent|panic|crash)|(fail)(?: (\S+))?|(after) (\S+))?$`)

// parseScript reads a script, such as "fail 2, slow 5s, panic, succeed": one step for each attempt, and the last
// one repeats. A malformed script is an *argument.Error.
func parseScript(text string) (steps []step, err error) {
	bad := func(value any, problem string) ([]step, error) {
		return nil, argument.New("handler", value, problem, "write the steps of its attempts as fail 2, slow 5s, after 30s, permanent, crash, panic, succeed")
	}
	if len(text) > maxScript || strings.Count(text, ",") >= maxSteps {
		return bad(nil, fmt.Sprintf("has more than %d bytes or %d steps", maxScript, maxSteps))
	}
	for part := range strings.SplitSeq(text, ",") {
		part = strings.Join(strings.Fields(part), " ")
		m := stepForm.FindStringSubmatch(part)
		if part == "" || m == nil {
			return bad(part, "isn't a step")
		}
		s := step{do: cmp.Or(m[2], m[3], m[5], "succeed")}
		if s.times, err = strconv.Atoi(cmp.Or(m[4], "1")); err != nil || s.times < 1 || s.times > maxTimes {
			return bad(part, fmt.Sprintf("isn't from 1 to %d times", maxTimes))
		}
		for i, d := range map[int]*time.Duration{1: &s.slow, 6: &s.wait} {
			if *d, err = time.ParseDuration(cmp.Or(m[i], "1ms")); err != nil || *d < time.Millisecond || *d > maxDelay {
				return bad(part, "needs a time between 1ms and 720h")
			}
			if m[i] == "" {
				*d = 0
			}
		}
		steps = append(steps, s)
	}
	return steps, nil
}

// run does what the script says for the attempt in ctx.
func (l *lab) run(ctx context.Context) error {
	attempt, s := retry.Attempt(ctx), step{}
	for _, s = range l.steps {
		if attempt -= s.times; attempt <= 0 {
			break
		}
	}
	if s.slow > 0 {
		select {
		case <-time.After(s.slow):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return outcomes[s.do].run(s)
}

// code is what run does, in Go.
func (s step) code() string {
	text := strings.Replace(outcomes[s.do].code, "WAIT", goDuration(s.wait), 1)
	if s.slow > 0 {
		text = fmt.Sprintf("select {\ncase <-time.After(%s):\n%s\ncase <-ctx.Done():\n\treturn ctx.Err()\n}", strings.Replace(goDuration(s.slow), "*", " * ", 1), indented(text))
	}
	return text
}

// scriptCode is the body of the handler in Go.
func scriptCode(steps []step) string {
	if len(steps) == 1 {
		return steps[0].code()
	}
	text, attempt := "switch attempt := retry.Attempt(ctx); {\n", 0
	for i, s := range steps {
		attempt += s.times
		when := fmt.Sprintf("case attempt <= %d", attempt)
		if i == len(steps)-1 {
			when = "default"
		}
		text += when + ":\n" + indented(s.code()) + "\n"
	}
	return text + "}"
}

func indented(text string) string { return "\t" + strings.ReplaceAll(text, "\n", "\n\t") }
