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
	Strategy retry.Strategy `json:"strategy"`
	// MaxRetries of 0 means no retries.
	MaxRetries int `json:"maxRetries"`
	// Delays are durations with spaces between them, such as "10s 1m".
	Delays string `json:"delays"`
	// Handler is a script: see parseScript.
	Handler string `json:"handler"`
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

// delays parses Delays.
func (s settings) delays() ([]time.Duration, error) {
	const remedy = "write them as 10s 1m 5m"
	if len(s.Delays) > maxText {
		return nil, argument.New("delays", nil, fmt.Sprintf("has more than %d bytes", maxText), remedy)
	}
	var all []time.Duration
	for text := range strings.FieldsSeq(strings.ReplaceAll(s.Delays, ",", " ")) {
		d, err := time.ParseDuration(text)
		if err != nil {
			return nil, argument.New("delays", text, "isn't a duration", remedy)
		}
		if d < time.Second || d > maxDelay {
			return nil, argument.New("delays", text, "isn't between 1s and 720h", remedy)
		}
		all = append(all, d)
	}
	if len(all) == 0 || len(all) > maxDelays {
		return nil, argument.New("delays", nil, fmt.Sprintf("has %d of them, and may have from 1 to %d", len(all), maxDelays), remedy)
	}
	return all, nil
}

// policy is the retry policy that the settings stand for. Go code of it is in code.go.
func (s settings) policy() (retry.Policy, error) {
	delays, err := s.delays()
	if err != nil {
		return retry.Policy{}, err
	}
	if _, err := parseScript(s.Handler); err != nil {
		return retry.Policy{}, err
	}
	if s.MaxRetries < 0 || s.MaxRetries > maxRetries {
		return retry.Policy{}, argument.New("retries", s.MaxRetries, fmt.Sprintf("isn't between 0 and %d", maxRetries), "choose fewer")
	}
	p := retry.Policy{Strategy: s.each()[0].Strategy, MaxRetries: s.MaxRetries, Backoff: retry.Delays(delays...), Worker: "worker"}
	if s.MaxRetries == 0 {
		p.MaxRetries = retry.NoRetries
	}
	return p, p.Validate()
}
