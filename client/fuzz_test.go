package client

import (
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"
)

// A reply of the management's with anything in it answers the one request that it is
// for, once.
func FuzzManagementReply(f *testing.F) {
	f.Add("200", uint64(1), uint(0), "body")
	f.Add("-1", uint64(2), uint(1), "")
	f.Add(strings.Repeat("9", 100), uint64(1), uint(4), "\xff")
	f.Fuzz(func(t *testing.T, subject string, id uint64, kind uint, body string) {
		s := &managementSession{waiting: map[uint64]*waiting{}}
		w := &waiting{reply: make(chan managementReply, 1), release: func() {}}
		require.True(t, s.enter(1, w))
		m := &Message{Properties: &amqp.MessageProperties{Subject: &subject}}
		switch kind % 5 {
		case 0:
			m.Properties.CorrelationID = id
		case 1:
			m.Properties.CorrelationID = body
		case 2:
			m.Properties = nil
		case 3:
			m.Properties.CorrelationID, m.Properties.Subject = id, nil
		case 4:
			m.Properties.CorrelationID, m.Value = id, map[any]any{body: []any{id}}
		}
		s.dispatch(m)
		s.dispatch(m) // nobody waits any more
		select {
		case r := <-w.reply:
			require.EqualValues(t, 1, id)
			require.True(t, r.err != nil || r.status >= 100 && r.status <= 999)
		default:
			require.True(t, id != 1 || kind%5 == 1 || kind%5 == 2)
		}
	})
}
