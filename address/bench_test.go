package address

import "testing"

var sink string

func BenchmarkBuild(b *testing.B) {
	for name, a := range map[string]Address{
		"queue":    Queue("orders"),
		"exchange": Exchange("retry_exchange", "delay.10000.orders"),
		"escaped":  Exchange("retry exchange", "delay.10000.order/größe"),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				sink, _ = a.Build()
			}
		})
	}
}

func BenchmarkParse(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		a, err := Parse("/exchanges/retry%20exchange/delay.10000.orders")
		if err != nil {
			b.Fatal(err)
		}
		sink = a.name
	}
}
