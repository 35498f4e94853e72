package cloudevents_test

import (
	"context"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/cloudevents"
	"github.com/hopback/hopback/hopbacktest"
)

type order struct {
	Total int `json:"total"`
}

func Example() {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx, stop := context.WithCancel(context.Background())
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())
	topology := declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "events", DeadLetter: declare.Drop()}}}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}

	codec := cloudevents.Codec[order]{}
	publisher, err := client.NewPublisher[cloudevents.Event[order]](ctx, conn, address.Queue("events"), client.PublisherConfig{Codec: codec})
	if err != nil {
		log.Fatal(err)
	}
	event := cloudevents.Event[order]{
		ID: "o-17", Source: "/shop", Type: "order.placed", Extensions: map[string]string{"tenant": "north"}, Data: order{Total: 42},
	}
	if err := publisher.Publish(ctx, event); err != nil {
		log.Fatal(err)
	}
	handler := client.Typed(codec, func(ctx context.Context, e cloudevents.Event[order]) error {
		d, _ := client.DeliveryFrom(ctx)
		fmt.Println(d.Property("cloudEvents:type"), "from", e.Source, "for", e.Extensions["tenant"])
		fmt.Println("total", e.Data.Total)
		stop()
		return nil
	})
	if err := conn.Consume(ctx, "events", handler, client.ConsumerConfig{}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// order.placed from /shop for north
	// total 42
}

func TestEventsOfOtherProducers(t *testing.T) {
	t.Parallel()
	codec := cloudevents.Codec[order]{}
	with := func(edit func(map[string]any)) (e cloudevents.Event[order], err error) {
		m := client.NewMessage([]byte(`{"total": 1}`))
		m.ApplicationProperties = map[string]any{
			"cloudEvents_specversion": "1.0", "cloudEvents_id": "1", "cloudEvents_source": "/s", "cloudEvents_type": "t",
			"cloudEvents_time": "2026-01-02T03:04:05Z", "other": true,
		}
		edit(m.ApplicationProperties)
		err = codec.Decode(m, &e)
		return e, err
	}
	e, err := with(func(map[string]any) {})
	require.NoError(t, err)
	want := cloudevents.Event[order]{ID: "1", Source: "/s", Type: "t", Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Data: order{Total: 1}}
	assert.Equal(t, want, e)
	for key, bad := range map[string]any{"cloudEvents_specversion": "0.3", "cloudEvents_id": "", "cloudEvents_time": "noon"} {
		_, err := with(func(p map[string]any) { p[key] = bad })
		require.Error(t, err, key)
	}
	require.Error(t, codec.Decode(client.NewMessage(nil), new(int)))
	require.Error(t, codec.Encode(17, client.NewMessage(nil)))
	require.Error(t, codec.Encode(cloudevents.Event[order]{}, client.NewMessage(nil)))
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	codec := cloudevents.Codec[order]{}
	e := cloudevents.Event[order]{ID: "1", Source: "/s", Type: "t", Subject: "u", Time: time.Unix(17, 0), Extensions: map[string]string{"a": "b"}, Data: order{Total: 3}}
	m := client.NewMessage(nil)
	require.NoError(t, codec.Encode(e, m))
	var got cloudevents.Event[order]
	require.NoError(t, codec.Decode(m, &got))
	assert.Equal(t, e, got)
	assert.Equal(t, "1", m.Properties.MessageID)
}
