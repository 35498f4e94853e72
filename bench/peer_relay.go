package main

import (
	"context"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wm "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	wmsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/outbox"
)

// hopRelay is package outbox, with its defaults.
type hopRelay struct{ cfg client.Config }

func (hopRelay) prepare(ctx context.Context, pool *pgxpool.Pool) error {
	return postgres.Migrate(ctx, pool)
}

func (hopRelay) write(ctx context.Context, tx pgx.Tx, queue string, bodies [][]byte) error {
	_, err := outbox.Publisher[[]byte]{To: address.Queue(queue), Codec: client.RawCodec{}}.PublishAll(ctx, tx, bodies)
	return err
}

func (p hopRelay) relay(ctx context.Context, pool *pgxpool.Pool, url string, published func(int)) error {
	if p.cfg.Name == "" {
		p.cfg = client.Config{Name: "hopback-bench", Logger: quiet}
	}
	conn, err := client.Connect(ctx, url, p.cfg)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	relay, err := outbox.NewRelay(pool, conn, outbox.RelayConfig{Logger: quiet})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	var before int64
	for {
		now := relay.Stats().Published
		if now > before {
			published(int(now - before))
			before = now
		}
		select {
		case err := <-ended:
			return err
		case <-time.After(time.Millisecond):
		}
	}
}

// watermillRelay is the forwarder of watermill between watermill-sql and watermill-amqp.
// It publishes one message after the other, each confirmed before the next.
type watermillRelay struct{ batch int }

func (p watermillRelay) schema() wmsql.DefaultPostgreSQLSchema {
	return wmsql.DefaultPostgreSQLSchema{SubscribeBatchSize: p.batch}
}

func (p watermillRelay) subscriber(pool *pgxpool.Pool) (*wmsql.Subscriber, error) {
	return wmsql.NewSubscriber(wmsql.BeginnerFromPgx(pool), wmsql.SubscriberConfig{
		SchemaAdapter: p.schema(), OffsetsAdapter: wmsql.DefaultPostgreSQLOffsetsAdapter{}, InitializeSchema: true,
		PollInterval: 10 * time.Millisecond, // its default of a second would have it sleep
	}, watermill.NopLogger{})
}

const wmTopic = "outbox"

func (p watermillRelay) prepare(_ context.Context, pool *pgxpool.Pool) error {
	s, err := p.subscriber(pool)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.SubscribeInitialize(wmTopic)
}

func (p watermillRelay) write(_ context.Context, tx pgx.Tx, queue string, bodies [][]byte) error {
	to, err := wmsql.NewPublisher(wmsql.TxFromPgx(tx), wmsql.PublisherConfig{SchemaAdapter: p.schema()}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	ms := make([]*message.Message, len(bodies))
	for i, body := range bodies {
		ms[i] = message.NewMessage(strconv.FormatUint(messageIDs.Add(1), 10), body)
	}
	return forwarder.NewPublisher(to, forwarder.PublisherConfig{ForwarderTopic: wmTopic}).Publish(queue, ms...)
}

// ticking counts what its publisher has published.
type ticking struct {
	message.Publisher
	published func(int)
}

func (t ticking) Publish(topic string, ms ...*message.Message) error {
	err := t.Publisher.Publish(topic, ms...)
	if err == nil {
		t.published(len(ms))
	}
	return err
}

func (p watermillRelay) relay(ctx context.Context, pool *pgxpool.Pool, url string, published func(int)) error {
	to, err := wm.NewPublisher(wmConfig(url), watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer to.Close()
	from, err := p.subscriber(pool)
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := forwarder.NewForwarder(from, ticking{to, published}, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: wmTopic})
	if err != nil {
		return err
	}
	return f.Run(ctx)
}
