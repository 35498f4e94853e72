package cli

import (
	"encoding/json"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/desk"
)

// A message is shown as tables; AMQP's types and annotations are there with --raw only.
func TestMessageIsShownAsTables(t *testing.T) {
	t.Parallel()
	m := desk.DeadLetter{
		Summary:               desk.Summary{ID: "5b0c", MessageID: "order-1", Queue: "orders", Reason: "exhausted", Error: "boom", Retries: 1, Size: 1},
		Properties:            json.RawMessage(`{"message-id":"order-1","creation-time":{"timestamp":"1700000000000"}}`),
		ApplicationProperties: json.RawMessage(`[["shop",{"symbol":"s1"}],["list",{"list":[1]}]]`),
		Annotations:           json.RawMessage(`[[{"symbol":"x-hopback-retries"},{"int":1}]]`),
		Body:                  "hello", BodyForm: "text", BodySize: 5,
		History: []desk.HistoryEvent{{At: time.Unix(0, 0), Kind: "last failure", Queue: "orders", Count: 2, Text: "boom\x1b"}},
	}
	var plain, raw strings.Builder
	messageText(&plain, m, false)
	messageText(&raw, m, true)
	for _, line := range []string{
		"attempts       1 retry, 0 replays\n", "size           1 byte\n", "\nHISTORY\nTIME ", "2 times; boom\\u001b\n",
		"creation-time  1700000000000\n", "shop  s1\n", "\nBODY (text, 5 bytes)\nhello\n",
	} {
		assert.Contains(t, plain.String(), line)
	}
	assert.NotContains(t, plain.String(), "x-hopback-retries")
	assert.NotContains(t, plain.String(), "symbol")
	for _, line := range []string{"\nANNOTATIONS\n", `x-hopback-retries  {"int":1}`, `shop  {"symbol":"s1"}`, "delivery-count 0"} {
		assert.Contains(t, raw.String(), line)
	}
}

func TestVersionNamesCommitAndGo(t *testing.T) {
	t.Parallel()
	info := &debug.BuildInfo{GoVersion: "go1.26", Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
		{Key: "GOOS", Value: "linux"}, {Key: "GOARCH", Value: "amd64"},
	}}
	assert.Equal(t, "v1.2.3, commit 0123456789ab of 2026-01-02T03:04:05Z, with uncommitted changes, go1.26 linux/amd64", versionOf(info))
	assert.Equal(t, "(devel), go1.26", versionOf(&debug.BuildInfo{GoVersion: "go1.26"}))
}
