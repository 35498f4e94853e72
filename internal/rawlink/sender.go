package rawlink

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// maxSenders is how many addresses a Conn keeps links to.
const maxSenders = 100

// Send sends an encoded message to target, an address. It returns when the message is
// handed to the network. tell is called with nil once the broker has accepted it, and
// with the broker's answer or a [LostError] otherwise. It is called exactly once if Send
// returns nil, and never if not. It must not block, and may be called before Send
// returns.
//
// An error is a *RefusedError if the broker refuses the address alone. The connection has
// ended then on RabbitMQ 4.0. Send is for one goroutine at a time.
func (c *Conn) Send(ctx context.Context, target string, payload []byte, tell func(error)) error {
	l, err := c.sender(ctx, target)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	may := func() bool {
		return l.gone != nil || l.credit > 0 && c.peerWindow > 0 && len(c.unwritten) < maxUnwritten
	}
	if err := c.awaitLocked(ctx, may); err != nil {
		return err
	}
	if c.err != nil {
		return c.err
	}
	if l.gone != nil {
		return l.gone
	}
	id := c.nextID
	c.nextID++
	l.credit--
	l.deliveryCount++
	l.open++
	c.unconfirmed[id] = unconfirmed{l, tell}
	room := int(c.peerFrame) - 64 // a transfer without its payload takes less
	t := &frames.Transfer{Handle: l.handle, DeliveryID: frames.Some(id), DeliveryTag: binary.BigEndian.AppendUint32(nil, id), MessageFormat: frames.Some(uint32(0)), Settled: frames.Some(false)}
	for {
		part := payload[:min(room, len(payload))]
		payload = payload[len(part):]
		t.More = len(payload) > 0
		c.nextOut++
		c.peerWindow--
		c.put(t, part)
		if !t.More {
			return nil
		}
		t = &frames.Transfer{Handle: l.handle}
		// A message that has begun is sent to its end: half of one would block its link. The
		// end of the connection ends the wait.
		err := c.awaitLocked(context.Background(), func() bool { return l.gone != nil || c.peerWindow > 0 && len(c.unwritten) < maxUnwritten })
		if err != nil || l.gone != nil {
			return nil // tell was called, or will be
		}
	}
}

// sender returns the link to target.
func (c *Conn) sender(ctx context.Context, target string) (*link, error) {
	c.mu.Lock()
	if l := c.senders[target]; l != nil {
		l.used = time.Now()
		c.mu.Unlock()
		return l, nil
	}
	if len(c.senders) >= maxSenders {
		if err := c.awaitLocked(ctx, c.dropIdle); err != nil {
			c.mu.Unlock()
			return nil, err
		}
	}
	c.mu.Unlock()
	l := &link{sender: true, target: target, used: time.Now()}
	if err := c.attach(ctx, l, &frames.Attach{
		Role: frames.RoleSender, SenderSettleMode: frames.Some(uint8(0)), ReceiverSettleMode: frames.Some(uint8(0)),
		Source: &frames.Source{}, Target: &frames.Target{Address: target}, InitialDeliveryCount: frames.Some(uint32(0)),
	}); err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.senders[target] = l
	c.mu.Unlock()
	return l, nil
}

// dropIdle detaches the link that was used longest ago, of those that nothing is
// unanswered on. It is called with mu held.
func (c *Conn) dropIdle() bool {
	var oldest *link
	for _, l := range c.senders {
		if l.open == 0 && l.gone == nil && (oldest == nil || l.used.Before(oldest.used)) {
			oldest = l
		}
	}
	if oldest == nil {
		return len(c.senders) < maxSenders
	}
	oldest.gone = ErrClosed
	delete(c.senders, oldest.target)
	c.put(&frames.Detach{Handle: oldest.handle, Closed: true}, nil)
	return true
}
