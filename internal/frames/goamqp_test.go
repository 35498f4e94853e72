package frames

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// smallBroker answers what a client needs for a session with a sender and a receiver,
// accepts what it is sent, and delivers n messages. It notes the frames that come, as
// they are and decoded.
type smallBroker struct {
	net.Conn
	n      uint32
	raw    chan []byte // dispositions
	frames []Frame
}

func (s *smallBroker) write(f Frame) error {
	b, err := Append(nil, f)
	if err == nil {
		_, err = s.Conn.Write(b)
	}
	return err
}

func (s *smallBroker) serve() error {
	r := NewReader(s.Conn, 64<<10, 1<<20)
	for {
		if p, err := r.AwaitProtocol(); err == nil {
			if _, err := s.Conn.Write(p.Header()); err != nil {
				return err
			}
			if p == ProtocolSASL {
				if err := s.write(Frame{Type: TypeSASL, Body: &Mechanisms{Mechanisms: []Symbol{"PLAIN"}}}); err != nil {
					return err
				}
			}
			continue
		}
		raw, err := r.Next()
		for ; raw == nil && err == nil; raw, err = r.Next() {
			if err := r.Fill(); err != nil {
				return nil // the client is gone
			}
		}
		if err != nil {
			return err
		}
		raw = bytes.Clone(raw)
		f, err := Decode(raw)
		if err != nil {
			return fmt.Errorf("%x: %w", raw, err)
		}
		s.frames = append(s.frames, f)
		var answers []Performative
		switch b := f.Body.(type) {
		case *Init:
			if err := s.write(Frame{Type: TypeSASL, Body: &Outcome{}}); err != nil {
				return err
			}
			continue
		case *Open:
			answers = append(answers, &Open{ContainerID: "b", MaxFrameSize: Some[uint32](4096)})
		case *Begin:
			answers = append(answers, &Begin{RemoteChannel: Some(f.Channel), IncomingWindow: 5000, OutgoingWindow: 5000})
		case *Attach:
			answers = append(answers, &Attach{Name: b.Name, Handle: b.Handle, Role: !b.Role, SenderSettleMode: b.SenderSettleMode, ReceiverSettleMode: b.ReceiverSettleMode, Source: b.Source, Target: b.Target, InitialDeliveryCount: Some[uint32](0)})
			if b.Role == RoleSender {
				answers = append(answers, &Flow{NextIncomingID: Some[uint32](0), IncomingWindow: 5000, OutgoingWindow: 5000, Handle: Some(b.Handle), DeliveryCount: Some[uint32](0), LinkCredit: Some[uint32](100)})
			}
		case *Flow:
			for id := range s.n {
				err := s.write(Frame{Body: &Transfer{Handle: b.Handle.Value, DeliveryID: Some(id), DeliveryTag: []byte{byte(id)}, MessageFormat: Some[uint32](0)}, Payload: []byte{0, 0x53, 0x75, 0xa0, 1, 'm'}})
				if err != nil {
					return err
				}
			}
			s.n = 0
		case *Transfer:
			if !b.More {
				answers = append(answers, &Disposition{Role: RoleReceiver, First: 0, Settled: Some(true), State: &Accepted{}})
			}
		case *Disposition:
			s.raw <- raw
		case *Detach:
			answers = append(answers, &Detach{Handle: b.Handle, Closed: true})
		case *End:
			answers = append(answers, &End{})
		case *Close:
			err := s.write(Frame{Body: &Close{}})
			if errors.Is(err, io.ErrClosedPipe) {
				err = nil // go-amqp doesn't have to wait for it
			}
			return err
		}
		for _, a := range answers {
			if err := s.write(Frame{Channel: f.Channel, Body: a}); err != nil {
				return err
			}
		}
	}
}

