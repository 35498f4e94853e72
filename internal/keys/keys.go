// Package keys has annotation keys as values of type any.
package keys

import (
	"maps"
	"sync/atomic"
)

// kept are the first keys that were used.
var kept atomic.Pointer[map[string]any]

const maxKeys = 256

// Boxed returns key as a map of annotations wants it. Each conversion would allocate, so the
// first maxKeys keys are kept.
func Boxed(key string) any {
	known := kept.Load()
	if known != nil {
		if v, ok := (*known)[key]; ok {
			return v
		}
		if len(*known) >= maxKeys {
			return key
		}
	}
	more := map[string]any{}
	if known != nil {
		more = maps.Clone(*known)
	}
	var v any = key
	more[key] = v
	kept.CompareAndSwap(known, &more) // who comes second tries again another time
	return v
}
