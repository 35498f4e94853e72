package hopbackotel

import (
	"net"
	"strconv"
	"strings"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
)

// places has what is known about each queue or address, which is computed once. Beyond so
// many nothing is kept.
type places[K comparable, V any] struct {
	most int
	make func(K) *V

	mu    sync.RWMutex
	known map[K]*V
}

func (p *places[K, V]) get(k K) *V {
	p.mu.RLock()
	v := p.known[k]
	p.mu.RUnlock()
	if v != nil {
		return v
	}
	fresh := p.make(k)
	p.mu.Lock()
	defer p.mu.Unlock()
	if v := p.known[k]; v != nil {
		return v
	}
	if len(p.known) < p.most {
		if p.known == nil {
			p.known = map[K]*V{}
		}
		p.known[k] = fresh
	}
	return fresh
}

// server is where a Conn is connected to, as attributes.
type server struct{ attributes []attribute.KeyValue }

func newServer(hostPort string) *server {
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		return &server{}
	}
	all := []attribute.KeyValue{semconv.ServerAddress(valid(host))}
	if n, err := strconv.Atoi(port); err == nil {
		all = append(all, semconv.ServerPort(n))
	}
	return &server{all}
}

// other stands for all names beyond MaxNames.
const other = "_other"

// names distinguishes up to a number of names.
type names struct {
	most int

	mu    sync.RWMutex
	known map[string]struct{}
}

// bounded returns name, or other.
func (n *names) bounded(name string) string {
	n.mu.RLock()
	_, known := n.known[name]
	full := len(n.known) >= n.most
	n.mu.RUnlock()
	switch {
	case known:
		return name
	case full:
		return other
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.known == nil {
		n.known = map[string]struct{}{}
	}
	if _, known = n.known[name]; !known && len(n.known) >= n.most {
		return other
	}
	n.known[strings.Clone(name)] = struct{}{}
	return name
}

// queue is what is known about a work queue.
type queue struct {
	process, settle               string // names of spans
	processOptions, settleOptions []trace.SpanStartOption
	measured                      *measuredQueue
}

func (in *follower) newQueue(name string) *queue {
	return &queue{
		process: "process " + name, settle: "settle " + name,
		processOptions: options(trace.SpanKindConsumer, "process", semconv.MessagingOperationTypeProcess, semconv.MessagingDestinationName(name)),
		settleOptions:  options(trace.SpanKindClient, "settle", semconv.MessagingOperationTypeSettle, semconv.MessagingDestinationName(name)),
		measured:       in.numbers.queue(name),
	}
}

func options(kind trace.SpanKind, operation string, more ...attribute.KeyValue) []trace.SpanStartOption {
	all := append([]attribute.KeyValue{semconv.MessagingSystemRabbitMQ, semconv.MessagingOperationName(operation)}, more...)
	return []trace.SpanStartOption{trace.WithSpanKind(kind), trace.WithAttributes(all...)}
}

// targetKey is an address. PerMessage says that there is no bound to such addresses.
type targetKey struct {
	to         address.Address
	perMessage bool
}

// target is what is known about an address that messages are sent to.
type target struct {
	publish, create                          string // names of spans
	sendOptions, batchOptions, createOptions []trace.SpanStartOption
	key                                      string // routing key
	*measuredTarget
}

func (in *follower) newTarget(k targetKey) *target {
	name, template := destination(k.to), ""
	short := name
	more := []attribute.KeyValue{semconv.MessagingDestinationName(name)}
	if k.perMessage {
		template = templateOf(k.to)
		short = template
		more = append(more, semconv.MessagingDestinationTemplate(template))
	}
	t := &target{publish: "publish " + short, create: "create " + short, key: k.to.RoutingKey()}
	if k.to.IsQueue() {
		t.key = k.to.QueueName() // the default exchange routes by it
	}
	t.sendOptions = options(trace.SpanKindProducer, "publish", append(more, semconv.MessagingOperationTypeSend)...)
	t.batchOptions = options(trace.SpanKindClient, "publish", append(more, semconv.MessagingOperationTypeSend)...)
	t.createOptions = options(trace.SpanKindProducer, "create", append(more, semconv.MessagingOperationTypeCreate)...)
	t.measuredTarget = in.numbers.target(name, template)
	return t
}

// destination is a destination's name by the convention for RabbitMQ:
// {exchange}:{routing key}, with empty parts left out.
func destination(to address.Address) string {
	switch {
	case to.IsQueue():
		return to.QueueName()
	case to.IsZero():
		return "amq.default"
	case to.RoutingKey() == "":
		return to.ExchangeName()
	}
	return to.ExchangeName() + ":" + to.RoutingKey()
}

// templateOf stands for all addresses of messages that name their own.
func templateOf(to address.Address) string {
	if to.IsExchange() {
		return to.ExchangeName() + ":{routing_key}"
	}
	return "{queue}"
}

// describe sets what is one message's.
func (in *follower) describe(span trace.Span, t *target, s instrument.Sending) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(in.servers.get(s.Server()).attributes...)
	span.SetAttributes(ofMessage(make([]attribute.KeyValue, 0, 4), s.Message())...)
	if t.key != "" {
		span.SetAttributes(semconv.MessagingRabbitMQDestinationRoutingKey(t.key))
	}
}

// ofMessage appends the attributes that a message has in any operation.
func ofMessage(all []attribute.KeyValue, m *client.Message) []attribute.KeyValue {
	if id := messageID(m); id != "" {
		all = append(all, semconv.MessagingMessageID(id))
	}
	if m.Properties != nil {
		if id, ok := m.Properties.CorrelationID.(string); ok && id != "" {
			all = append(all, semconv.MessagingMessageConversationID(valid(id)))
		}
	}
	size := 0
	for _, part := range m.Data {
		size += len(part)
	}
	if size > 0 || m.Value == nil && len(m.Sequence) == 0 {
		all = append(all, semconv.MessagingMessageBodySize(size))
	}
	return all
}

// received is the convention's name of where a delivery came from:
// {exchange}:{routing key}:{queue}, with empty parts left out, and the key if it is the
// queue's name.
func received(d instrument.Delivery) (name, key string) {
	exchange, _ := d.Message().Annotations["x-exchange"].(string)
	key, _ = d.Message().Annotations["x-routing-key"].(string)
	parts := make([]string, 0, 3)
	if exchange != "" {
		parts = append(parts, exchange)
	}
	if key != "" && key != d.Queue() {
		parts = append(parts, key)
	}
	return valid(strings.Join(append(parts, d.Queue()), ":")), valid(key)
}
