package declare

import "context"

// Requester sends one request to the broker's /management node and returns the
// reply. The management of a client connection is one.
//
// Implementations must be safe for concurrent use: Apply sends up to 16 requests
// at once. When a session ends, all its requests fail. The next Request should
// wait for a new session until its ctx ends, rather than fail at once: Apply
// pauses for at most 80 ms before it repeats a request.
type Requester interface {
	// Request sends method (GET, PUT, POST or DELETE) with path, which is
	// already percent-encoded, such as "/queues/orders". body is nil or a
	// map[string]any that holds nothing but nil, string, bool, int64, float64,
	// []any and map[string]any.
	//
	// status is the reply's status, such as 201, and reply its body: a map, a
	// list, a string or nil. err is non-nil only when no reply came: ctx ended,
	// the session died, or the user has no permission, which RabbitMQ answers
	// by ending the session. It should say why the session ended. A reply of any status, 409 say, has err == nil.
	Request(ctx context.Context, method, path string, body any) (status int, reply any, err error)
}
