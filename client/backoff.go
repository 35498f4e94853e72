package client

import "github.com/hopback/hopback/internal/backoff"

// ReconnectBackoff is an exponential backoff with full jitter: the upper limit doubles from Min
// to Max, and each pause is a random time between 0 and that limit. The zero value means the
// defaults, 100 ms and 10 s. It is a struct with two fields, and its method Pause returns the pause after
// that many failures in a row, of a value whose fields are set:
//
//	Min, Max time.Duration
type ReconnectBackoff = backoff.Exponential
