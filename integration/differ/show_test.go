package differ

import (
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// text is a value of AMQP, with its type where Go's doesn't say it. Moments are only that,
// since no two runs have the same.
func text(v any) string {
	switch v := v.(type) {
	case nil:
		return "nil"
	case frames.Map:
		var all []string
		for _, e := range v {
			all = append(all, text(e.Key)+"="+text(e.Value))
		}
		slices.Sort(all) // RabbitMQ's have no order
		return "{" + strings.Join(all, " ") + "}"
	case frames.List:
		var all []string
		for _, item := range v {
			all = append(all, text(item))
		}
		return "[" + strings.Join(all, " ") + "]"
	case frames.Array:
		return "array" + text(frames.List(v.Elements))
	case string:
		return strconv.Quote(v)
	case []byte:
		if len(v) > 60 {
			return fmt.Sprintf("%d bytes of %q", len(v), v[:8])
		}
		return fmt.Sprintf("bytes %q", v)
	case frames.Timestamp:
		return moment("timestamp", int64(v))
	case int64:
		return moment("long", v)
	case uint64:
		return moment("ulong", int64(v))
	case frames.Symbol:
		return string(v)
	}
	return fmt.Sprintf("%s(%v)", strings.TrimPrefix(fmt.Sprintf("%T", v), "frames."), v)
}

var lineBreak = regexp.MustCompile(`\n\s*`)

func moment(kind string, v int64) string {
	if v > 1e11 {
		return kind + " of now"
	}
	return fmt.Sprintf("%s(%d)", kind, v)
}

func detail(e *frames.Error) string {
	if e == nil {
		return "without an error"
	}
	if e.Condition == "amqp:internal-error" {
		return "internal error" // RabbitMQ shows its stack
	}
	// RabbitMQ breaks long terms into lines.
	return fmt.Sprintf("%s %q %s", e.Condition, lineBreak.ReplaceAllString(e.Description, ""), text(e.Info))
}

func shownState(state any) string {
	switch s := state.(type) {
	case *frames.Accepted:
		return "accepted"
	case *frames.Released:
		return "released"
	case *frames.Rejected:
		return "rejected " + detail(s.Error)
	case *frames.Modified:
		return fmt.Sprintf("modified failed %v undeliverable %v %s", s.DeliveryFailed, s.UndeliverableHere, text(s.Annotations))
	}
	return fmt.Sprintf("%T", state)
}

func shownMessage(m *frames.Message) string {
	var b strings.Builder
	if h := m.Header; h != nil {
		fmt.Fprintf(&b, "header{durable %v priority %s ttl %s first %v count %d} ", h.Durable, optional(h.Priority), optional(h.TTL), h.FirstAcquirer, h.DeliveryCount)
	}
	if len(m.DeliveryAnnotations) > 0 {
		fmt.Fprintf(&b, "delivery annotations%s ", text(m.DeliveryAnnotations))
	}
	fmt.Fprintf(&b, "annotations%s ", text(m.Annotations))
	if p := m.Properties; p != nil {
		fmt.Fprintf(&b, "properties{id %s to %s subject %s} ", text(p.MessageID), text(p.To), optional(p.Subject))
	}
	if m.ApplicationProperties != nil {
		fmt.Fprintf(&b, "application properties%s ", text(m.ApplicationProperties))
	}
	b.WriteString(shownBody(m.Body))
	return b.String()
}

func shownBody(b []byte) string {
	var all []string
	for len(b) > 0 {
		v, rest, err := frames.ReadValue(b)
		if err != nil {
			return fmt.Sprintf("%d bytes that can't be read", len(b))
		}
		d, ok := v.(frames.Described)
		if !ok {
			return "no section"
		}
		all = append(all, fmt.Sprintf("%v:%s", d.Descriptor, text(d.Value)))
		b = rest
	}
	return strings.Join(all, " ")
}

func optional[T any](o frames.Optional[T]) string {
	if !o.Set {
		return "-"
	}
	return fmt.Sprint(o.Value)
}

// shownAnswer is an answer of the management, without the names of nodes.
func shownAnswer(m *frames.Message) string {
	v, _, err := frames.ReadValue(m.Body)
	if err != nil {
		return "an answer that can't be read"
	}
	d, _ := v.(frames.Described)
	body := d.Value
	if fields, ok := body.(frames.Map); ok {
		body = frames.Map(slices.DeleteFunc(slices.Clone(fields), func(e frames.Entry) bool { return e.Key == "leader" || e.Key == "replicas" }))
	}
	shown := text(body)
	if list, ok := body.(frames.List); ok { // bindings, in any order
		var all []string
		for _, item := range list {
			all = append(all, text(withoutHash(item)))
		}
		slices.Sort(all)
		shown = strings.Join(all, " ")
	}
	return m.Properties.Subject.Value + " " + shown
}

// withoutHash is a binding without the part of its location that RabbitMQ reckons its own way.
func withoutHash(v any) any {
	m, ok := v.(frames.Map)
	if !ok {
		return v
	}
	m = slices.Clone(m)
	for i, e := range m {
		if at, ok := e.Value.(string); ok && e.Key == "location" {
			m[i].Value, _, _ = strings.Cut(at, ";args=")
		}
	}
	return m
}

func attached(a *frames.Attach) string {
	source, target := "none", text(a.Target)
	if s := a.Source; s != nil {
		source = fmt.Sprintf("{%s durable %s expiry %s distribution %s filter %s default %s outcomes %v}", text(s.Address), optional(s.Durable), s.ExpiryPolicy, s.DistributionMode, text(s.Filter), shownState(s.DefaultOutcome), s.Outcomes)
	}
	if t, ok := a.Target.(*frames.Target); ok {
		target = "none"
		if t != nil {
			target = fmt.Sprintf("{%s durable %s expiry %s}", text(t.Address), optional(t.Durable), t.ExpiryPolicy)
		}
	}
	return fmt.Sprintf("attach handle %d modes %s %s count %s size %s source %s target %s offers %v", a.Handle, optional(a.SenderSettleMode), optional(a.ReceiverSettleMode), optional(a.InitialDeliveryCount), optional(a.MaxMessageSize), source, target, a.OfferedCapabilities)
}

func sorted(a args) []string { return slices.Sorted(maps.Keys(a)) }

func escape(s string) string { return url.QueryEscape(s) }
