package differ

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// operation is one thing that is done to a broker. Its fields are plain values, so that a
// sequence can be printed, and the printed text pasted into a test. In strings, @ stands for
// what makes the names of a run its own.
type operation interface{ do(*world) }

// sequence is what is done, in order.
type sequence []operation

// Management.
type (
	// declare declares a queue. Kind is its x-queue-type: "" means quorum, "none" leaves it out.
	declare struct {
		Queue, Kind                      string
		Transient, AutoDelete, Exclusive bool
		Arguments                        args
	}
	declareExchange struct {
		Exchange, Type                  string
		Transient, AutoDelete, Internal bool
		Arguments                       args
	}
	// bind binds a queue, or an exchange.
	bind struct {
		Source, Queue, Exchange, Key string
		Arguments                    args
	}
	// unbind asks for the bindings of a kind, and deletes the one with these arguments.
	unbind struct {
		Source, Queue, Exchange, Key string
		Arguments                    args
	}
	inspect        struct{ Queue string }
	purge          struct{ Queue string }
	deleteQueue    struct{ Queue string }
	deleteExchange struct{ Exchange string }
)

// Links. On names the session: "c0.1" is the second one of the first connection.
type (
	// send attaches a sender. Anonymous gives it no address.
	send struct {
		Link, On, To          string
		Anonymous, Presettled bool
	}
	receive struct {
		Link, On, From string
		Priority       int32
		Presettled     bool
	}
	// publish sends Count messages, at least one, each in Frames frames.
	publish struct {
		Link    string
		Count   int
		Settled bool
		Frames  int
		Message message
	}
	// credit grants so much, and has it drained. Tokens claim messages that were parked, on RabbitMQ
	// 4.4; one that isn't text makes them a list.
	credit struct {
		Link   string
		N      uint32
		Drain  bool
		Tokens []any
	}
	// settle settles the unsettled deliveries of a link from the First to the Last, counted
	// from 0. Unsettled leaves the end of it to the broker.
	settle struct {
		Link        string
		First, Last int
		Outcome     outcome
		Unsettled   bool
	}
	// again settles once more what was settled as the Nth.
	again struct {
		Link    string
		N       int
		Outcome outcome
	}
	detach struct {
		Link string
		Keep bool
	}
	endSession struct{ Session string }
	// cut ends a connection without a word; hangUp says so.
	cut    struct{ Conn string }
	hangUp struct{ Conn string }
)

// message is what is published.
type message struct {
	To, Subject string
	// Header has the fields that aren't false or 0; Priority is one more than the priority.
	Durable     bool
	Priority    int
	TTL         uint32
	Count       uint32
	Annotations args
	Properties  args
	Size        int
	Raw         []byte
	Value       any
}

// outcome is a delivery state. Kind "" is accepted.
type outcome struct {
	Kind                  string
	Failed, Undeliverable bool
	Annotations           args
	Error                 string
}

// args are the entries of a map with text keys.
type args map[string]any

// brief is a time in milliseconds that is over when the operation behind it begins, and long
// one that isn't over within the run.
const (
	brief = 20
	long  = 3_600_000
)

// after is a moment, in milliseconds from now.
type after int64

// expedited says whether something of an operation takes a brief time.
func expedited(op operation) bool {
	any := func(a args) bool {
		for k, v := range a {
			if k == "x-message-ttl" && (v == int64(0) || v == uint8(3)) {
				return true
			}
			switch v {
			case int64(brief), uint64(brief), int32(brief), uint32(brief), after(brief):
				return true
			}
		}
		return false
	}
	switch op := op.(type) {
	case declare:
		return any(op.Arguments)
	case publish:
		return op.Message.TTL == brief || any(op.Message.Annotations)
	case settle:
		return any(op.Outcome.Annotations)
	}
	return false
}

func (s sequence) String() string {
	var b strings.Builder
	for _, op := range s {
		b.WriteString("\t" + show(reflect.ValueOf(op)) + ",\n")
	}
	return b.String()
}

// show prints a value in Go, without the fields that are zero.
func show(v reflect.Value) string {
	if v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	if !v.IsValid() {
		return "nil"
	}
	name := strings.TrimPrefix(v.Type().String(), "differ.")
	switch v.Kind() {
	case reflect.Struct:
		var fields []string
		for i := range v.NumField() {
			if f := v.Field(i); !f.IsZero() {
				fields = append(fields, v.Type().Field(i).Name+": "+show(f))
			}
		}
		return name + "{" + strings.Join(fields, ", ") + "}"
	case reflect.Map:
		if m, ok := v.Interface().(args); ok {
			var entries []string
			for _, k := range slices.Sorted(maps.Keys(m)) {
				entries = append(entries, strconv.Quote(k)+": "+show(reflect.ValueOf(m[k])))
			}
			return "args{" + strings.Join(entries, ", ") + "}"
		}
	case reflect.Slice:
		if v.Type() == reflect.TypeFor[[]byte]() {
			return fmt.Sprintf("[]byte(%q)", v.Bytes())
		}
		var items []string
		for i := range v.Len() {
			items = append(items, show(v.Index(i)))
		}
		return name + "{" + strings.Join(items, ", ") + "}"
	case reflect.String, reflect.Bool, reflect.Int:
		if name == v.Kind().String() {
			return fmt.Sprintf("%#v", v.Interface())
		}
	}
	return fmt.Sprintf("%s(%#v)", name, v.Interface())
}
