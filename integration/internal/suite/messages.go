package suite

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/desk"
)

// HostileError has a text that go-amqp would close the connection over: too
// large for a frame, and not UTF-8 where it is cut.
type HostileError struct{}

func (HostileError) Error() string { return strings.Repeat("ÿ", 200_000) + "\xff\xfe" }

// SendPlain sends a message as another system would, with properties that must
// survive.
func (p *Peer) SendPlain(to address.Address, body string) {
	p.t.Helper()
	m := amqp.NewMessage([]byte(body))
	m.Header = &amqp.MessageHeader{Durable: true, Priority: 5}
	m.Properties = &amqp.MessageProperties{
		MessageID: "m-1", CorrelationID: uint64(42), Subject: new("order placed"), To: new("billing"), ReplyTo: new("answers"),
		ContentType: new("application/json"), ContentEncoding: new("identity"), UserID: []byte("guest"),
	}
	m.ApplicationProperties = map[string]any{"tenant": "acme", "weight": 2.5}
	m.Annotations = amqp.Annotations{"x-opt-tenant": "acme"}
	require.IsType(p.t, &amqp.StateAccepted{}, p.Send(to, m))
}

// What hopback takes for granted of RabbitMQ, each pinned by go-amqp alone: a
// release that changes one of these fails here, by name.

func Quorum(name string, dead declare.DeadLetterTarget) declare.QuorumQueue {
	return declare.QuorumQueue{Name: name, DeliveryLimit: declare.Unlimited, DeadLetter: dead}
}

// Load publishes the numbers from 0 to n-1 to a queue, in order.
func Load(t *testing.T, conn *client.Conn, queue string, n int, edit ...func(i int, m *client.Message)) {
	t.Helper()
	p, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	all := make([]*client.Message, n)
	for i := range all {
		all[i] = client.NewMessage([]byte(strconv.Itoa(i)))
		for _, e := range edit {
			e(i, all[i])
		}
	}
	require.NoError(t, p.PublishAll(t.Context(), all))
	require.NoError(t, p.Close(t.Context()))
}

func NewDesk(t *testing.T, s *Site, conn *client.Conn) *desk.Desk {
	t.Helper()
	d, err := desk.New(conn, desk.Config{HTTP: s.API(t)})
	require.NoError(t, err)
	return d
}

// Long says whether the tests run in full size.
func Long() bool { return os.Getenv("HOPBACK_LONG") != "" }

// Sized is a number for every day, or the one of HOPBACK_LONG.
func Sized(everyDay, full int) int {
	if Long() {
		return full
	}
	return everyDay
}
