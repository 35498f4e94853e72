package redisstore_test

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/middleware/dedupe/redisstore"
	"github.com/hopback/hopback/retry"
)

// Workers in several processes share what they have handled.
func ExampleNew() {
	_ = func(ctx context.Context, conn *client.Conn, handler client.Handler) error {
		rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
		defer rdb.Close()
		once := dedupe.With(dedupe.Config{Store: redisstore.New(rdb, redisstore.Config{Prefix: "billing:done:"})})
		return conn.Consume(ctx, "orders", retry.With(retry.Policy{})(once(handler)), client.ConsumerConfig{})
	}
}
