package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tallied returns the output without its last line, that line, and the verdict.
func tallied(in io.Reader) (text, last string, ok bool) {
	var out strings.Builder
	t := newTally(&out)
	t.read(in)
	ok = t.close()
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	return strings.Join(lines[:len(lines)-1], "\n"), lines[len(lines)-1], ok
}

const good = `{"Action":"start","Package":"m/a"}
{"Action":"run","Package":"m/a","Test":"TestOne"}
{"Action":"output","Package":"m/a","Test":"TestOne","Output":"=== RUN   TestOne\n"}
{"Action":"output","Package":"m/a","Test":"TestOne","Output":"chatter\n"}
{"Action":"pass","Package":"m/a","Test":"TestOne","Elapsed":0.1}
{"Action":"pass","Package":"m/a","Elapsed":0.2}
`

func TestCountsLeavesByVersion(t *testing.T) {
	text, last, ok := tallied(strings.NewReader(good + `
{"Action":"start","Package":"m/integration"}
{"Action":"run","Package":"m/integration","Test":"TestDelay"}
{"Action":"run","Package":"m/integration","Test":"TestDelay/4.3"}
{"Action":"run","Package":"m/integration","Test":"TestDelay/4.3/short"}
{"Action":"output","Package":"m/integration","Test":"TestDelay/4.3/short","Output":"    delay_test.go:12: REPORT late by "}
{"Action":"output","Package":"m/integration","Test":"TestDelay/4.3/short","Output":"3 ms\n"}
{"Action":"pass","Package":"m/integration","Test":"TestDelay/4.3/short"}
{"Action":"run","Package":"m/integration","Test":"TestDelay/4.3/long"}
{"Action":"output","Package":"m/integration","Test":"TestDelay/4.3/long","Output":"    delay_test.go:9: takes a day\n"}
{"Action":"output","Package":"m/integration","Test":"TestDelay/4.3/long","Output":"--- SKIP: TestDelay/4.3/long (0.00s)\n"}
{"Action":"skip","Package":"m/integration","Test":"TestDelay/4.3/long"}
{"Action":"pass","Package":"m/integration","Test":"TestDelay/4.3"}
{"Action":"run","Package":"m/integration","Test":"TestDelay/4.0"}
{"Action":"output","Package":"m/integration","Test":"TestDelay/4.0","Output":"REPORT late by 4 ms\n"}
{"Action":"pass","Package":"m/integration","Test":"TestDelay/4.0"}
{"Action":"pass","Package":"m/integration","Test":"TestDelay"}
{"Action":"pass","Package":"m/integration","Elapsed":2.34}
{"Action":"start","Package":"m/integrations"}
{"Action":"run","Package":"m/integrations","Test":"TestUnit/4.3"}
{"Action":"pass","Package":"m/integrations","Test":"TestUnit/4.3"}
{"Action":"pass","Package":"m/integrations"}
{"Action":"start","Package":"m/empty"}
{"Action":"output","Package":"m/empty","Output":"?   \tm/empty\t[no test files]\n"}
{"Action":"skip","Package":"m/empty"}
`))
	assert.True(t, ok)
	assert.Equal(t, "4 passed, 0 failed, 1 skipped", last)
	assert.Equal(t, `ok    m/a  0.2 s, 1 tests
REPORT late by 3 ms
REPORT late by 4 ms
ok    m/integration  2.3 s, 3 tests
ok    m/integrations  0.0 s, 1 tests

skipped: m/integration TestDelay/4.3/long: takes a day
integration tests on 4.0             1 passed
integration tests on 4.3             1 passed, 1 skipped
unit tests                           2 passed`, text)
}

