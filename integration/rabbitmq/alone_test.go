package rabbitmq

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Between Alone and done, nobody else gets the lock of that name. Another name doesn't wait.
func TestAlone(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	path := filepath.Join(cache, "hopback", "a.lock")
	done := Alone("a")
	second, err := tryLock(path, false)
	require.NoError(t, err)
	assert.Nil(t, second)
	Alone("b")()
	done()
	second, err = tryLock(path, false)
	require.NoError(t, err)
	require.NotNil(t, second)
	second.unlock()
}
