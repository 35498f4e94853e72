package officialclient

import (
	"context"
	"errors"
	"maps"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/client"
)

// annotationFailures counts the failures of a message that stays in its queue, an int64:
// see Config.FailureLimit. A forwarded copy and a dead letter start again without it.
// Otherwise a replayed message would be dead-lettered again at its first failure.
const annotationFailures = "x-opt-hopback-failures"

// failures is how often m has failed, by its annotation, which anybody may have
// written.
func failures(m *client.Message) int64 {
	n, _ := m.Annotations[annotationFailures].(int64)
	return max(n, 0)
}

// counted completes the resolution of a delivery of m. A failed delivery that
// would stay in its queue, which the official client can't say, becomes one that
// carries its count in an annotation, or a dead letter at the limit.
func counted(r client.Resolution, m *client.Message, limit int, cause error) client.Resolution {
	if r.Kind != client.ResolutionModify {
		return r
	}
	n := failures(m)
	switch {
	case r.DeadLetter && n > 0:
		r.Annotations = with(r.Annotations, annotationFailures, int64(0))
	case r.Failed && !r.DeadLetter && limit != unlimited && n >= int64(limit):
		dead := client.Resolve(client.DeadLetter{Reason: client.ReasonFailureLimit, Err: cause, Annotations: r.Annotations})
		dead.Annotations = with(dead.Annotations, annotationFailures, int64(0))
		dead.Refused = errors.Join(r.Refused, dead.Refused)
		r = dead
	case r.Failed && !r.DeadLetter:
		r.Annotations = with(r.Annotations, annotationFailures, n+1)
	}
	if bare(r) {
		return r
	}
	// The broker may count this delivery. Package client's consumer treats a
	// message with unreported failures as one that crashes workers.
	count := int64(1)
	if m.Header != nil {
		count += int64(m.Header.DeliveryCount)
	}
	r.Annotations = with(r.Annotations, client.AnnotationKnownCount, count)
	return r
}

// bare says whether a dead letter can be sent without "modified".
func bare(r client.Resolution) bool {
	return r.DeadLetter && !r.Failed && len(r.Annotations) == 0 && r.Reason == "" && r.Error == ""
}

func with(annotations map[string]any, key string, value any) map[string]any {
	all := make(map[string]any, len(annotations)+1)
	maps.Copy(all, annotations)
	all[key] = value
	return all
}

// settle sends a resolution other than forward. A nil error means that it was
// written, not that the broker has it: AMQP has no answer to a settlement.
//
// Its context has no deadline: go-amqp would make one into a write deadline,
// whose end closes the connection.
func settle(d rabbitmqamqp.IDeliveryContext, r client.Resolution) error {
	ctx := context.Background()
	_, err := guarded("settle", func() (struct{}, error) {
		switch {
		case r.Kind == client.ResolutionAccept:
			return struct{}{}, d.Accept(ctx)
		case r.Kind == client.ResolutionRelease:
			return struct{}{}, d.Requeue(ctx)
		case bare(r):
			return struct{}{}, d.Discard(ctx, nil)
		case r.DeadLetter:
			return struct{}{}, d.DiscardWithAnnotations(ctx, toAnnotations(r.AllAnnotations()))
		default:
			return struct{}{}, d.RequeueWithAnnotations(ctx, toAnnotations(r.AllAnnotations()))
		}
	})
	return err
}

func toAnnotations(m map[string]any) amqp.Annotations {
	a := make(amqp.Annotations, len(m))
	for k, v := range m {
		a[k] = v
	}
	return a
}