func TestShowsFailuresInFull(t *testing.T) {
	text, last, ok := tallied(strings.NewReader(good + `
{"Action":"start","Package":"m/b"}
{"Action":"run","Package":"m/b","Test":"TestBad"}
{"Action":"run","Package":"m/b","Test":"TestBad/leaf"}
{"Action":"output","Package":"m/b","Test":"TestBad/leaf","Output":"want 1\n"}
{"Action":"output","Package":"m/b","Test":"TestBad/leaf","Output":"got 2\n"}
{"Action":"fail","Package":"m/b","Test":"TestBad/leaf"}
{"Action":"fail","Package":"m/b","Test":"TestBad"}
{"Action":"run","Package":"m/b","Test":"TestParent"}
{"Action":"run","Package":"m/b","Test":"TestParent/leaf"}
{"Action":"pass","Package":"m/b","Test":"TestParent/leaf"}
{"Action":"output","Package":"m/b","Test":"TestParent","Output":"in its clean-up\n"}
{"Action":"fail","Package":"m/b","Test":"TestParent"}
{"Action":"fail","Package":"m/b","Elapsed":1}
`))
	assert.False(t, ok)
	assert.Equal(t, "2 passed, 2 failed, 0 skipped", last)
	assert.Contains(t, text, "m/b TestBad/leaf:\nwant 1\ngot 2\n")
	assert.Contains(t, text, "in its clean-up")
	assert.Contains(t, text, "FAIL  m/b  1.0 s")
	assert.Contains(t, text, "failed: m/b TestBad/leaf\nfailed: m/b TestParent\n")
	assert.NotContains(t, text, "chatter")
}

func TestOneFailureWhereNoTestFailed(t *testing.T) {
	for name, in := range map[string]string{
		"test main": `{"Action":"start","Package":"m/b"}
{"Action":"output","Package":"m/b","Output":"no broker\n"}
{"Action":"fail","Package":"m/b","Elapsed":0.1}`,
		"build": `{"ImportPath":"m/b","Action":"build-output","Output":"no broker\n"}
{"ImportPath":"m/b","Action":"build-fail"}
{"Action":"start","Package":"m/b"}
{"Action":"fail","Package":"m/b","FailedBuild":"m/b"}`,
		"panic": `{"Action":"start","Package":"m/b"}
{"Action":"run","Package":"m/b","Test":"TestDies"}
{"Action":"output","Package":"m/b","Test":"TestDies","Output":"no broker\n"}
{"Action":"fail","Package":"m/b"}`,
	} {
		t.Run(name, func(t *testing.T) {
			text, last, ok := tallied(strings.NewReader(good + in))
			assert.False(t, ok)
			assert.Equal(t, "1 passed, 1 failed, 0 skipped", last)
			assert.Contains(t, text, "no broker")
			assert.Contains(t, text, "failed: m/b")
		})
	}
}

func TestBrokenStreamFails(t *testing.T) {
	for name, in := range map[string]io.Reader{
		"half a line": strings.NewReader(good + `{"Action":"star`),
		"no end":      strings.NewReader(good + `{"Action":"start","Package":"m/b"}`),
		"read error":  io.MultiReader(strings.NewReader(good), iotest.ErrReader(errors.New("gone"))),
	} {
		t.Run(name, func(t *testing.T) {
			_, last, ok := tallied(in)
			assert.False(t, ok)
			assert.Equal(t, "1 passed, 1 failed, 0 skipped", last)
		})
	}
}

func TestNothingExecutedFails(t *testing.T) {
	for name, in := range map[string]string{
		"empty":     "",
		"no tests":  `{"Action":"start","Package":"m/b"}` + "\n" + `{"Action":"skip","Package":"m/b"}`,
		"only text": "go: no such tool\n",
	} {
		t.Run(name, func(t *testing.T) {
			text, last, ok := tallied(strings.NewReader(in))
			assert.False(t, ok)
			assert.Equal(t, "0 passed, 1 failed, 0 skipped", last)
			assert.Contains(t, text, "no test was executed")
		})
	}
}

func TestFailureElsewhere(t *testing.T) {
	var out strings.Builder
	all := newTally(&out)
	assert.True(t, all.read(strings.NewReader(good)))
	all.fail("lint")
	assert.False(t, all.close())
	assert.Contains(t, out.String(), "failed: lint\n")
	assert.True(t, strings.HasSuffix(out.String(), "\n1 passed, 1 failed, 0 skipped\n"))
}

// A package may be tested by two commands at once, with the race detector and without.
func TestAPackageTestedTwiceCountsTwice(t *testing.T) {
	for second, want := range map[string]string{good: "2 passed, 0 failed, 0 skipped", strings.ReplaceAll(good, `"pass"`, `"fail"`): "1 passed, 1 failed, 0 skipped"} {
		var out strings.Builder
		all := newTally(&out)
		together(
			func() { assert.True(t, all.read(strings.NewReader(good))) },
			func() { assert.Equal(t, second == good, all.read(strings.NewReader(second))) },
		)
		assert.Equal(t, second == good, all.close())
		assert.True(t, strings.HasSuffix(out.String(), "\n"+want+"\n"), out.String())
	}
}

