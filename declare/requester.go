package declare

import "context"

// Requester sends one request to the broker's /management node and returns the reply. The
// Management of a client connection is one. Implement it to use this package with another AMQP
// 1.0 client.
//
//   - It must be safe for concurrent use: [Apply] sends up to 16 requests at once.
//   - When a session closes, all its requests fail. The next Request should wait for a new
//     session until its ctx is done, rather than fail at once: Apply pauses for at most 80 ms
//     before it repeats a request.
type Requester interface {
	// Request sends method (GET, PUT, POST, or DELETE) with path, which is already
	// percent-encoded, such as "/queues/orders". body is nil or a map[string]any that contains
	// nothing but nil, string, bool, int64, float64, []any, and map[string]any.
	//
	// status is the reply's status, such as 201, and reply its body: a map, a list, a string, or
	// nil. A reply of any status, even 409, has err == nil. err is non-nil only if no reply came:
	// ctx was done, the session was lost, or the user has no permission, which RabbitMQ answers
	// by closing the session. It should say why the session closed.
	Request(ctx context.Context, method, path string, body any) (status int, reply any, err error)
}
