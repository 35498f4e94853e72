package declare

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare/internal/attempt"
	"github.com/hopback/hopback/declare/internal/names"
)

// Persist makes quorum queues that were declared a moment ago survive a crash of the
// broker. Call it after [Apply] and before the first message is published.
//
// A node of RabbitMQ 4.0 to 4.3 writes down which quorum queues it has members of up to
// three seconds after it has answered the declaration. If it is killed before that, the
// queue comes back empty, even if the broker had confirmed messages in it. A clean stop
// loses nothing, and neither does a crash of one node where a majority of the queue's
// members survives. The next declaration of a quorum queue writes down all those before
// it. So Persist declares a quorum queue and deletes it at once, which takes some
// 50 ms. Waiting for four seconds does the same.
//
// The temporary queue's name is prefix and 26 random letters and digits. The user needs the
// permission to configure it. If Persist fails in between, the queue expires after a minute.
//
// The error is an *[argument.Error] for a bad prefix, and an *[Error] if the broker
// refuses or doesn't answer. Then only the wait helps.
func Persist(ctx context.Context, r Requester, prefix string) error {
	if err := errors.Join(checkRequester(r), names.Check(argument.Root("prefix"), prefix)); err != nil {
		return err
	}
	var err error
	for n := range attempt.Max {
		if n > 0 {
			attempt.Pause(ctx, n)
		}
		// A repeated declaration of one name would find the first one's queue, and write nothing.
		q := QuorumQueue{Name: prefix + rand.Text(), Expires: time.Minute, DeadLetter: Drop()}
		if err = q.Validate(); err != nil {
			return err
		}
		_, err = Topology{Queues: []Queue{q}}.Declarations()[0].send(ctx, r)
		if err == nil {
			_, err = deleteQueue(ctx, r, q.Name)
			return err
		}
		if !errors.Is(err, ErrNoReply) || attempt.NotPermitted(err) || ctx.Err() != nil {
			return err
		}
	}
	return err
}
