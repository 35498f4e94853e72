package protobuf_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/protobuf"
	"github.com/hopback/hopback/examples/protobuf/orderpb"
	"github.com/hopback/hopback/hopbacktest"
)

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
	topology := declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}

	publisher, err := client.NewPublisher[*orderpb.Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{Codec: protobuf.Codec{}})
	if err != nil {
		log.Fatal(err)
	}
	if err := publisher.Publish(ctx, &orderpb.Order{Id: "o-17", TotalCents: 4200}); err != nil {
		log.Fatal(err)
	}
	handler := client.Typed(protobuf.Codec{}, func(_ context.Context, o *orderpb.Order) error {
		fmt.Println(o.GetId(), "for", o.GetTotalCents(), "cents")
		stop()
		return nil
	})
	if err := conn.Consume(ctx, "orders", handler, client.ConsumerConfig{}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// o-17 for 4200 cents
}

func TestWhatIsNoOrderIsRefused(t *testing.T) {
	t.Parallel()
	codec := protobuf.Codec{}
	m := client.NewMessage(nil)
	require.NoError(t, codec.Encode(wrapperspb.String("o-17"), m))
	var o *orderpb.Order
	assert.ErrorContains(t, codec.Decode(m, &o), `"google.protobuf.StringValue", not a shop.Order`)
	assert.Nil(t, o)
	assert.Error(t, codec.Decode(client.NewMessage([]byte{0xff}), &o))
	require.NoError(t, codec.Decode(client.NewMessage([]byte("\x0a\x01x")), &o), "without a content type")
	assert.Equal(t, "x", o.GetId())

	assert.Error(t, codec.Encode((*orderpb.Order)(nil), m))
	assert.Error(t, codec.Encode("o-17", m))
	_, err := client.NewPublisher[string](t.Context(), nil, address.Queue("orders"), client.PublisherConfig{Codec: codec})
	_, ok := errors.AsType[*argument.Error](err)
	assert.True(t, ok, "%v", err)
	assert.Error(t, codec.CheckDecode(nil))
}
