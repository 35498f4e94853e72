package offset_test

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres/offset"
	"github.com/hopback/hopback/stream"
)

type order struct{ ID string }

func bill(ctx context.Context, conn *client.Conn, pool *pgxpool.Pool) error {
	handler := client.JSON(func(ctx context.Context, o order) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			d, _ := client.DeliveryFrom(ctx)
			fresh, err := offset.Advance(ctx, tx, "billing", d)
			if err != nil || !fresh {
				return err
			}
			_, err = tx.Exec(ctx, "INSERT INTO bills (id) VALUES ($1)", o.ID)
			return err
		})
	})
	return stream.Consume(ctx, conn, "orders.log", handler, stream.Config{
		Consumer: "billing", Offsets: &offset.Store{DB: pool},
	})
}

// Each message takes effect exactly once.
func ExampleAdvance() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		return
	}
	defer pool.Close()
	conn, err := client.Connect(ctx, "amqp://guest:guest@localhost/", client.Config{})
	if err != nil {
		return
	}
	defer conn.Close(ctx)
	_ = bill(ctx, conn, pool)
}
