package client

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"

	"github.com/hopback/hopback/internal/link"
)

// embeds satisfies Outcome without being one.
type embeds struct{ DeadLetter }

type hostileText struct{}

func (hostileText) Error() string { panic("no text") }

var errServiceDown = errors.New("the service is down")

func TestResolve(t *testing.T) {
	t.Parallel()
	modify := func(r Resolution) Resolution {
		r.Kind = ResolutionModify
		return r
	}
	failed := modify(Resolution{Failed: true})
	given := map[string]any{"x-opt-a": 1}
	for name, c := range map[string]struct {
		err     error
		want    Resolution
		refused string
	}{
		"nil":              {nil, Resolution{Kind: ResolutionAccept}, ""},
		"an error":         {errServiceDown, failed, ""},
		"requeue":          {Requeue{Err: errServiceDown}, Resolution{Kind: ResolutionRelease}, ""},
		"requeue failed":   {Requeue{Failed: true}, failed, ""},
		"wrapped":          {fmt.Errorf("so: %w", Requeue{}), Resolution{Kind: ResolutionRelease}, ""},
		"dead letter":      {DeadLetter{Reason: "r", Err: errServiceDown}, modify(Resolution{DeadLetter: true, Reason: "r", Error: errServiceDown.Error()}), ""},
		"bare dead letter": {DeadLetter{}, modify(Resolution{DeadLetter: true}), ""},
		"modify":           {Modify{Annotations: given}, modify(Resolution{Annotations: given}), ""},
		"modify dead":      {Modify{DeadLetter: true, Failed: true}, modify(Resolution{DeadLetter: true, Failed: true}), ""},

		"null":       {Modify{Annotations: map[string]any{"x-opt-a": nil}}, failed, "poison"},
		"float":      {Modify{DeadLetter: true, Annotations: map[string]any{"x-opt-a": []any{1.5}}}, failed, "poison"},
		"short key":  {Modify{Annotations: map[string]any{"x": 1}}, failed, "x-"},
		"empty key":  {Modify{Annotations: map[string]any{"": 1}}, failed, "x-"},
		"odd type":   {Modify{Annotations: map[string]any{"x-opt-a": struct{}{}}}, failed, "type"},
		"too large":  {Modify{Annotations: map[string]any{"x-opt-a": strings.Repeat("a", 70_000)}}, failed, "bytes"},
		"bad string": {Modify{Annotations: map[string]any{"x-opt-a": "\xff"}}, failed, "UTF-8"},
		"dead letter with a null": {DeadLetter{Reason: "r", Err: errServiceDown, Annotations: map[string]any{"x-opt-a": nil}},
			modify(Resolution{DeadLetter: true, Reason: "r", Error: errServiceDown.Error()}), "poison"},
		"hostile error": {DeadLetter{Reason: "r", Err: hostileText{}},
			modify(Resolution{DeadLetter: true, Reason: "r", Error: "client.hostileText (its Error method panicked)"}), ""},
		"long error": {DeadLetter{Reason: "r", Err: errors.New(strings.Repeat("é", 1000))},
			modify(Resolution{DeadLetter: true, Reason: "r", Error: strings.Repeat("é", 512)}), ""},
		"long reason": {DeadLetter{Reason: Reason(strings.Repeat("é", 1000))}, modify(Resolution{DeadLetter: true, Reason: Reason(strings.Repeat("é", 127))}), ""},

		"pointer":     {&Requeue{}, Resolution{Kind: ResolutionRelease}, ""},
		"nil pointer": {(*DeadLetter)(nil), failed, ""},
		"embedded":    {embeds{}, modify(Resolution{DeadLetter: true}), ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := Resolve(c.err)
			if c.refused == "" {
				require.NoError(t, got.Refused)
			} else {
				require.ErrorContains(t, got.Refused, c.refused)
			}
			got.Refused = nil
			assert.Equal(t, c.want, got)
			all := map[string]any{}
			for key, v := range got.AllAnnotations() {
				all[key] = v
			}
			assert.NoError(t, checkModified(all), "what comes out can be sent")
		})
	}
}

