package client

import (
	"fmt"
	"slices"
	"time"

	"github.com/Azure/go-amqp"
)

// forEver is for tests in which a message may be unanswered as long as they last.
const forEver = 1000 * time.Hour

func numbered(prefix string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return ids
}

// withhold withholds all answers.
func withhold(string, *amqp.Message) amqp.DeliveryState { return nil }

// withholding withholds the answers to messages with one of the ids.
func withholding(ids ...string) func(string, *amqp.Message) amqp.DeliveryState {
	return func(_ string, m *amqp.Message) amqp.DeliveryState {
		if slices.Contains(ids, idOf(m)) {
			return nil
		}
		return &amqp.StateAccepted{}
	}
}

// accepting makes the broker answer again.
func (b *fakeBroker) accepting() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.verdict, b.window = nil, 0
}

// answerOnly answers what is withheld of the messages that pick picks, so that answers come in
// another order than the messages.
func (b *fakeBroker) answerOnly(pick func(id string) bool, state amqp.DeliveryState) {
	b.update(func() {
		b.withheld = slices.DeleteFunc(b.withheld, func(r *fakeReceipt) bool {
			if !pick(idOf(r.msg)) {
				return false
			}
			b.decide(r, state)
			return true
		})
	})
}