// What go-amqp writes is read as what it means. Its users connect to hopbacktest's server.
func TestFramesOfGoAMQPAreRead(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	const n = 4
	broker := &smallBroker{Conn: theirs, n: n, raw: make(chan []byte, n)}
	ended := make(chan error, 1)
	go func() { ended <- broker.serve() }()
	ctx := t.Context()
	conn, err := amqp.NewConn(ctx, ours, &amqp.ConnOptions{SASLType: amqp.SASLTypePlain("user", "secret"), HostName: "vhost:/", ContainerID: "c", Properties: map[string]any{"product": "p"}})
	require.NoError(t, err)
	s, err := conn.NewSession(ctx, nil)
	require.NoError(t, err)
	receiver, err := s.NewReceiver(ctx, "/queues/q", &amqp.ReceiverOptions{Credit: -1, Filters: []amqp.LinkFilter{amqp.NewSelectorFilter("a = 1")}})
	require.NoError(t, err)
	require.NoError(t, receiver.IssueCredit(n))
	for i, settle := range []func(*amqp.Message) error{
		func(m *amqp.Message) error { return receiver.AcceptMessage(ctx, m) },
		func(m *amqp.Message) error { return receiver.ReleaseMessage(ctx, m) },
		func(m *amqp.Message) error {
			return receiver.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{UndeliverableHere: true, Annotations: amqp.Annotations{"x-opt-a": "first", "x-opt-b": int64(2)}})
		},
		func(m *amqp.Message) error {
			return receiver.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{DeliveryFailed: true})
		},
	} {
		m, err := receiver.Receive(ctx, nil)
		require.NoError(t, err)
		require.NoError(t, settle(m))
		f := <-broker.raw
		got, err := Decode(f)
		require.NoError(t, err, "%x", f)
		require.IsType(t, &Disposition{}, got.Body)
		assert.Equal(t, uint32(i), got.Body.(*Disposition).First)
	}
	sender, err := s.NewSender(ctx, "/exchanges/e", &amqp.SenderOptions{SettlementMode: amqp.SenderSettleModeUnsettled.Ptr()})
	require.NoError(t, err)
	body := make([]byte, 5000)
	require.NoError(t, sender.Send(ctx, amqp.NewMessage(body), nil))
	require.NoError(t, sender.Close(ctx))
	require.NoError(t, s.Close(ctx))
	require.NoError(t, conn.Close())
	_ = theirs.Close()
	require.NoError(t, <-ended)

	var payload []byte
	var kinds []string
	for _, f := range broker.frames {
		kinds = append(kinds, fmt.Sprintf("%T", f.Body))
		switch b := f.Body.(type) {
		case *Init:
			assert.Equal(t, &Init{Mechanism: "PLAIN", InitialResponse: []byte("\x00user\x00secret")}, b)
		case *Open:
			assert.Equal(t, "c", b.ContainerID)
			assert.Equal(t, "vhost:/", b.Hostname)
			product, _ := b.Properties.Get("product")
			assert.Equal(t, "p", product)
		case *Attach:
			if b.Role == RoleReceiver {
				assert.Equal(t, "/queues/q", b.Source.Address)
				filter, ok := b.Source.Filter.Get("apache.org:selector-filter:string")
				assert.True(t, ok)
				assert.Equal(t, "a = 1", filter.(Described).Value)
			} else {
				assert.Equal(t, "/exchanges/e", b.Target.(*Target).Address)
				assert.Equal(t, Some[uint8](0), b.SenderSettleMode)
			}
		case *Flow:
			if b.LinkCredit.Or(0) > 0 {
				assert.Equal(t, Some[uint32](n), b.LinkCredit)
				assert.NotZero(t, b.IncomingWindow)
			}
		case *Transfer:
			payload = append(payload, f.Payload...)
			assert.Equal(t, len(payload) < 5000, b.More)
		case *Disposition:
			assert.True(t, b.Settled.Value)
			assert.Equal(t, RoleReceiver, b.Role)
			want := []any{&Accepted{}, &Released{}, nil, &Modified{DeliveryFailed: true}}[b.First]
			if m, ok := b.State.(*Modified); ok && b.First == 2 {
				assert.True(t, m.UndeliverableHere)
				assert.Len(t, m.Annotations, 2)
				v, _ := m.Annotations.Get("x-opt-b")
				assert.Equal(t, int64(2), v)
				continue
			}
			assert.Equal(t, want, b.State)
		case *Detach:
			assert.True(t, b.Closed)
		}
	}
	want, err := amqp.NewMessage(body).MarshalBinary()
	require.NoError(t, err)
	assert.Equal(t, want, payload)
	for _, kind := range []string{"Init", "Open", "Begin", "Attach", "Flow", "Transfer", "Disposition", "Detach", "End", "Close"} {
		assert.Contains(t, kinds, "*frames."+kind)
	}
	_, err = theirs.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.ErrClosedPipe)
}
