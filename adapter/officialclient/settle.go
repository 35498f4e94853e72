package officialclient

import (
	"context"
	"maps"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/client"
)

// AnnotationFailures counts the failures of a message that stays in its queue,
// an int64: see Config.FailureLimit. A forwarded copy begins again at none, and so
// does a dead letter, or it would die at its first failure after a replay.
const AnnotationFailures = "x-opt-hopback-failures"

// ReasonFailureLimit: the message has failed more often than Config.FailureLimit.
const ReasonFailureLimit client.Reason = "failure-limit"

// failures is how often m has failed, by its annotation, which anybody may have
// written.
func failures(m *client.Message) int64 {
	n, _ := m.Annotations[AnnotationFailures].(int64)
	return max(n, 0)
}

// counted replaces a failed delivery that would stay in its queue, which the
// official client can't say, by one that carries the count in an annotation, or
// by a dead letter when the limit is reached.
func counted(r resolution, m *client.Message, limit int, cause error) resolution {
	n := failures(m)
	switch {
	case r.do != modify:
		return r
	case r.dead && n == 0:
		return r
	case r.dead:
		r.annotations = with(r.annotations, AnnotationFailures, int64(0))
		return r
	case !r.failed:
		return r
	}
	if limit != UnlimitedFailures && n >= int64(limit) {
		dead := deadLetter(client.DeadLetter{Reason: ReasonFailureLimit, Err: cause, Annotations: r.annotations})
		if dead.refused == nil {
			dead.refused = r.refused
		}
		dead.annotations = with(dead.annotations, AnnotationFailures, int64(0))
		return dead
	}
	r.annotations = with(r.annotations, AnnotationFailures, n+1)
	return r
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
func settle(d rabbitmqamqp.IDeliveryContext, r resolution) error {
	ctx := context.Background()
	_, err := guarded("settle", func() (struct{}, error) {
		switch {
		case r.do == accept:
			return struct{}{}, d.Accept(ctx)
		case r.do == release:
			return struct{}{}, d.Requeue(ctx)
		case r.dead && !r.failed && len(r.annotations) == 0:
			return struct{}{}, d.Discard(ctx, nil)
		case r.dead:
			return struct{}{}, d.DiscardWithAnnotations(ctx, toAnnotations(r.annotations))
		default:
			return struct{}{}, d.RequeueWithAnnotations(ctx, toAnnotations(r.annotations))
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
