// Package redisstore is a [dedupe.Store] on Redis, for workers in several processes.
//
//	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
//	once := dedupe.With(dedupe.Config{Store: redisstore.New(rdb, redisstore.Config{})})
//
// Each message takes one key of about 100 bytes, until dedupe.Config.TTL after it was handled.
// Each call is one round trip.
//
// # What Redis can lose
//
// A message is handled again if Redis forgets its mark:
//
//   - Redis evicts keys because it is out of memory. Set maxmemory-policy to noeviction.
//   - Redis crashes before it has written the mark to its file. With appendonly yes, whose
//     default is appendfsync everysec, it loses up to one second of marks.
//   - A replica becomes the primary without having received the mark.
//
// If the effect is in PostgreSQL and must happen once, use package postgres/inbox instead.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package redisstore

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/middleware/dedupe"
)

// Config configures [New]. The zero value is ready to use.
type Config struct {
	// Prefix is the start of each key, up to 200 bytes, so that keys don't collide with those of
	// other programs. Workers that share messages need the same Prefix. Default:
	// "hopback:dedupe:".
	Prefix string
}

// maxPrefix is the maximum length of Config.Prefix.
const maxPrefix = 200

// Store is a [dedupe.Store] on Redis. Create it with [New]. It is safe for concurrent use.
type Store struct {
	rdb    redis.Scripter
	prefix string
}

var _ dedupe.Store = (*Store)(nil)

// New returns a [Store] on rdb, which may be a *redis.Client, a *redis.ClusterClient, or a
// *redis.Ring. If rdb is nil or the Prefix is longer than 200 bytes, each call returns an
// *argument.Error and sends nothing.
func New(rdb redis.Scripter, cfg Config) *Store {
	if cfg.Prefix == "" {
		cfg.Prefix = "hopback:dedupe:"
	}
	if v := reflect.ValueOf(rdb); v.Kind() == reflect.Pointer && v.IsNil() {
		rdb = nil // such as a nil *redis.Client
	}
	return &Store{rdb, cfg.Prefix}
}

// A key's value is "done", or "by " and the owner.
var (
	claim = redis.NewScript(`local v = redis.call('GET', KEYS[1])
if v == 'done' then return 'done' end
if v and v ~= 'by ' .. ARGV[1] then return 'busy' end
redis.call('SET', KEYS[1], 'by ' .. ARGV[1], 'PX', ARGV[2])
return 'claimed'`)
	renew = redis.NewScript(`if redis.call('GET', KEYS[1]) ~= 'by ' .. ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])`)
	done    = redis.NewScript(`redis.call('SET', KEYS[1], 'done', 'PX', ARGV[1]) return 1`)
	release = redis.NewScript(`if redis.call('GET', KEYS[1]) ~= 'by ' .. ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])`)
)

// run runs a script on a key.
func (s *Store) run(ctx context.Context, script *redis.Script, key string, args ...any) (any, error) {
	switch {
	case s == nil || s.rdb == nil:
		return nil, argument.New("rdb", nil, "is nil", "pass a go-redis client to redisstore.New")
	case len(s.prefix) > maxPrefix:
		return nil, argument.New("redisstore.Config.Prefix", len(s.prefix), "is too long", "use at most 200 bytes")
	}
	v, err := script.Run(ctx, s.rdb, []string{s.prefix + key}, args...).Result()
	if err != nil {
		return nil, fmt.Errorf("redisstore: %w", err)
	}
	return v, nil
}

// Claim implements dedupe.Store.
func (s *Store) Claim(ctx context.Context, key, owner string, lease time.Duration) (dedupe.State, error) {
	v, err := s.run(ctx, claim, key, owner, millis(lease))
	if err != nil {
		return "", err
	}
	switch v {
	case "claimed":
		return dedupe.StateClaimed, nil
	case "busy":
		return dedupe.StateBusy, nil
	case "done":
		return dedupe.StateDone, nil
	}
	return "", fmt.Errorf("redisstore: Redis answered %v", v)
}

// Renew implements dedupe.Store.
func (s *Store) Renew(ctx context.Context, key, owner string, lease time.Duration) (bool, error) {
	v, err := s.run(ctx, renew, key, owner, millis(lease))
	return v == int64(1), err
}

// Done implements dedupe.Store.
func (s *Store) Done(ctx context.Context, key, _ string, ttl time.Duration) error {
	_, err := s.run(ctx, done, key, millis(ttl))
	return err
}

// Release implements dedupe.Store.
func (s *Store) Release(ctx context.Context, key, owner string) error {
	_, err := s.run(ctx, release, key, owner)
	return err
}

// millis rounds up: Redis refuses 0.
func millis(d time.Duration) int64 {
	return max(1, int64((d+time.Millisecond-1)/time.Millisecond))
}
