package declare

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The texts are those of live brokers, 4.0.5 and 4.3.6, which say the same.
func TestParseConflict(t *testing.T) {
	t.Parallel()
	value := func(v string) Setting { return Setting{Value: v, Set: true} }
	typed := func(v, typ string) Setting { return Setting{Value: v, Type: typ, Set: true} }
	const tail = " for queue 'decl-a' in vhost '/': "
	for text, want := range map[string]Conflict{
		"inequivalent arg 'x-message-ttl'" + tail + "received '2000' but current is '1000'":                                                         {"x-message-ttl", value("2000"), value("1000")},
		"inequivalent arg 'x-message-ttl'" + tail + "received the value '5' of type 'long' but current is none":                                     {"x-message-ttl", typed("5", "long"), Setting{}},
		"inequivalent arg 'x-dead-letter-exchange'" + tail + "received none but current is the value '' of type 'longstr'":                          {"x-dead-letter-exchange", Setting{}, typed("", "longstr")},
		"inequivalent arg 'x-dead-letter-exchange'" + tail + "received the value 'it's 'x'' of type 'longstr' but current is none":                  {"x-dead-letter-exchange", typed("it's 'x'", "longstr"), Setting{}},
		"inequivalent arg 'auto_delete'" + tail + "received 'true' but current is 'false'":                                                          {"auto_delete", value("true"), value("false")},
		"inequivalent arg 'type' for exchange 'decl-x' in vhost '/': received 'topic' but current is 'headers'":                                     {"type", value("topic"), value("headers")},
		"inequivalent arg 'type' for exchange 'decl-x' in vhost '/': received ''x-modulus-hash'' but current is 'direct'":                           {"type", value("x-modulus-hash"), value("direct")},
		"inequivalent arg 'x-a' for queue 'q': received none but current is none' in vhost '/': received '1' but current is '2'":                    {"x-a", value("1"), value("2")},
		"inequivalent arg 'x-dead-letter-exchange'" + tail + "received 'it's ' but current is none' but current is 'dlx'":                           {"x-dead-letter-exchange", value("it's ' but current is none"), value("dlx")},
		"inequivalent arg 'x-a'" + tail + "received the value 'a of type b' of type 'longstr' but current is none":                                  {"x-a", typed("a of type b", "longstr"), Setting{}},
		"inequivalent arg 'x-a' for queue 'a\nb' in vhost 'it's': received 'none' but current is the value '[{longstr,<<\"a\">>}]' of type 'array'": {"x-a", value("none"), typed(`[{longstr,<<"a">>}]`, "array")},
	} {
		got, ok := parseConflict(text)
		require.True(t, ok, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{
		"", "inequivalent arg '", "inequivalent arg '' for queue", "inequivalent arg 'a'", "inequivalent arg 'a' for queue 'q'",
		"inequivalent arg 'a' for queue 'q' in vhost '/': received 'a'", "inequivalent arg 'a' for queue 'q' in vhost '/': received a but current is b",
		"inequivalent arg 'a' for queue 'q' in vhost '/': received ' but current is '", "something else",
	} {
		_, ok := parseConflict(text)
		assert.False(t, ok, text)
	}
}

func FuzzParseConflict(f *testing.F) {
	f.Add("inequivalent arg 'a' for queue 'q' in vhost '/': received '1' but current is '2'")
	f.Add("inequivalent arg 'a' for queue 'q' in vhost '/': received none but current is the value '2' of type 'long'")
	f.Add(strings.Repeat("': received ' but current is '", 50))
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > conflictLimit {
			t.Skip()
		}
		c, ok := parseConflict(text)
		if ok && (c.Argument == "" || !strings.Contains(text, c.Wanted.Value) || !strings.Contains(text, c.Found.Value)) {
			t.Fatalf("%+v isn't in %q", c, text)
		}
		_ = refused(opDeclare, Resource{kindQueue, text}, "PUT", "/", 409, text).Error()
	})
}

// Names and values without the words that the text is made of are always read.
func FuzzConflictRoundTrip(f *testing.F) {
	f.Add("q", "a", "b")
	f.Add("it's", "'", "''")
	f.Fuzz(func(t *testing.T, queue, wanted, found string) {
		for _, s := range []string{queue, wanted, found} {
			if strings.Contains(s, "received") || strings.Contains(s, "current") || strings.Contains(s, " for ") {
				t.Skip()
			}
		}
		text := fmt.Sprintf("inequivalent arg 'x-a' for queue '%s' in vhost '/': received '%s' but current is '%s'", queue, wanted, found)
		got, ok := parseConflict(text)
		require.True(t, ok, text)
		require.Equal(t, Conflict{"x-a", Setting{Value: wanted, Set: true}, Setting{Value: found, Set: true}}, got)
	})
}

// FuzzReply feeds the readers of replies with nested values of every type.
func FuzzReply(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Add([]byte{6, 7, 6, 7, 6, 7, 6, 7, 6, 7})
	f.Fuzz(func(t *testing.T, data []byte) {
		v, _ := value(data, 0)
		info, _ := parseQueueInfo(v)
		if info.Arguments == nil {
			t.Fatal("no arguments")
		}
		for k, a := range replyArguments(v) {
			if _, ok := a.(uint32); ok {
				t.Fatalf("%s isn't normal", k)
			}
		}
		_, _ = listBindings(t.Context(), fixed{v}, opList, Binding{Source: "x", Queue: "q"})
		_, _ = countRequest(t.Context(), fixed{v}, opPurge, "q", "/queues/q/messages")
	})
}

// value builds some value out of data, and returns the rest of it.
func value(data []byte, depth int) (any, []byte) {
	if len(data) == 0 || depth > 20 {
		return nil, nil
	}
	b, data := data[0], data[1:]
	keys := []string{"name", "type", "message_count", "consumer_count", "arguments", "location", "replicas"}
	switch b % 11 {
	case 0:
		return string(data), nil
	case 1:
		return uint32(b), data
	case 2:
		return int8(b), data
	case 3:
		return uint64(b) << 56, data
	case 4:
		return float32(b), data
	case 5:
		return b > 100, data
	case 6:
		v, rest := value(data, depth+1)
		return []any{v, v}, rest
	case 7:
		v, rest := value(data, depth+1)
		return map[string]any{keys[int(b/11)%len(keys)]: v}, rest
	case 8:
		v, rest := value(data, depth+1)
		return map[any]any{keys[int(b/11)%len(keys)]: v, b: v, nil: v}, rest
	case 9:
		return []string{string(data)}, nil
	}
	return nil, data
}

// fixed is a Requester that always answers the same.
type fixed struct{ reply any }

func (f fixed) Request(context.Context, string, string, any) (int, any, error) {
	return 200, f.reply, nil
}
