package userid

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestLogin(t *testing.T) {
	t.Parallel()
	l := NewLogin("bob", false)
	assert.True(t, l.Accepts(nil))
	assert.True(t, l.Accepts([]byte("bob")))
	assert.False(t, l.Accepts([]byte("ada")))
	assert.False(t, l.Refuses([]byte("ada")), "bob may be an impersonator")
	assert.False(t, l.Learn("write access refused"))

	l = NewLogin("", true)
	assert.True(t, l.Accepts([]byte("ada")))
	assert.True(t, l.Learn("user_id property set to 'ada' but authenticated user was 'bob'"))
	assert.False(t, l.Accepts([]byte("ada")))
	assert.True(t, l.Refuses([]byte("ada")))
	assert.True(t, l.Accepts([]byte("bob")))
	assert.False(t, l.Refuses(nil))
	assert.False(t, NewLogin("", false).Accepts([]byte("ada")), "unknown isn't the same")
}
