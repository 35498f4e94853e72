package address_test

import (
	"fmt"

	"github.com/hopback/hopback/address"
)

func Example() {
	for _, a := range []address.Address{
		address.Queue("orders"),
		address.Queue("orders/eu 1"),
		address.Exchange("shop", "order.placed"),
		address.Exchange("shop", ""),
	} {
		s, err := a.Build()
		fmt.Println(s, err)
	}
	_, err := address.Exchange("", "orders").Build()
	fmt.Println(err)
	// Output:
	// /queues/orders <nil>
	// /queues/orders%2Feu%201 <nil>
	// /exchanges/shop/order.placed <nil>
	// /exchanges/shop <nil>
	// hopback: exchange name = "" is the default exchange, which the broker doesn't allow in an address; name the queue that the routing key stands for: address.Queue(routingKey)
}

func ExampleParse() {
	a, err := address.Parse("/exchanges/shop/order%2Fplaced")
	fmt.Println(a.ExchangeName(), a.RoutingKey(), err)

	_, err = address.Parse("/queue/orders")
	fmt.Println(err)
	// Output:
	// shop order/placed <nil>
	// hopback: address = "/queue/orders" is an address of the format v1, which RabbitMQ 4 has deprecated; write "/queues/<queue>", the name percent-encoded
}
