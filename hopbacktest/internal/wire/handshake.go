package wire

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// handshake goes from the protocol header to the open frame. An error ends the
// connection.
func (c *Conn) handshake() error {
	_ = c.net.SetDeadline(time.Now().Add(c.server.cfg.HandshakeTimeout))
	if err := c.protocol(frames.ProtocolSASL); err != nil {
		return err
	}
	user, err := c.login()
	if err != nil {
		return err
	}
	if err := c.protocol(frames.ProtocolAMQP); err != nil {
		return err
	}
	f, err := c.early()
	if err != nil {
		return err
	}
	open, ok := f.Body.(*frames.Open)
	if !ok || f.Type != frames.TypeAMQP {
		return fmt.Errorf("a %T before the open frame", f.Body)
	}
	if c.faults.before(DirectionFromClient) {
		return errOver
	}
	if err := c.accept(user, open); err != nil {
		return err
	}
	if c.faults.after(DirectionFromClient) {
		return errOver
	}
	return c.net.SetDeadline(time.Time{})
}

// protocol reads a protocol header, and answers it with the same. Another one is answered
// with what the server speaks instead, as RabbitMQ does.
func (c *Conn) protocol(want frames.Protocol) error {
	b, err := c.in.AwaitHeader()
	if err != nil {
		return err
	}
	b = bytes.Clone(b)
	got, err := c.in.AwaitProtocol()
	ok := err == nil
	if ok && got == want {
		return c.say(want.Header())
	}
	err = fmt.Errorf("the client began with % x", b)
	if want == frames.ProtocolSASL {
		answer := frames.ProtocolSASL.Header()
		if bytes.HasPrefix(b, []byte("AMQP")) && !ok && b[4] < 2 {
			answer = []byte("AMQP\x00\x00\x09\x01") // RabbitMQ takes it for AMQP 0-9-1
		}
		_ = c.say(answer)
	}
	return err
}

// say writes b at once.
func (c *Conn) say(b []byte) error {
	if c.faults.silent(DirectionToClient) {
		return nil
	}
	_, err := c.net.Write(b)
	return err
}

// early reads a frame of the handshake.
func (c *Conn) early() (frames.Frame, error) {
	for {
		b, err := c.in.AwaitHeader()
		if err != nil {
			return frames.Frame{}, err
		}
		h, ok := frames.ReadHeader(b)
		if !ok || h.Size > firstFrameSize {
			return frames.Frame{}, c.refuseLogin(fmt.Errorf("a frame header of % x", b))
		}
		f, err := c.in.AwaitFrame()
		switch {
		case c.faults.silent(DirectionFromClient) && (err == nil || errors.Is(err, frames.ErrMalformed)):
			continue
		case errors.Is(err, frames.ErrMalformed):
			return f, c.refuseLogin(err)
		case err != nil:
			return f, err
		}
		if f.Body != nil {
			return f, nil
		}
	}
}

// refuseLogin waits for a while, so that trying passwords is slow.
func (c *Conn) refuseLogin(why error) error {
	t := time.NewTimer(c.server.cfg.RefusalDelay)
	defer t.Stop()
	select {
	case <-t.C:
	case <-c.done:
	}
	return why
}

// sasl writes a frame of SASL.
func (c *Conn) sasl(p frames.Performative) error {
	b, err := frames.Append(nil, frames.Frame{Type: frames.TypeSASL, Body: p})
	if err != nil {
		return err
	}
	return c.say(b)
}

