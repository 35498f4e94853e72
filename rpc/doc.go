// Package rpc implements request and reply over RabbitMQ: a [Requester] calls, and a handler made
// by [Respond] answers. Use it if the caller needs the result; otherwise publish a message.
//
//	quotes, err := rpc.NewRequester[Order, Quote](ctx, conn, address.Queue("quotes"), rpc.RequesterConfig{})
//	quote, err := quotes.Call(ctx, order)
//
//	responder, err := rpc.NewResponder(ctx, conn, rpc.ResponderConfig{})
//	handler := rpc.Respond(responder, func(ctx context.Context, o Order) (Quote, error) { ... })
//	err = conn.Consume(ctx, "quotes", retry.With(policy)(handler), client.ConsumerConfig{})
//
// Requests go through an ordinary queue, and can be retried and dead-lettered like any message.
// Replies come either through RabbitMQ's direct reply-to or through a separate queue for the
// requester: see [Replies].
//
// A call can run its handler twice, and an error doesn't always mean that the handler hasn't run:
// see [Requester.Call] and docs/rpc.md.
//
// # Other clients
//
// Either end can be another client, also over AMQP 0-9-1. A request has its reply-to, a
// correlation-id, and the same value as its message-id, in the standard properties. A reply goes
// to the request's reply-to, with the request's correlation-id, or with its message-id if it has
// no correlation-id.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package rpc