// Each command is to run a test: a pattern that matches none is wrong.
func TestACommandWithoutTestsFails(t *testing.T) {
	var out strings.Builder
	all := newTally(&out)
	assert.True(t, all.read(strings.NewReader(good)))
	assert.False(t, all.read(strings.NewReader(`{"Action":"start","Package":"m/b"}`+"\n"+`{"Action":"pass","Package":"m/b"}`)))
	assert.False(t, all.close())
	assert.Contains(t, out.String(), "failed: no test was executed in m/b\n")
}

// A command that fails by itself is a failure, and one that a test has failed is none more.
func TestCommandsAreCounted(t *testing.T) {
	for args, want := range map[string]string{
		"-no-such-flag":                      "0 passed, 1 failed, 0 skipped",
		"-run=^TestShowsFailuresInFull$":     "1 passed, 0 failed, 0 skipped",
		"-run=^TestThatDoesNotExist$":        "0 passed, 1 failed, 0 skipped",
		"github.com/hopback/hopback/nowhere": "0 passed, 1 failed, 0 skipped",
	} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			r := newRunner(t.Context(), &out)
			r.test(args)
			assert.Equal(t, strings.HasPrefix(want, "1"), r.tally.close())
			assert.True(t, strings.HasSuffix(out.String(), "\n"+want+"\n"), out.String())
		})
	}
}

// A signal stops what a command has started, too.
func TestCommandsStopWithTheirChildren(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := newRunner(ctx, io.Discard)
	began := time.Now()
	time.AfterFunc(100*time.Millisecond, cancel)
	_, err := r.output("sh", "-c", "sleep 600; echo never") // its child has its output open
	assert.Error(t, err)
	assert.Less(t, time.Since(began), 10*time.Second)
}

// The test that hung is reported separately from those that waited behind it, which may be hundreds of tests.
func TestWhatHungIsTold(t *testing.T) {
	text, last, ok := tallied(strings.NewReader(good + `
{"Time":"2020-01-01T00:00:00Z","Action":"start","Package":"m/b"}
{"Time":"2020-01-01T00:00:00Z","Action":"run","Package":"m/b","Test":"TestHangs"}
{"Time":"2020-01-01T00:00:00Z","Action":"pause","Package":"m/b","Test":"TestHangs"}
{"Time":"2020-01-01T00:00:00Z","Action":"run","Package":"m/b","Test":"TestWaits"}
{"Time":"2020-01-01T00:00:00Z","Action":"output","Package":"m/b","Test":"TestWaits","Output":"=== PAUSE TestWaits\n"}
{"Time":"2020-01-01T00:00:00Z","Action":"pause","Package":"m/b","Test":"TestWaits"}
{"Time":"2020-01-01T00:10:00Z","Action":"cont","Package":"m/b","Test":"TestHangs"}
{"Time":"2020-01-01T00:10:00Z","Action":"run","Package":"m/b","Test":"TestHangs/4.3"}
{"Time":"2020-01-01T00:10:00Z","Action":"output","Package":"m/b","Test":"TestHangs/4.3","Output":"=== CONT  TestHangs/4.3\n"}
{"Time":"2020-01-01T00:10:00Z","Action":"run","Package":"m/b","Test":"TestHangs/4.0"}
{"Time":"2020-01-01T00:10:00Z","Action":"pause","Package":"m/b","Test":"TestHangs/4.0"}
{"Time":"2020-01-01T00:25:00Z","Action":"output","Package":"m/b","Output":"panic: test timed out after 25m0s\n"}
{"Time":"2020-01-01T00:25:00Z","Action":"fail","Package":"m/b","Elapsed":1500}
`))
	assert.False(t, ok)
	assert.Equal(t, "1 passed, 2 failed, 0 skipped", last)
	assert.Contains(t, text, "failed: m/b TestHangs/4.3: not ended after 900 s\nfailed: m/b: 2 tests had not had their turn\n")
	assert.NotContains(t, text, "TestWaits")
	assert.NotContains(t, text, "=== CONT", "it has said nothing itself")
}

func TestTheTableOfTimesBeginsWithTheSlowest(t *testing.T) {
	all := newTally(io.Discard)
	all.read(strings.NewReader(good))
	all.read(strings.NewReader(strings.ReplaceAll(strings.ReplaceAll(good, "TestOne", "TestTwo"), `0.1}`, `12.34}`)))
	assert.Equal(t, "   12.34\tpass\tm/a\tTestTwo\n    0.10\tpass\tm/a\tTestOne\n", all.table())
}
