package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/operate/desk"
)

func (c *command) dlqShow() *cobra.Command {
	var raw bool
	cmd := &cobra.Command{
		Use:   "show QUEUE ID",
		Short: "Show one message with its history",
		Long: `Show one message: why it was dead-lettered, its history, properties, and body. It stays
in the queue. "type" is the property type of AMQP 0-9-1. --raw adds AMQP's header, the
annotations of RabbitMQ and hopback, and the type of each value, as export writes them.`,
		Example: `  hopback dlq show orders.dead order-4711
  hopback dlq show orders.dead 5b0c6a7d1e2f3a4b5c6d7e8f --raw`,
		Args:              takes(2, 2, "QUEUE ID"),
		ValidArgsFunction: c.queueThenID(),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				e := c.early(ctx, args[0])
				_, err := d.Show(ctx, desk.ShowConfig{
					Queue: args[0], ID: args[1], Accept: c.accepted(), OnProgress: e.notify,
					OnFound: func(m desk.DeadLetter) { e.print(m, func(b *strings.Builder) { messageText(b, m, raw) }) },
				})
				e.end()
				return e.over(missed(err))
			})
		},
	}
	cmd.Flags().BoolVar(&raw, "raw", false, "show everything that AMQP transfers, with types")
	c.outputFlag(cmd, "the message")
	return cmd
}

func messageText(b *strings.Builder, m desk.DeadLetter, raw bool) {
	var rows [][]string
	field := func(name, value string) {
		if value != "" {
			rows = append(rows, []string{name, value})
		}
	}
	field("id", m.ID)
	field("message-id", m.MessageID)
	headers, kind := sendersAnnotations(m.Annotations)
	field("type", kind)
	field("queue", m.Queue)
	field("reason", string(m.Reason))
	field("error", errorText(m.ErrorType, m.Error))
	field("unreadable", m.Unreadable)
	field("dead-lettered", when(m.DeadLetteredAt))
	field("attempts", fmt.Sprintf("%s, %s", plural(m.Retries, "retry", "retries"), count(m.Replays, "replay")))
	field("published to", publishedTo(m.Exchange, m.RoutingKey))
	field("worker", m.Worker)
	field("group", m.Group)
	field("size", count(m.Size, "byte"))
	if m.HiddenHeaders {
		field("headers", "may be incomplete: see --accept "+string(desk.WarningHeaders))
	}
	if raw {
		field("header", fmt.Sprintf("durable %t, priority %d, ttl %d ms, delivery-count %d", m.Durable, m.Priority, m.TTL, m.DeliveryCount))
	}
	table(b, rows)
	historyText(b, m.History)
	section(b, "PROPERTIES", m.Properties, raw)
	section(b, "APPLICATION PROPERTIES", m.ApplicationProperties, raw)
	if !raw {
		section(b, "ANNOTATIONS OF THE SENDER", headers, raw)
	}
	if raw {
		section(b, "ANNOTATIONS", m.Annotations, raw)
		section(b, "FOOTER", m.Footer, raw)
	}
	form := m.BodyForm
	if m.BodyCut {
		form += ", cut"
	}
	fmt.Fprintf(b, "\nBODY (%s, %s)\n", form, count(m.BodySize, "byte"))
	for line := range strings.Lines(m.Body) {
		b.WriteString(clean(strings.TrimRight(line, "\r\n")) + "\n")
	}
}

// sendersAnnotations are the annotations that neither RabbitMQ nor hopback has written, and the
// type of AMQP 0-9-1, which is among them. Headers of AMQP 0-9-1 that begin with x- are there.
func sendersAnnotations(text json.RawMessage) (rest json.RawMessage, kind string) {
	var pairs [][2]json.RawMessage
	if json.Unmarshal(text, &pairs) != nil {
		return nil, ""
	}
	var kept [][2]json.RawMessage
	for _, p := range pairs {
		name := plainValue(p[0])
		switch {
		case name == "x-basic-type":
			kind = plainValue(p[1])
		case ownAnnotation(name):
		default:
			kept = append(kept, p)
		}
	}
	rest, _ = json.Marshal(kept)
	return rest, kind
}

// ownAnnotation reports whether RabbitMQ or hopback writes the annotation. --raw shows it.
func ownAnnotation(name string) bool {
	for _, prefix := range []string{"x-opt-hopback-", "x-hopback-", "x-first-death-", "x-last-death-", "x-opt-rabbitmq-"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	switch name {
	case "x-exchange", "x-routing-key", "x-opt-deaths", "x-delivery-count", "x-acquired-count", "x-opt-delivery-time", "x-retry-count":
		return true
	}
	return false
}

func publishedTo(exchange, key string) string {
	switch {
	case exchange == "" && key == "":
		return ""
	case exchange == "":
		return "queue " + key
	case key == "":
		return "exchange " + exchange
	}
	return fmt.Sprintf("exchange %s, routing key %s", exchange, key)
}

// historyText is a table of what happened to a message, oldest first.
func historyText(b *strings.Builder, events []desk.HistoryEvent) {
	if len(events) == 0 {
		return
	}
	b.WriteString("\nHISTORY\n")
	rows := [][]string{{"TIME", "EVENT", "QUEUE", "REASON", "DETAILS"}}
	for _, h := range events {
		var details []string
		if h.Count > 1 {
			times := fmt.Sprintf("%d times", h.Count)
			if !h.Since.IsZero() {
				times += " since " + when(h.Since)
			}
			details = append(details, times)
		}
		if h.Delay > 0 {
			details = append(details, "retry after "+h.Delay.String())
		}
		if h.Text != "" {
			details = append(details, h.Text)
		}
		rows = append(rows, []string{when(h.At), string(h.Kind), h.Queue, h.Reason, strings.Join(details, "; ")})
	}
	table(b, rows)
}

// section is a table of properties or annotations, which are in the JSON form of an export: an
// object, or a list of pairs.
func section(b *strings.Builder, title string, text json.RawMessage, raw bool) {
	rows := [][]string{{"NAME", "VALUE"}}
	var pairs [][2]json.RawMessage
	if json.Unmarshal(text, &pairs) != nil {
		var err error
		if pairs, err = members(text); err != nil {
			rows = append(rows, []string{"", string(text)})
		}
	}
	for _, p := range pairs {
		value := string(p[1])
		if !raw {
			value = plainValue(p[1])
		}
		rows = append(rows, []string{plainValue(p[0]), value})
	}
	if len(rows) > 1 {
		fmt.Fprintf(b, "\n%s\n", title)
		table(b, rows)
	}
}

// members are the members of a JSON object, in their order.
func members(text json.RawMessage) (pairs [][2]json.RawMessage, err error) {
	if len(text) == 0 {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(text))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("no object: %w", err)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, err
		}
		name, _ := key.(string)
		pairs = append(pairs, [2]json.RawMessage{json.RawMessage(strconv.Quote(name)), value})
	}
	return pairs, nil
}

// plainValue is a value without its AMQP type, if it is a simple one.
func plainValue(text json.RawMessage) string {
	var s string
	if json.Unmarshal(text, &s) == nil {
		return s
	}
	var typed map[string]json.RawMessage
	if json.Unmarshal(text, &typed) == nil && len(typed) == 1 {
		for _, v := range typed {
			if v = bytes.TrimSpace(v); len(v) > 0 && v[0] != '{' && v[0] != '[' {
				return plainValue(v)
			}
		}
	}
	return string(text)
}
