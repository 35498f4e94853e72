package rabbitmq

import (
	"context"
	"os"
	"path/filepath"
	"time"
)

// Alone waits until no other process of this user is between Alone, with the same name, and done. It is for work that
// processes share by a cache: done at the same time, it would be done twice. Where there are no locks, and after ten
// minutes, it doesn't wait.
func Alone(name string) (done func()) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return func() {}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	lock, err := waitLock(ctx, filepath.Join(cache, "hopback", name+".lock"), false, nil)
	if err != nil {
		return func() {}
	}
	return lock.unlock
}
