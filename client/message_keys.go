package client

import (
	"maps"
	"sync/atomic"
)

// keys has annotation keys as values of type any, as a map of annotations wants them:
// each conversion would allocate. The first so many that are used are kept.
var keys keyBoxes

type keyBoxes struct {
	kept atomic.Pointer[map[string]any]
}

const maxKeys = 256

func (b *keyBoxes) boxed(key string) any {
	kept := b.kept.Load()
	if kept != nil {
		if v, ok := (*kept)[key]; ok {
			return v
		}
		if len(*kept) >= maxKeys {
			return key
		}
	}
	more := map[string]any{}
	if kept != nil {
		more = maps.Clone(*kept)
	}
	var v any = key
	more[key] = v
	b.kept.CompareAndSwap(kept, &more) // who comes second tries again another time
	return v
}
