package declare

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/names"
)

// Persist makes newly declared quorum queues survive a crash of the broker. Call it after [Apply]
// and before the first message is published, if you publish at once.
//
// A node of RabbitMQ 4.0 to 4.3 records which quorum queues it has members of up to three seconds
// after it has answered the declaration. If the node is killed before that, the queue comes back
// empty, even if the broker had confirmed messages in it. A clean stop loses nothing, and neither
// does a crash of one node if a majority of the queue's members survives. The next declaration of
// a quorum queue records all those before it. So Persist declares a temporary quorum queue and
// deletes it at once, which takes some 50 ms. Waiting for four seconds has the same effect.
//
// The error is an *[argument.Error] for an invalid prefix, and an *[Error] if the broker refuses
// or doesn't answer. In the latter case, wait instead.
//
//   - The temporary queue's name is prefix and 26 random letters and digits. The user needs the
//     permission to configure it.
//   - If Persist fails between the two requests, the queue expires after a minute.
func Persist(ctx context.Context, r Requester, prefix string) error {
	if err := errors.Join(checkRequester(r), names.Check(argument.Root("prefix"), prefix)); err != nil {
		return err
	}
	var err error
	for n := range backoff.MaxRequests {
		if n > 0 {
			backoff.PauseRequest(ctx, n)
		}
		// A repeated declaration of one name would find the first one's queue, and record
		// nothing.
		q := QuorumQueue{Name: prefix + rand.Text(), Expires: time.Minute, DeadLetter: Drop()}
		if err = q.Validate(); err != nil {
			return err
		}
		_, err = Topology{Queues: []Queue{q}}.Declarations()[0].send(ctx, r)
		if err == nil {
			_, err = deleteQueue(ctx, r, q.Name)
			return err
		}
		if !errors.Is(err, ErrNoReply) || condition.NotPermitted(err) || ctx.Err() != nil {
			return err
		}
	}
	return err
}
