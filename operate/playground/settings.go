package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/retry"
)

// settings are the page's form.
type settings struct {
	Strategy   retry.Strategy `json:"strategy"`
	MaxRetries int            `json:"maxRetries"` // 0 means no retries
	Delays     string         `json:"delays"`     // durations with spaces between them, such as "10s 1m"
	Handler    string         `json:"handler"`    // a script: see parseScript
}

// strategies are those of the page. With sideBySide, it runs all of them.
var strategies = []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative}

const sideBySide retry.Strategy = "all"

// each returns the settings of the runs that s stands for.
func (s settings) each() (all []settings) {
	if s.Strategy != sideBySide {
		return []settings{s}
	}
	for _, s.Strategy = range strategies {
		all = append(all, s)
	}
	return all
}

// The bounds keep a page responsive. hopbacktest has none of them.
const (
	maxRetries = 20
	maxDelays  = 8
	maxDelay   = 30 * 24 * time.Hour
	maxText    = 200 // bytes of Delays
)

// parse returns the retry policy that the settings stand for, its delays, and the handler's steps. Bad settings are an
// *argument.Error.
func (s settings) parse() (p retry.Policy, delays []time.Duration, steps []step, err error) {
	bad := func(problem string, value any) (retry.Policy, []time.Duration, []step, error) {
		return p, nil, nil, argument.New("delays", value, problem, "write them as 10s 1m 5m")
	}
	if len(s.Delays) > maxText {
		return bad(fmt.Sprintf("has more than %d bytes", maxText), nil)
	}
	for text := range strings.FieldsSeq(strings.ReplaceAll(s.Delays, ",", " ")) {
		d, err := time.ParseDuration(text)
		if err != nil || d < time.Second || d > maxDelay {
			return bad("isn't a duration from 1s to 720h", text)
		}
		delays = append(delays, d)
	}
	if len(delays) == 0 || len(delays) > maxDelays {
		return bad(fmt.Sprintf("has %d of them, and may have from 1 to %d", len(delays), maxDelays), nil)
	}
	if s.MaxRetries < 0 || s.MaxRetries > maxRetries {
		return p, nil, nil, argument.New("retries", s.MaxRetries, fmt.Sprintf("isn't between 0 and %d", maxRetries), "choose fewer")
	}
	if steps, err = parseScript(s.Handler); err != nil {
		return p, nil, nil, err
	}
	p = retry.Policy{Strategy: s.each()[0].Strategy, MaxRetries: s.MaxRetries, Backoff: retry.Delays(delays...), Worker: "worker"}
	if s.MaxRetries == 0 {
		p.MaxRetries = retry.NoRetries
	}
	return p, delays, steps, p.Validate()
}
