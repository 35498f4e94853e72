// Package rpc is request and reply over RabbitMQ, with AMQP 1.0: a [Requester] calls, and a
// handler made by [Respond] answers.
//
//	quotes, err := rpc.NewRequester[Order, Quote](ctx, conn, address.Queue("quotes"), rpc.RequesterConfig{})
//	quote, err := quotes.Call(ctx, order)
//
//	responder, err := rpc.NewResponder(ctx, conn, rpc.ResponderConfig{})
//	handler := rpc.Respond(responder, func(ctx context.Context, o Order) (Quote, error) { ... })
//	err = conn.Consume(ctx, "quotes", retry.With(policy)(handler), client.ConsumerConfig{})
//
// Requests go through an ordinary queue. They may be retried and dead-lettered like any
// message. Replies take one of two ways, see [Replies]: RabbitMQ's direct reply-to, or a
// queue of the requester's own.
//
// A request carries, in standard properties, all that another AMQP client needs to answer it:
// reply-to, correlation-id, and the same value as its message-id. A reply goes to the
// request's reply-to, with the request's correlation-id, or with its message-id if it has
// none. So either end can be another client, over AMQP 0-9-1 too.
//
// A call can run its handler twice, and an error doesn't always mean that it hasn't run. See
// [Requester.Call] and docs/rpc.md.
package rpc
