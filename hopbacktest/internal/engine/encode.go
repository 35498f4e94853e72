package engine

import "github.com/hopback/hopback/internal/frames"

// Append writes the message behind b, as its consumer gets it. It may be called by the
// goroutine that took the event, at any time.
func (d *Delivery) Append(b []byte) []byte {
	b = d.appendHeader(b)
	b = d.appendAnnotations(b)
	return append(b, d.msg.Bare...)
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, frames.CodeTrue)
	}
	return append(b, frames.CodeFalse)
}

func appendUint(b []byte, v uint32) []byte {
	switch {
	case v == 0:
		return append(b, frames.CodeUint0)
	case v < 256:
		return append(b, frames.CodeSmallUint, byte(v))
	}
	return append(b, frames.CodeUint, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
}

func (d *Delivery) appendHeader(b []byte) []byte {
	m := d.msg
	b = append(b, frames.CodeDescribed, frames.CodeSmallUlong, 0x70, frames.CodeList8, 0, 5)
	at := len(b)
	b = appendBool(b, m.durable)
	if m.priority < 0 {
		b = append(b, frames.CodeNull)
	} else {
		b = append(b, frames.CodeUbyte, byte(m.priority))
	}
	if m.ttl < 0 {
		b = append(b, frames.CodeNull)
	} else {
		b = appendUint(b, uint32(m.ttl))
	}
	b = appendBool(b, !d.redelivered && d.failed == 0 && len(m.deaths) == 0)
	b = appendUint(b, d.failed)
	b[at-2] = byte(len(b) - at + 1)
	return b
}

func appendText(b []byte, short byte, s string) []byte {
	if len(s) < 256 {
		return append(append(b, short, byte(len(s))), s...)
	}
	n := len(s)
	return append(append(b, short+0x10, byte(n>>24), byte(n>>16), byte(n>>8), byte(n)), s...)
}

func (d *Delivery) appendAnnotations(b []byte) []byte {
	m := d.msg
	b = append(b, frames.CodeDescribed, frames.CodeSmallUlong, 0x72, frames.CodeMap32, 0, 0, 0, 0, 0, 0, 0, 0)
	at := len(b)
	count := 0
	put := func(key frames.Symbol, v any) {
		b = appendText(b, frames.CodeSymbol8, string(key))
		if s, ok := v.(string); ok {
			b = appendText(b, frames.CodeString8, s)
		} else {
			b, _ = frames.AppendValue(b, v)
		}
		count++
	}
	put("x-exchange", m.exchange)
	put("x-routing-key", m.keys[0])
	if d.redelivered && d.quorum {
		if !d.newer {
			put("x-delivery-count", int64(d.acquired))
		} else if put("x-acquired-count", int64(d.acquired)); d.failed > 0 {
			put("x-delivery-count", int64(d.failed))
		}
	}
	if len(m.deaths) > 0 {
		put("x-opt-deaths", encodeDeaths(m.deaths))
	}
	newest, newer := keysOf(d.added), keysOf(m.added)
	for _, e := range d.added {
		put(e.Key.(frames.Symbol), e.Value)
	}
	for _, e := range m.added {
		if !newest(string(e.Key.(frames.Symbol))) {
			put(e.Key.(frames.Symbol), e.Value)
		}
	}
	for _, e := range m.sent {
		if key, ok := e.Key.(frames.Symbol); ok {
			if d.overrides(string(key)) || newest(string(key)) || newer(string(key)) {
				continue
			}
			put(key, e.Value)
			continue
		}
		b, _ = frames.AppendValue(b, e.Key)
		b, _ = frames.AppendValue(b, e.Value)
		count++
	}
	size, n := len(b)-at+4, 2*count
	copy(b[at-8:], []byte{byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size), byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
	return b
}

// overrides says whether the sender's annotation is replaced by one that the broker always adds.
func (d *Delivery) overrides(key string) bool {
	switch key {
	case "x-exchange", "x-routing-key":
		return true
	case "x-opt-deaths":
		return len(d.msg.deaths) > 0
	case "x-acquired-count":
		return d.redelivered && d.quorum && d.newer
	case "x-delivery-count":
		return d.redelivered && d.quorum && (!d.newer || d.failed > 0)
	}
	return false
}

func encodeDeaths(deaths []death) frames.Array {
	a := frames.Array{Type: frames.CodeMap32}
	for _, d := range deaths {
		keys := frames.Array{Type: frames.CodeString32}
		for _, k := range d.keys {
			keys.Elements = append(keys.Elements, k)
		}
		m := frames.Map{
			{Key: frames.Symbol("queue"), Value: d.queue},
			{Key: frames.Symbol("reason"), Value: frames.Symbol(d.reason)},
			{Key: frames.Symbol("count"), Value: d.count},
			{Key: frames.Symbol("first-time"), Value: frames.Timestamp(d.first)},
			{Key: frames.Symbol("last-time"), Value: frames.Timestamp(d.last)},
			{Key: frames.Symbol("exchange"), Value: d.exchange},
			{Key: frames.Symbol("routing-keys"), Value: keys},
		}
		if d.ttl >= 0 {
			m = append(frames.Map{{Key: frames.Symbol("ttl"), Value: uint32(d.ttl)}}, m...)
		}
		a.Elements = append(a.Elements, m)
	}
	return a
}
