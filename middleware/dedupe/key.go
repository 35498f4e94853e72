package dedupe

import (
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"strconv"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/client"
)

// MessageID is the default [Config.Key]: the queue's name and the message-id with its type,
// because AMQP has four types of message-id, and the string "1" isn't the number 1. It returns
// false for a message without a message-id, or with an empty one. You can extend it in your own
// Key:
//
//	Key: func(d *client.Delivery) (string, bool) {
//		id, ok := dedupe.MessageID(d)
//		return "billing/" + id, ok
//	}
func MessageID(d *client.Delivery) (string, bool) {
	p := d.Message().Properties
	if p == nil {
		return "", false
	}
	var id string
	switch v := p.MessageID.(type) {
	case string:
		if v == "" {
			return "", false
		}
		id = "s:" + v
	case amqp.UUID:
		id = "u:" + v.String()
	case uint64:
		id = "n:" + strconv.FormatUint(v, 10)
	case []byte:
		if len(v) == 0 {
			return "", false
		}
		id = "b:" + hex.EncodeToString(v)
	default:
		return "", false
	}
	// Escaped, the queue's name has no slash, so it can't run over into the id.
	return url.PathEscape(d.Queue()) + "/" + id, true
}

// maxKey is the longest key that is stored without hashing. An id may have megabytes, so without
// this limit, a Store with a limited number of keys would still have an unlimited size.
const maxKey = 512

func shorten(key string) string {
	if len(key) <= maxKey {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return "sha256:" + hex.EncodeToString(sum[:])
}
