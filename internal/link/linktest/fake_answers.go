package linktest

import (
	"fmt"
	"slices"
	"time"

	"github.com/Azure/go-amqp"
)

// ForEver is for tests in which a message may be unanswered as long as they last.
const ForEver = 1000 * time.Hour

func Numbered(prefix string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return ids
}

// Withhold withholds all answers.
func Withhold(string, *amqp.Message) amqp.DeliveryState { return nil }

// Withholding withholds the answers to messages with one of the ids.
func Withholding(ids ...string) func(string, *amqp.Message) amqp.DeliveryState {
	return func(_ string, m *amqp.Message) amqp.DeliveryState {
		if slices.Contains(ids, IDOf(m)) {
			return nil
		}
		return &amqp.StateAccepted{}
	}
}

// Accepting makes the broker answer again.
func (b *FakeBroker) Accepting() {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.Verdict, b.Window = nil, 0
}

// AnswerOnly answers what is withheld of the messages that pick picks, so that answers come in
// another order than the messages.
func (b *FakeBroker) AnswerOnly(pick func(id string) bool, state amqp.DeliveryState) {
	b.Update(func() {
		b.Withheld = slices.DeleteFunc(b.Withheld, func(r *fakeReceipt) bool {
			if !pick(IDOf(r.msg)) {
				return false
			}
			b.decide(r, state)
			return true
		})
	})
}

// Unanswered returns the ids of the messages whose answers are withheld, and can still be given.
func (b *FakeBroker) Unanswered() (ids []string) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.Withheld = slices.DeleteFunc(b.Withheld, func(r *fakeReceipt) bool { return r.link.err != nil })
	for _, r := range b.Withheld {
		ids = append(ids, IDOf(r.msg))
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// KillLater returns a function that ends every link that there is now with err, and no later one.
func (b *FakeBroker) KillLater(err error) func() {
	b.Mu.Lock()
	now := slices.Clone(b.Sessions)
	b.Mu.Unlock()
	return func() {
		b.Update(func() {
			b.Log("link lost")
			for _, s := range now {
				s.End(err)
			}
		})
	}
}
