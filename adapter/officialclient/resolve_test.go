package officialclient

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

var errDown = errors.New("the service is down")

// embedded satisfies client.Outcome without being one.
type embedded struct{ client.DeadLetter }

type hostile struct{}

func (hostile) Error() string { panic("no text") }

func TestResolve(t *testing.T) {
	t.Parallel()
	reason := func(r client.Reason, text string) map[string]any {
		return map[string]any{client.AnnotationReason: string(r), client.AnnotationError: text}
	}
	for name, c := range map[string]struct {
		err     error
		want    resolution
		refused string
	}{
		"nil":              {nil, resolution{do: accept}, ""},
		"an error":         {errDown, failedDelivery, ""},
		"requeue":          {client.Requeue{Err: errDown}, resolution{do: release}, ""},
		"requeue failed":   {client.Requeue{Failed: true}, failedDelivery, ""},
		"wrapped":          {fmt.Errorf("so: %w", client.Requeue{}), resolution{do: release}, ""},
		"dead letter":      {client.DeadLetter{Reason: "r", Err: errDown}, resolution{do: modify, dead: true, annotations: reason("r", errDown.Error())}, ""},
		"bare dead letter": {client.DeadLetter{}, resolution{do: modify, dead: true, annotations: map[string]any{}}, ""},
		"modify":           {client.Modify{Annotations: map[string]any{"x-opt-a": 1}}, resolution{do: modify, annotations: map[string]any{"x-opt-a": 1}}, ""},
		"modify dead":      {client.Modify{DeadLetter: true, Failed: true}, resolution{do: modify, dead: true, failed: true}, ""},

		"null":       {client.Modify{Annotations: map[string]any{"x-opt-a": nil}}, failedDelivery, "poison"},
		"float":      {client.Modify{DeadLetter: true, Annotations: map[string]any{"x-opt-a": []any{1.5}}}, failedDelivery, "poison"},
		"short key":  {client.Modify{Annotations: map[string]any{"x": 1}}, failedDelivery, "x-"},
		"empty key":  {client.Modify{Annotations: map[string]any{"": 1}}, failedDelivery, "x-"},
		"odd type":   {client.Modify{Annotations: map[string]any{"x-opt-a": struct{}{}}}, failedDelivery, "type"},
		"too large":  {client.Modify{Annotations: map[string]any{"x-opt-a": strings.Repeat("a", 70_000)}}, failedDelivery, "bytes"},
		"bad string": {client.Modify{Annotations: map[string]any{"x-opt-a": "\xff"}}, failedDelivery, "UTF-8"},
		"dead letter with a null": {client.DeadLetter{Reason: "r", Err: errDown, Annotations: map[string]any{"x-opt-a": nil}},
			resolution{do: modify, dead: true, annotations: reason("r", errDown.Error())}, "poison"},
		"hostile error": {client.DeadLetter{Reason: "r", Err: hostile{}},
			resolution{do: modify, dead: true, annotations: reason("r", "officialclient.hostile (its Error method panicked)")}, ""},
		"long error": {client.DeadLetter{Reason: "r", Err: errors.New(strings.Repeat("é", 1000))},
			resolution{do: modify, dead: true, annotations: reason("r", strings.Repeat("é", 512))}, ""},

		"pointer":     {&client.Requeue{}, resolution{do: release}, ""},
		"nil pointer": {(*client.DeadLetter)(nil), failedDelivery, ""},
		"embedded":    {embedded{}, resolution{do: modify, dead: true, annotations: map[string]any{}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := resolve(c.err)
			if c.refused == "" {
				require.NoError(t, got.refused)
			} else {
				require.ErrorContains(t, got.refused, c.refused)
			}
			got.refused = nil
			assert.Equal(t, c.want, got)
		})
	}
}

