package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
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

// step is what a scripted handler does in some attempts of a message.
type step struct {
	slow  time.Duration // before the rest; 0 for none
	do    string        // "succeed", "fail", "permanent", "after", "panic", or "crash"
	times int           // how many attempts do this
	wait  time.Duration // of "after"
}

const (
	maxScript = 200 // bytes
	maxSteps  = 20
	maxTimes  = 100
)

// parseScript reads a script, such as "fail 2, slow 5s, panic, succeed": one step for each attempt, and the last
// one repeats. A malformed script is an *argument.Error.
func parseScript(text string) (steps []step, err error) {
	bad := func(value any, problem string) error {
		return argument.New("handler", value, problem, "write the steps of its attempts as fail 2, slow 5s, after 30s, permanent, crash, panic, succeed")
	}
	if len(text) > maxScript {
		return nil, bad(nil, fmt.Sprintf("has more than %d bytes", maxScript))
	}
	for part := range strings.SplitSeq(text, ",") {
		s, words := step{times: 1}, strings.Fields(part)
		length := func() (d time.Duration) {
			if len(words) > 1 {
				d, err = time.ParseDuration(words[1])
			}
			if len(words) < 2 || err != nil || d < time.Millisecond || d > maxDelay {
				err = bad(strings.TrimSpace(part), "needs a time between 1ms and 720h")
			}
			words = words[min(2, len(words)):]
			return d
		}
		if len(words) > 0 && words[0] == "slow" {
			if s.slow = length(); len(words) == 0 {
				words = []string{"succeed"}
			}
		}
		if err == nil && len(words) > 0 {
			switch s.do = words[0]; s.do {
			case "after":
				s.wait = length()
			case "fail":
				if len(words) > 1 {
					if s.times, _ = strconv.Atoi(words[1]); s.times < 1 || s.times > maxTimes {
						err = bad(strings.TrimSpace(part), fmt.Sprintf("doesn't fail from 1 to %d times", maxTimes))
					}
					words = words[1:]
				}
				words = words[1:]
			case "succeed", "permanent", "panic", "crash":
				words = words[1:]
			}
		}
		switch {
		case err != nil:
			return nil, err
		case s.do == "" || len(words) > 0:
			return nil, bad(strings.TrimSpace(part), "isn't a step")
		}
		steps = append(steps, s)
	}
	if len(steps) > maxSteps {
		return nil, bad(nil, fmt.Sprintf("has more than %d steps", maxSteps))
	}
	return steps, nil
}

// errCrash is the result of a handler whose worker crashes. Nothing of it reaches the broker, since its
// connection is cut.
var errCrash = errors.New("its process is gone")

// The errors of handlers. The program on the page has the same ones.
const (
	textFail      = "the shop doesn't answer"
	textPermanent = "there is no such customer"
	textAfter     = "429 Too Many Requests"
	textPanic     = "index out of range"
)

// run does what the script says for the attempt in ctx.
func (l *lab) run(ctx context.Context, _ *client.Delivery) error {
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
	switch s.do {
	case "fail":
		return errors.New(textFail)
	case "permanent":
		return retry.Permanent(errors.New(textPermanent))
	case "after":
		return retry.After(s.wait, errors.New(textAfter))
	case "panic":
		panic(textPanic)
	case "crash":
		l.cutWorker()
		return errCrash
	}
	return nil
}

// code is what run does, in Go.
func (s step) code() string {
	text := map[string]string{
		"succeed":   "return nil",
		"fail":      fmt.Sprintf("return errors.New(%q)", textFail),
		"permanent": fmt.Sprintf("return retry.Permanent(errors.New(%q))", textPermanent),
		"after":     fmt.Sprintf("return retry.After(%s, errors.New(%q))", goDuration(s.wait), textAfter),
		"panic":     fmt.Sprintf("panic(%q)", textPanic),
		"crash":     "os.Exit(1) // and something starts the worker again\nreturn nil",
	}[s.do]
	if s.slow > 0 {
		text = fmt.Sprintf("select {\ncase <-time.After(%s):\n%s\ncase <-ctx.Done():\n\treturn ctx.Err()\n}", strings.Replace(goDuration(s.slow), "*", " * ", 1), indented(text))
	}
	return text
}

// scriptCode is the body of the handler in Go.
func scriptCode(steps []step) string {
	last := len(steps) - 1
	if last == 0 {
		return steps[0].code()
	}
	var b strings.Builder
	b.WriteString("switch attempt := retry.Attempt(ctx); {\n")
	attempt := 0
	for _, s := range steps[:last] {
		attempt += s.times
		fmt.Fprintf(&b, "case attempt <= %d:\n%s\n", attempt, indented(s.code()))
	}
	fmt.Fprintf(&b, "default:\n%s\n}", indented(steps[last].code()))
	return b.String()
}

func indented(text string) string { return "\t" + strings.ReplaceAll(text, "\n", "\n\t") }
