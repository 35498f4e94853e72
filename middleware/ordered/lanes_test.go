package ordered

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
)

func TestNothingIsKeptForAKeyThatIsIdle(t *testing.T) {
	t.Parallel()
	var l turns
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			k := laneKey{"orders", fmt.Sprint(i % 10)}
			ctx, cancel := context.WithCancel(t.Context())
			if i%3 == 0 {
				cancel()
			}
			defer cancel()
			if l.enter(ctx, k, client.NewDelivery("orders", client.NewMessage(nil))) == nil {
				l.leave(k)
			}
		})
	}
	wg.Wait()
	assert.Zero(t, l.lanes.Len())
}
