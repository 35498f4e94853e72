// Package redisstore is a dedupe.Store on Redis, for workers in several processes.
//
//	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
//	once := dedupe.With(dedupe.Config{Store: redisstore.New(rdb, redisstore.Config{})})
//
// Each message has one key of some 100 bytes, until dedupe.Config.TTL after it was
// handled. Each call is one round trip.
//
// # What Redis can lose
//
// A message is handled again if Redis forgets its mark: if it evicts keys for want of
// memory, if it ends before it has written to its file (with appendfsync everysec, the
// default with appendonly yes, up to a second of marks), or if a replica takes over that
// hadn't received it. Set maxmemory-policy to noeviction. Where the effect is in
// PostgreSQL and must happen once, use package postgres/inbox instead.
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

// Config configures New. The zero value is ready to use.
type Config struct {
	// Prefix comes before each key, so that other users of the Redis have no key in
	// common. Workers that share messages need the same. Default: "hopback:dedupe:".
	Prefix string
}

// maxPrefix bounds Config.Prefix.
const maxPrefix = 200

// Store is a dedupe.Store. It is safe for concurrent use.
type Store struct {
	rdb    redis.Scripter
	prefix string
}

var _ dedupe.Store = (*Store)(nil)

// New returns a Store on rdb, which may be a *redis.Client, a *redis.ClusterClient or a
// *redis.Ring. A nil rdb, or a Prefix over 200 bytes, is refused by each call with an
// *argument.Error, and nothing is sent.
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
		return nil, argument.New("rdb", nil, "is nil", "give redisstore.New a client of go-redis")
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
