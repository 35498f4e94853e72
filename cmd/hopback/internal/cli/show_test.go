package cli

import (
	"encoding/json"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/operate/desk"
)

// A message is shown as tables, with the annotations of its sender, and the type of AMQP 0-9-1.
// AMQP's types, and annotations of RabbitMQ and hopback, are there with --raw only.
func TestMessageIsShownAsTables(t *testing.T) {
	t.Parallel()
	m := desk.DeadLetter{
		Summary:               desk.Summary{ID: "5b0c", MessageID: "order-1", Queue: "orders", Reason: "exhausted", Error: "boom", Retries: 1, Size: 1},
		Properties:            json.RawMessage(`{"message-id":"order-1","creation-time":{"timestamp":"1700000000000"}}`),
		ApplicationProperties: json.RawMessage(`[["shop",{"symbol":"s1"}],["list",{"list":[1]}]]`),
		Annotations:           json.RawMessage(`[[{"symbol":"x-hopback-retries"},{"int":1}],[{"symbol":"x-last-death-queue"},"orders"],[{"symbol":"x-basic-type"},"order.placed"],[{"symbol":"x-tenant"},"t1"]]`),
		Body:                  "hello", BodyForm: "text", BodySize: 5,
		History: []desk.HistoryEvent{{At: time.Unix(0, 0), Kind: "last failure", Queue: "orders", Count: 2, Text: "boom\x1b"}},
	}
	var plain, raw strings.Builder
	messageText(&plain, m, false)
	messageText(&raw, m, true)
	for _, line := range []string{
		"attempts       1 retry, 0 replays\n", "size           1 byte\n", "\nHISTORY\nTIME ", "1970-01-01T00:00:00Z  last failure  orders          2 times; boom\\u001b\n",
		"creation-time  1700000000000\n", "shop  s1\n", "type           order.placed\n", "\nANNOTATIONS OF THE SENDER\nNAME      VALUE\nx-tenant  t1\n\n", "\nBODY (text, 5 bytes)\nhello\n",
	} {
		assert.Contains(t, plain.String(), line)
	}
	assert.NotContains(t, plain.String(), "x-hopback-retries")
	assert.NotContains(t, plain.String(), "x-last-death-queue")
	assert.NotContains(t, plain.String(), "symbol")
	for _, line := range []string{"\nANNOTATIONS\n", `x-hopback-retries   {"int":1}`, `shop  {"symbol":"s1"}`, "delivery-count 0"} {
		assert.Contains(t, raw.String(), line)
	}
}

func TestVersionNamesCommitAndGo(t *testing.T) {
	t.Parallel()
	info := &debug.BuildInfo{GoVersion: "go1.26", Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
		{Key: "GOOS", Value: "linux"}, {Key: "GOARCH", Value: "amd64"},
	}}
	assert.Equal(t, "v1.2.3, commit 0123456789ab of 2026-01-02T03:04:05Z, with uncommitted changes, go1.26 linux/amd64", versionOf(info).String())
	assert.Equal(t, "(devel), go1.26", versionOf(&debug.BuildInfo{GoVersion: "go1.26"}).String())
}

// A survey shows alarms and groups of dead letters first, and idle queues last. The partitions of
// a group stay together.
func TestASurveyShowsIdleQueuesLast(t *testing.T) {
	t.Parallel()
	s := desk.Survey{
		Alarms: []desk.Alarm{{Node: "n", Resource: "disk"}},
		Queues: []desk.QueueSurvey{
			{Name: "a.dead", Role: "dead-letter"}, {Name: "b.dead", Role: "dead-letter", Messages: 2},
			{Name: "idle", Role: "work"}, {Name: "lines.1.000", Role: "work"}, {Name: "lines.1.001", Role: "work", Consumers: 1},
			{Name: "quiet.1.000", Role: "work"}, {Name: "traffic", Role: "work", In: 0.5},
		},
		Groups: []desk.Group{{ID: "3f2a9c01b7de", Count: 2, In: "b.dead"}},
	}
	var b strings.Builder
	surveyText(&b, s, true)
	var first []string
	for line := range strings.Lines(b.String()) {
		word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		first = append(first, word)
	}
	assert.Equal(t, []string{"ALARM:", "", "GROUP", "3f2a9c01b7de", "", "QUEUE", "b.dead", "lines.1.000", "lines.1.001", "traffic", "a.dead", "idle", "quiet.1.000"}, first)
	assert.Equal(t, "a.dead", s.Queues[0].Name, "the survey itself isn't changed: --json keeps its order")

	b.Reset()
	surveyText(&b, desk.Survey{}, true)
	assert.True(t, strings.HasPrefix(b.String(), "No dead letters were found.\n\nQUEUE "), b.String())
}