func TestResolveForward(t *testing.T) {
	t.Parallel()
	given := map[string]any{"x-opt-a": 1}
	f := Forward{To: address.Queue("q"), Message: NewMessage([]byte("m")), Err: errServiceDown, Annotations: given}
	assert.Equal(t, Resolution{Kind: ResolutionForward, Forward: f}, Resolve(f))
	assert.Equal(t, Resolution{Kind: ResolutionForward, Forward: f}, Resolve(&f))
	for name, bad := range map[string]Forward{
		"no message": {To: address.Queue("q")},
		"no body":    {To: address.Queue("q"), Message: &Message{}},
		"no address": {Message: f.Message},
	} {
		r := Resolve(bad)
		require.Error(t, r.Refused, name)
		assert.True(t, r.DeadLetter && !r.Failed, name)
		assert.Equal(t, ReasonUnforwardable, r.Reason, name)
		bad.Else = Requeue{}
		r = Resolve(bad)
		require.Error(t, r.Refused, name)
		assert.Equal(t, ResolutionRelease, r.Kind, name)
	}

	why := errors.New("too large")
	r := f.Unsendable(why)
	assert.True(t, r.DeadLetter && !r.Failed)
	require.ErrorIs(t, r.Refused, why)
	assert.Equal(t, map[string]any{"x-opt-a": 1, AnnotationReason: "unforwardable", AnnotationError: "too large\nthe service is down"}, r.AllAnnotations())
	assert.Equal(t, map[string]any{"x-opt-a": 1}, given, "the handler's map is left alone")
	f.Else = Modify{Annotations: map[string]any{"x-opt-a": nil}}
	r = f.Unsendable(why)
	assert.True(t, r.Failed && !r.DeadLetter)
	require.ErrorIs(t, r.Refused, why)
	require.ErrorContains(t, r.Refused, "poison", "both are reported")

	r = f.Unaccepted(why)
	assert.True(t, r.Failed && !r.DeadLetter)
	require.NoError(t, r.Refused)
	assert.Equal(t, ReasonUnforwardable, r.Reason)
	f.Annotations = map[string]any{"x-opt-a": 1.5}
	r = f.Unaccepted(why)
	require.ErrorContains(t, r.Refused, "poison")
	assert.Equal(t, map[string]any{AnnotationReason: "unforwardable", AnnotationError: "too large\nthe service is down"}, r.AllAnnotations())
}

// What the consumer settles is what Resolve says, with every annotation.
func TestConsumerSettlesWhatResolveSays(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{
		"nil": nil, "requeue": Requeue{}, "failed": errServiceDown, "modify": Modify{Annotations: map[string]any{"x-opt-a": 1}}, "modify dead": Modify{DeadLetter: true},
		"dead letter": DeadLetter{Reason: "r", Err: errServiceDown, Annotations: map[string]any{"x-opt-a": "b"}}, "null": DeadLetter{Annotations: map[string]any{"x-opt-a": nil}},
		"no copy": Forward{}, "no copy, else": Forward{Else: Requeue{}},
	} {
		r, got := Resolve(err), settledWith(t, err)
		want := link.Disposition{Kind: map[ResolutionKind]link.DispositionKind{ResolutionAccept: link.DispositionAccepted, ResolutionRelease: link.DispositionReleased, ResolutionModify: link.DispositionModified}[r.Kind], Failed: r.Failed, Dead: r.DeadLetter}
		for key, v := range r.AllAnnotations() {
			if want.Annotations == nil {
				want.Annotations = amqp.Annotations{}
			}
			want.Annotations[key] = v
		}
		delete(got.Annotations, AnnotationKnownCount)
		if len(got.Annotations) == 0 {
			got.Annotations = nil
		}
		assert.Equal(t, want, got, name)
	}
}