// login is the dialogue of SASL.
func (c *Conn) login() (*engine.User, error) {
	mechanisms := []frames.Symbol{"PLAIN", "ANONYMOUS"}
	external := certifiedName(c)
	if external != "" {
		mechanisms = append(mechanisms, "EXTERNAL")
	}
	if err := c.sasl(&frames.Mechanisms{Mechanisms: mechanisms}); err != nil {
		return nil, err
	}
	f, err := c.early()
	if err != nil {
		return nil, err
	}
	init, ok := f.Body.(*frames.Init)
	if !ok {
		return nil, fmt.Errorf("a %T in place of sasl-init", f.Body)
	}
	var name, password string
	switch init.Mechanism {
	case "PLAIN":
		// An identity to act for, which RabbitMQ has no use for, the user, and the
		// password, with a NUL before the last two.
		parts := strings.Split(string(init.InitialResponse), "\x00")
		if len(parts) != 3 || parts[0] != "" {
			return nil, c.refuseLogin(fmt.Errorf("a response to PLAIN of %d parts", len(parts)))
		}
		name, password = parts[1], parts[2]
	case "ANONYMOUS":
	case "EXTERNAL":
		if external == "" {
			return nil, c.refuseLogin(fmt.Errorf("invalid authentication mechanism 'EXTERNAL'"))
		}
		name = external
	default:
		return nil, c.refuseLogin(fmt.Errorf("unknown authentication mechanism %q", init.Mechanism))
	}
	user, err := c.server.cfg.Engine.Authenticate(string(init.Mechanism), name, password)
	if err != nil {
		_ = c.refuseLogin(err)
		if err := c.sasl(&frames.Outcome{Code: 1}); err != nil {
			return nil, err
		}
		return nil, c.refuseLogin(fmt.Errorf("%s login refused for user %q: %w", init.Mechanism, name, err))
	}
	c.mu.Lock()
	c.info.User = user.Name()
	c.mu.Unlock()
	return user, c.sasl(&frames.Outcome{Code: 0})
}

// certifiedName is the common name of the client's certificate.
func certifiedName(c *Conn) string {
	t, ok := c.net.(*tls.Conn)
	if !ok {
		return ""
	}
	if certs := t.ConnectionState().PeerCertificates; len(certs) > 0 {
		return certs[0].Subject.CommonName
	}
	return ""
}

// accept opens the connection that the client asks for.
func (c *Conn) accept(user *engine.User, open *frames.Open) error {
	vhost := "/"
	if name, ok := strings.CutPrefix(open.Hostname, "vhost:"); ok {
		vhost = name
	}
	cfg := &c.server.cfg
	idle := open.IdleTimeout.Value
	maxFrame := uint64(open.MaxFrameSize.Value)
	switch {
	case open.MaxFrameSize.Set && maxFrame < minFrameSize:
		return c.refuseLogin(fmt.Errorf("max_frame_size (%d) < minimum maximum frame size (%d)", maxFrame, minFrameSize))
	case idle > 0 && idle < 1000:
		return c.refuseLogin(fmt.Errorf("idle-time-out (%d ms) < minimum idle-time-out (1000 ms)", idle))
	}
	peer := engine.Peer{ContainerID: open.ContainerID, Properties: open.Properties}
	if a := c.net.RemoteAddr(); a != nil {
		peer.Address = a.String()
	}
	if a := c.net.LocalAddr(); a != nil {
		peer.Local = a.String()
	}
	e, refused := cfg.Engine.Connect(user, vhost, peer)
	if refused != nil {
		return c.refuseLogin(refused)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.engine = e
	c.info.VHost, c.info.Container = vhost, open.ContainerID
	c.maxFrame = int(min(maxFrame, math.MaxInt32))
	c.channelMax = min(uint16(cfg.MaxSessions-1), open.ChannelMax.Or(math.MaxUint16))
	// RabbitMQ reckons in whole seconds, and sends when half of the time was silent.
	c.beat = time.Duration(idle/1000) * time.Second / 2
	c.blocked = e.Blocked()
	properties := cfg.Engine.OpenProperties()
	name, _ := properties.Get("cluster_name")
	container, _ := name.(string)
	c.open = true
	c.send(0, &frames.Open{
		ContainerID:         container,
		MaxFrameSize:        frames.Some(uint32(cfg.MaxFrameSize)),
		ChannelMax:          frames.Some(c.channelMax),
		IdleTimeout:         frames.Some(uint32(cfg.Heartbeat.Milliseconds() / 2)),
		OfferedCapabilities: []frames.Symbol{"LINK_PAIR_V1_0", "ANONYMOUS-RELAY"},
		Properties:          properties,
	})
	c.poke()
	return nil
}
