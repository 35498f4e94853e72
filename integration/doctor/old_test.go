package doctor_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
)

// old is a consumer of AMQP 0-9-1, as far as it takes to subscribe: no client library of the
// module speaks it.
type old struct {
	*bench
	conn net.Conn
}

// dialOld opens a connection and a channel.
func dialOld(b *bench) *old {
	b.Helper()
	u, err := url.Parse(b.URL)
	require.NoError(b, err)
	conn, err := net.DialTimeout("tcp", u.Host, suite.Patience)
	require.NoError(b, err)
	b.Cleanup(func() { _ = conn.Close() })
	require.NoError(b, conn.SetDeadline(time.Now().Add(2*suite.Patience)))
	o := &old{b, conn}
	b.olds = append(b.olds, o)
	_, err = conn.Write([]byte("AMQP\x00\x00\x09\x01"))
	require.NoError(b, err)
	o.await(10, 10) // start
	password, _ := u.User.Password()
	o.send(0, 10, 11, table(), short("PLAIN"), long("\x00"+u.User.Username()+"\x00"+password), short("en_US"))
	o.await(10, 30) // tune
	o.send(0, 10, 31, number(uint16(100)), number(uint32(131072)), number(uint16(0)))
	o.send(0, 10, 40, short(b.VHost), short(""), []byte{0})
	o.await(10, 41)
	o.send(1, 20, 10, short(""))
	o.await(20, 11)
	return o
}

// consume subscribes without a prefetch limit, and reads no delivery.
func (o *old) consume(queue string, noAck bool) {
	o.Helper()
	bits := byte(0)
	if noAck {
		bits = 2
	}
	o.send(1, 60, 20, number(uint16(0)), short(queue), short(""), []byte{bits}, table())
	o.await(60, 21)
}

// limit sets the prefetch limit.
func (o *old) limit(n uint16) {
	o.Helper()
	o.send(1, 60, 10, number(uint32(0)), number(n), []byte{0})
	o.await(60, 11)
}

// returning returns each delivery with basic.nack and requeue, until the connection ends. The
// channel gets a value after n of them.
func (o *old) returning(n int) <-chan struct{} {
	many := make(chan struct{}, 1)
	go func() {
		for count := 1; ; count++ {
			body, err := o.read(60, 60) // basic.deliver: the consumer's tag, and the delivery's
			if err != nil || len(body) < 5 || len(body) < 5+int(body[4])+8 {
				return
			}
			tag := body[5+body[4]:][:8]
			if _, err := o.conn.Write(frameOf(1, 1, bytes.Join([][]byte{number(uint16(60)), number(uint16(120)), tag, {2}}, nil))); err != nil {
				return
			}
			if count == n {
				many <- struct{}{}
			}
		}
	}()
	return many
}

func (o *old) close() { _ = o.conn.Close() }

// publish publishes a text, without a confirm.
func (o *old) publish(exchange, key, text string) {
	o.Helper()
	o.send(1, 60, 40, number(uint16(0)), short(exchange), short(key), []byte{0})
	o.frame(2, 1, bytes.Join([][]byte{number(uint16(60)), number(uint16(0)), number(uint32(0)), number(uint32(len(text))), number(uint16(0))}, nil))
	o.frame(3, 1, []byte(text))
}

// send writes the frame of a method.
func (o *old) send(channel, class, method uint16, fields ...[]byte) {
	o.Helper()
	o.frame(1, channel, append(append(number(class), number(method)...), bytes.Join(fields, nil)...))
}

func (o *old) frame(kind byte, channel uint16, body []byte) {
	o.Helper()
	_, err := o.conn.Write(frameOf(kind, channel, body))
	require.NoError(o, err)
}

func frameOf(kind byte, channel uint16, body []byte) []byte {
	frame := append(append([]byte{kind}, number(channel)...), number(uint32(len(body)))...)
	return append(append(frame, body...), 0xCE)
}

// await reads frames until a method comes.
func (o *old) await(class, method uint16) {
	o.Helper()
	_, err := o.read(class, method)
	require.NoError(o, err)
}

// read reads frames until a method comes, and returns its body.
func (o *old) read(class, method uint16) ([]byte, error) {
	for {
		head := make([]byte, 7)
		if _, err := io.ReadFull(o.conn, head); err != nil {
			return nil, err
		}
		body := make([]byte, binary.BigEndian.Uint32(head[3:])+1)
		if _, err := io.ReadFull(o.conn, body); err != nil {
			return nil, err
		}
		if head[0] == 1 && binary.BigEndian.Uint16(body) == class && binary.BigEndian.Uint16(body[2:]) == method {
			return body, nil
		}
	}
}

func short(s string) []byte { return append([]byte{byte(len(s))}, s...) }
func long(s string) []byte  { return append(number(uint32(len(s))), s...) }
func table() []byte         { return number(uint32(0)) }

func number[T uint16 | uint32](n T) []byte {
	b, _ := binary.Append(nil, binary.BigEndian, n)
	return b
}
