package argument

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestNearest(t *testing.T) {
	t.Parallel()
	known := []string{"delivery-limit", "dead-letter", "message-ttl", "max-length", "max-length-bytes", "key"}
	for got, want := range map[string]string{
		"delivry-limit": "delivery-limit", "delivery_limit": "delivery-limit", "DeliveryLimit": "delivery-limit", "x-delivery-limit": "delivery-limit",
		"delviery-limit": "delivery-limit", "ttl": "message-ttl", "max-lenght": "max-length", "kye": "key", "deadletter": "dead-letter",
		"colour": "", "": "", "---": "", strings.Repeat("é", 1<<20): "", "\xff": "",
	} {
		assert.Equal(t, want, Nearest(got, known), got)
	}
	assert.Empty(t, Nearest("a", []string{strings.Repeat("a", 1<<20)}))
	assert.Equal(t, 1, edits("ab", "ba"))
}