func TestResolveForward(t *testing.T) {
	t.Parallel()
	f := client.Forward{To: address.Queue("q"), Message: client.NewMessage(nil), Err: errDown}
	f.Message.Data = [][]byte{{}}
	assert.Equal(t, resolution{do: forward, copy: f}, resolve(f))
	assert.Equal(t, resolution{do: forward, copy: f}, resolve(&f))
	for name, bad := range map[string]client.Forward{
		"no message": {To: address.Queue("q")},
		"no body":    {To: address.Queue("q"), Message: &client.Message{}},
		"no address": {Message: f.Message},
	} {
		r := resolve(bad)
		require.Error(t, r.refused, name)
		assert.True(t, r.dead, name)
		assert.Equal(t, string(client.ReasonUnforwardable), r.annotations[client.AnnotationReason], name)
	}
}

func TestCounted(t *testing.T) {
	t.Parallel()
	with := func(v any) *client.Message {
		return &client.Message{Header: &amqp.MessageHeader{DeliveryCount: 4}, Annotations: amqp.Annotations{AnnotationFailures: v}}
	}
	modified := func(failed, dead bool, known int64, annotations map[string]any) resolution {
		annotations[client.AnnotationKnownCount] = known
		return resolution{do: modify, failed: failed, dead: dead, annotations: annotations}
	}
	count := func(n int64) map[string]any { return map[string]any{AnnotationFailures: n} }
	for name, c := range map[string]struct {
		in    resolution
		m     *client.Message
		limit int
		want  resolution
	}{
		"accepted":   {resolution{do: accept}, with(int64(9)), 1, resolution{do: accept}},
		"released":   {resolution{do: release}, with(int64(9)), 1, resolution{do: release}},
		"bare":       {resolution{do: modify, dead: true}, &client.Message{}, 1, resolution{do: modify, dead: true}},
		"not failed": {resolution{do: modify}, with(int64(9)), 1, modified(false, false, 5, map[string]any{})},
		"first":      {failedDelivery, &client.Message{}, 2, modified(true, false, 1, count(1))},
		"last":       {failedDelivery, with(int64(1)), 2, modified(true, false, 5, count(2))},
		"unlimited":  {failedDelivery, with(int64(1000)), UnlimitedFailures, modified(true, false, 5, count(1001))},
		"someone's":  {failedDelivery, with("many"), 2, modified(true, false, 5, count(1))},
		"negative":   {failedDelivery, with(int64(-9)), 2, modified(true, false, 5, count(1))},
		"too often": {failedDelivery, with(int64(2)), 2, modified(false, true, 5, map[string]any{
			AnnotationFailures: int64(0), client.AnnotationReason: string(ReasonFailureLimit), client.AnnotationError: errDown.Error()})},
		"dead for another reason": {resolution{do: modify, dead: true}, with(int64(2)), 5, modified(false, true, 5, count(0))},
	} {
		assert.Equal(t, c.want, counted(c.in, c.m, c.limit, errDown), name)
	}
}

// settledDelivery records how it was settled.
type settledDelivery struct {
	m   *client.Message
	did chan string
	err error
}

func newDelivery(id string) *settledDelivery {
	m := client.NewMessage([]byte("body"))
	m.Properties.MessageID = id
	return &settledDelivery{m: m, did: make(chan string, 10)}
}

func (d *settledDelivery) Message() *amqp.Message    { return d.m }
func (d *settledDelivery) settled(what string) error { d.did <- what; return d.err }
func (d *settledDelivery) Accept(context.Context) error {
	return d.settled("accept")
}
func (d *settledDelivery) Discard(context.Context, *amqp.Error) error { return d.settled("discard") }
func (d *settledDelivery) DiscardWithAnnotations(_ context.Context, a amqp.Annotations) error {
	return d.settled("discard with " + fmt.Sprint(a[client.AnnotationReason]))
}
func (d *settledDelivery) Requeue(context.Context) error { return d.settled("requeue") }
func (d *settledDelivery) RequeueWithAnnotations(_ context.Context, a amqp.Annotations) error {
	if a["x-opt-panic"] != nil {
		panic("as the official client does")
	}
	return d.settled("requeue with " + fmt.Sprint(a[AnnotationFailures]))
}

