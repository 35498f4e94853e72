package chaos

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/hopback/hopback/client"
)

// bodyHead is the length of what a body begins with: the run's number, its lane, and its id. Padding and a checksum of all
// that follow.
const bodyHead = 8 + 1 + 4

// makeMessage makes the message id of a lane.
func (s Script) makeMessage(run uint64, lane int, id uint32) *client.Message {
	b := make([]byte, s.Size(lane, id))
	binary.LittleEndian.PutUint64(b, run)
	b[8] = byte(lane)
	binary.LittleEndian.PutUint32(b[9:], id)
	for i := bodyHead; i < len(b)-4; i++ {
		b[i] = byte(i) ^ byte(id)
	}
	binary.LittleEndian.PutUint32(b[len(b)-4:], crc32.ChecksumIEEE(b[:len(b)-4]))
	m := client.NewMessage(b)
	m.Properties.MessageID = messageName(lane, id)
	return m
}

func messageName(lane int, id uint32) string { return fmt.Sprintf("%d-%d", lane, id) }

// readMessage returns which message of the run and lane m is, or why it is none.
func readMessage(m *client.Message, run uint64, lane int) (uint32, error) {
	if len(m.Data) != 1 || len(m.Data[0]) < bodyHead+4 {
		return 0, errors.New("a body of another kind")
	}
	b := m.Data[0]
	if binary.LittleEndian.Uint32(b[len(b)-4:]) != crc32.ChecksumIEEE(b[:len(b)-4]) {
		return 0, errors.New("a body with a wrong checksum")
	}
	if binary.LittleEndian.Uint64(b) != run {
		return 0, errors.New("a message of another run")
	}
	id := binary.LittleEndian.Uint32(b[9:])
	if int(b[8]) != lane {
		return 0, fmt.Errorf("message %d of lane %d", id, b[8])
	}
	if name := messageName(lane, id); m.Properties == nil || m.Properties.MessageID != name {
		return 0, fmt.Errorf("message %d with another message-id", id)
	}
	return id, nil
}
