package desk

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/frames"
)

// A line of an export, or a dead letter, that claims more than it has costs a small multiple of its
// size.
func TestClaimsOfAMessageCostADeskLittle(t *testing.T) {
	const size = 1_000_000
	lists := make([]byte, 0, size)
	for range frames.MaxDepth - 4 { // each claims all bytes that are left
		left := uint32(size - len(lists) - 9)
		lists = binary.BigEndian.AppendUint32(append(lists, frames.CodeList32), left+4)
		lists = binary.BigEndian.AppendUint32(lists, left)
	}
	lists = append(lists, bytes.Repeat([]byte{frames.CodeNull}, size-len(lists))...)
	entry := append([]byte{frames.CodeSymbol8, 3, 'x', '-', 'l'}, lists...)
	mapping := binary.BigEndian.AppendUint32([]byte{frames.CodeMap32}, uint32(len(entry)+4))
	mapping = append(binary.BigEndian.AppendUint32(mapping, 2), entry...)
	for code, value := range map[byte][]byte{frames.SectionAnnotations: mapping, frames.SectionApplicationProperties: mapping, frames.SectionValue: lists} {
		payload := append([]byte{frames.CodeDescribed, frames.CodeSmallUlong, code}, value...)
		if code < frames.SectionData {
			payload = append(payload, frames.CodeDescribed, frames.CodeSmallUlong, frames.SectionData, frames.CodeBinary8, 0)
		}
		for name, f := range map[string]func() error{
			"import":    func() error { _, err := sendable(payload); return err },
			"canonical": func() error { _, err := canonical(payload); return err },
			"scan":      func() error { _ = open(payload).summary(0); return nil },
		} {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := f()
			runtime.ReadMemStats(&after)
			assert.Equal(t, name != "scan", err != nil, name)
			assert.LessOrEqual(t, int(after.TotalAlloc-before.TotalAlloc), 64*len(payload), "%s of section 0x%02x", name, code)
		}
	}
}