func TestSettle(t *testing.T) {
	t.Parallel()
	for want, r := range map[string]resolution{
		"accept":              {do: accept},
		"requeue":             {do: release},
		"discard":             {do: modify, dead: true},
		"discard with <nil>":  {do: modify, dead: true, failed: true},
		"discard with r":      {do: modify, dead: true, annotations: map[string]any{client.AnnotationReason: "r"}},
		"requeue with 3":      {do: modify, failed: true, annotations: map[string]any{AnnotationFailures: int64(3)}},
		"requeue with <nil>":  {do: modify},
		"a panic is an error": {do: modify, annotations: map[string]any{"x-opt-panic": true}},
	} {
		d := newDelivery("m")
		err := settle(d, r)
		if want == "a panic is an error" {
			var p *PanicError
			require.ErrorAs(t, err, &p)
			assert.Equal(t, "settle", p.Call)
			continue
		}
		require.NoError(t, err, want)
		assert.Equal(t, want, <-d.did)
	}
}

func TestOutgoing(t *testing.T) {
	t.Parallel()
	m := client.NewMessage([]byte("body"))
	m.Header = nil
	m.Annotations = amqp.Annotations{AnnotationFailures: int64(3), "x-opt-mine": "kept"}
	c := outgoing(m)
	assert.Equal(t, &amqp.MessageHeader{Durable: true, Priority: 4}, c.Header)
	assert.Equal(t, amqp.Annotations{"x-opt-mine": "kept"}, c.Annotations)
	assert.Nil(t, m.Header, "the original is left alone")
	assert.Len(t, m.Annotations, 2)
}

func TestAnswer(t *testing.T) {
	t.Parallel()
	to := address.Queue("q")
	require.NoError(t, answer(to, &rabbitmqamqp.StateAccepted{}))
	require.ErrorIs(t, answer(to, &rabbitmqamqp.StateReleased{}), client.ErrUnroutable)
	require.ErrorIs(t, answer(to, &rabbitmqamqp.StateRejected{}), client.ErrRefused)
	require.ErrorContains(t, answer(to, &rabbitmqamqp.StateRejected{Error: &amqp.Error{Description: "full"}}), "full")
	require.ErrorIs(t, answer(to, &rabbitmqamqp.StateModified{}), client.ErrRefused)
	require.ErrorIs(t, answer(to, nil), client.ErrRefused)
}

func TestOnlyLink(t *testing.T) {
	t.Parallel()
	remote := &amqp.Error{Condition: amqp.ErrCondNotFound}
	for _, c := range []struct {
		err  error
		want bool
	}{
		{remote, true},
		{&amqp.LinkError{RemoteErr: remote}, true},
		{newError("forward", "q", nil, &amqp.LinkError{}), true},
		{&amqp.SessionError{RemoteErr: remote}, false},
		{fmt.Errorf("so: %w", &amqp.ConnError{RemoteErr: remote}), false},
		{errDown, false},
		{context.DeadlineExceeded, false},
	} {
		assert.Equal(t, c.want, onlyLink(c.err), "%T", c.err)
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	c, err := Config{Concurrency: 100}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, 200, c.Prefetch)
	assert.Equal(t, 20, c.FailureLimit)
	assert.Equal(t, client.ReconnectBackoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}, c.Reconnect)
	for _, bad := range []Config{{Concurrency: -1}, {Prefetch: maxPrefetch + 1}, {FailureLimit: -2}, {Grace: -1}, {ForwardPatience: -1}, {RecoveryPatience: -1}, {Reconnect: client.ReconnectBackoff{Min: -1}}} {
		_, err := bad.withDefaults()
		require.Error(t, err)
	}
	for failures := range 100 {
		assert.LessOrEqual(t, pauseBefore(client.ReconnectBackoff{Min: time.Millisecond, Max: time.Second}, failures), time.Second)
	}
}
