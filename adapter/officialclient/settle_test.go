package officialclient

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
)

var errDown = errors.New("the service is down")

type hostile struct{}

func (hostile) Error() string { panic("no text") }

func TestCounted(t *testing.T) {
	t.Parallel()
	with := func(v any) *client.Message {
		return &client.Message{Header: &amqp.MessageHeader{DeliveryCount: 4}, Annotations: amqp.Annotations{annotationFailures: v}}
	}
	modified := func(failed, dead bool, known int64, annotations map[string]any) client.Resolution {
		annotations[client.AnnotationKnownCount] = known
		return client.Resolution{Kind: client.ResolutionModify, Failed: failed, DeadLetter: dead, Annotations: annotations}
	}
	failedDelivery := client.Resolve(errDown)
	tooOften := modified(false, true, 5, map[string]any{annotationFailures: int64(0)})
	tooOften.Reason, tooOften.Error = client.ReasonFailureLimit, errDown.Error()
	count := func(n int64) map[string]any { return map[string]any{annotationFailures: n} }
	for name, c := range map[string]struct {
		in    client.Resolution
		m     *client.Message
		limit int
		want  client.Resolution
	}{
		"accepted":                {client.Resolution{Kind: client.ResolutionAccept}, with(int64(9)), 1, client.Resolution{Kind: client.ResolutionAccept}},
		"released":                {client.Resolution{Kind: client.ResolutionRelease}, with(int64(9)), 1, client.Resolution{Kind: client.ResolutionRelease}},
		"bare":                    {client.Resolution{Kind: client.ResolutionModify, DeadLetter: true}, &client.Message{}, 1, client.Resolution{Kind: client.ResolutionModify, DeadLetter: true}},
		"not failed":              {client.Resolution{Kind: client.ResolutionModify}, with(int64(9)), 1, modified(false, false, 5, map[string]any{})},
		"first":                   {failedDelivery, &client.Message{}, 2, modified(true, false, 1, count(1))},
		"last":                    {failedDelivery, with(int64(1)), 2, modified(true, false, 5, count(2))},
		"unlimited":               {failedDelivery, with(int64(1000)), unlimited, modified(true, false, 5, count(1001))},
		"someone's":               {failedDelivery, with("many"), 2, modified(true, false, 5, count(1))},
		"negative":                {failedDelivery, with(int64(-9)), 2, modified(true, false, 5, count(1))},
		"too often":               {failedDelivery, with(int64(2)), 2, tooOften},
		"dead for another reason": {client.Resolution{Kind: client.ResolutionModify, DeadLetter: true}, with(int64(2)), 5, modified(false, true, 5, count(0))},
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
	return d.settled("requeue with " + fmt.Sprint(a[annotationFailures]))
}

func TestSettle(t *testing.T) {
	t.Parallel()
	for want, r := range map[string]client.Resolution{
		"accept":              {Kind: client.ResolutionAccept},
		"requeue":             {Kind: client.ResolutionRelease},
		"discard":             {Kind: client.ResolutionModify, DeadLetter: true},
		"discard with <nil>":  {Kind: client.ResolutionModify, DeadLetter: true, Failed: true},
		"discard with r":      {Kind: client.ResolutionModify, DeadLetter: true, Annotations: map[string]any{client.AnnotationReason: "r"}},
		"requeue with 3":      {Kind: client.ResolutionModify, Failed: true, Annotations: map[string]any{annotationFailures: int64(3)}},
		"requeue with <nil>":  {Kind: client.ResolutionModify},
		"a panic is an error": {Kind: client.ResolutionModify, Annotations: map[string]any{"x-opt-panic": true}},
	} {
		d := newDelivery("m")
		err := settle(d, r)
		if want == "a panic is an error" {
			var p *panicError
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
	assert.Same(t, m, outgoing(m))
	m.Annotations = amqp.Annotations{annotationFailures: int64(3), "x-opt-mine": "kept"}
	c := outgoing(m)
	assert.Equal(t, amqp.Annotations{"x-opt-mine": "kept"}, c.Annotations)
	assert.Len(t, m.Annotations, 2, "the original is left alone")
}

func TestConfig(t *testing.T) {
	t.Parallel()
	c, err := Config{Concurrency: 100}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, 100, c.Concurrency)
	assert.Equal(t, 20, c.FailureLimit)
	for _, bad := range []Config{{Concurrency: -1}, {FailureLimit: -2}, {Grace: -1}, {ForwardPatience: -1}, {RecoveryPatience: -1}} {
		_, err := bad.withDefaults()
		require.Error(t, err)
	}
}
