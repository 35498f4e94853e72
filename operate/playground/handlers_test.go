package main

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/retry"
)

func TestParseScript(t *testing.T) {
	t.Parallel()
	steps, err := parseScript(" fail  2,slow 5s,slow 1m30s fail, after 30s , panic,permanent,crash,succeed")
	require.NoError(t, err)
	assert.Equal(t, []step{
		{do: "fail", times: 2}, {slow: 5 * time.Second, do: "succeed", times: 1}, {slow: 90 * time.Second, do: "fail", times: 1},
		{do: "after", times: 1, wait: 30 * time.Second}, {do: "panic", times: 1}, {do: "permanent", times: 1}, {do: "crash", times: 1}, {do: "succeed", times: 1},
	}, steps)
	for text, problem := range map[string]string{
		"": "isn't a step", ",": "isn't a step", "fail,": "isn't a step", "explode": "isn't a step", "fail 2 3": "isn't a step", "succeed 2": "isn't a step", "FAIL": "isn't a step",
		"slow 5s explode": "isn't a step", "\xff": "isn't a step", "slow": "isn't a step", "after": "isn't a step",
		"fail 0": "isn't from 1 to 100 times", "fail 101": "isn't from 1 to 100 times", "fail x": "isn't from 1 to 100 times", "fail 99999999999999999999": "isn't from 1 to 100 times",
		"slow x": "needs a time", "slow -1s": "needs a time", "after 721h": "needs a time", "slow 0s": "needs a time", "slow 1us fail": "needs a time",
		strings.Repeat(" ", maxScript+1): "has more than", strings.Repeat("fail,", maxSteps) + "fail": "has more than",
	} {
		_, err := parseScript(text)
		var bad *argument.Error
		require.ErrorAs(t, err, &bad, "%q", text)
		assert.Contains(t, bad.Problem, problem, "%q", text)
		assert.NotEmpty(t, bad.Remedy)
	}
}

// Each attempt does its step, and the last step repeats.
func TestScripts(t *testing.T) {
	t.Parallel()
	for script, want := range map[string]string{
		"fail 2, slow 5s, panic, succeed": "failed attempt 1: the shop doesn't answer; failed attempt 2: the shop doesn't answer; succeeded attempt 3",
		"fail, after 3s, panic":           "failed attempt 1: the shop doesn't answer; failed attempt 2: 429 Too Many Requests; panicked attempt 3: index out of range; is a dead letter reason: panicked; error: handler panicked: index out of range",
		"slow 2s fail, succeed":           "failed attempt 1: the shop doesn't answer; succeeded attempt 2",
		"fail 3":                          "failed attempt 1: the shop doesn't answer; failed attempt 2: the shop doesn't answer; failed attempt 3: the shop doesn't answer; failed attempt 4: the shop doesn't answer; is a dead letter reason: exhausted; error: the shop doesn't answer",
	} {
		for _, strategy := range strategies {
			inLab(t, settings{Strategy: strategy, MaxRetries: 3, Delays: "1s", Handler: script}, func(t *testing.T, l *lab) {
				require.NoError(t, l.send("a", 1))
				settled(t, l)
				l.history()
				var got []string
				for _, e := range l.messages[0].Entries {
					if e.Text != "" {
						got = append(got, e.Kind+" "+e.Text)
					}
				}
				assert.Equal(t, want, strings.Join(got, "; "), "%s %s", strategy, script)
			})
		}
	}
}

func FuzzParseScript(f *testing.F) {
	for _, h := range handlers {
		f.Add(h.Script)
	}
	for _, text := range []string{"fail 2, slow 5s, panic, succeed", "slow 5sfail", "slow slow 5s", "after after", "fail 007", "slow 1h1m fail 3,,"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		steps, err := parseScript(text)
		if err != nil {
			require.ErrorAs(t, err, new(*argument.Error))
			return
		}
		require.NotEmpty(t, steps)
		require.LessOrEqual(t, len(steps), maxSteps)
		written := ""
		for _, s := range steps {
			require.True(t, s.times >= 1 && s.times <= maxTimes && s.slow >= 0 && s.slow <= maxDelay && s.wait >= 0 && s.wait <= maxDelay, "%+v", s)
			if written != "" {
				written += ","
			}
			if s.slow > 0 {
				written += "slow " + s.slow.String() + " "
			}
			written += s.do
			if s.times > 1 {
				written += " " + strconv.Itoa(s.times)
			}
			if s.do == "after" {
				written += " " + s.wait.String()
			}
		}
		if len(written) <= maxScript {
			again, err := parseScript(written)
			require.NoError(t, err, written)
			require.Equal(t, steps, again)
		}
		_, err = settings{Strategy: retry.StrategyNative, MaxRetries: 1, Delays: "1s", Handler: text}.code()
		require.NoError(t, err)
	})
}
