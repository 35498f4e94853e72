package topologyfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/retry"
)

// maxSize is the largest size of a file in bytes, enough for some ten thousand
// queues.
const maxSize = 1 << 20

// File is the content of a valid topology file. [Parse] returns it.
type File struct {
	// Policy is the policy of the section retry. Pass it to retry.With in a worker, or to
	// retry.Central. Its Rules are for Central. A worker can set RetryIf and Rules. If it adds a
	// rule with different delays, it must declare their delay queues itself: they aren't in
	// Topology.
	Policy retry.Policy
	// Central is the section central, for retry.Central. It is nil if the file has no such
	// section.
	Central *retry.CentralConfig
	// Work contains the work-queues. Other contains the queues, exchanges, and bindings.
	Work  []declare.QuorumQueue
	Other declare.Topology
	// Fair contains the fair-queues, for fair.Consume and for publishers.
	Fair []fair.Queue
	// Topology is everything to declare: Other, the work queues, the fair queues, and the queues,
	// exchanges, and bindings that the policy needs for them.
	Topology declare.Topology
}

// Parse reads a file. name is the file's name, for errors. The error joins every *[Error], up to
// 20 of them.
func Parse(name string, text []byte) (File, error) {
	r := &reader{file: name}
	root := r.parse(text)
	if root == nil {
		return File{}, r.err()
	}
	var d document
	readKeys(r, at{node: root}, fileKeys(), &d)
	if len(r.errs) > 0 {
		return File{}, r.err()
	}
	f := File{Policy: d.retry.policy(r, root)}
	d.build(r, &f)
	if len(r.errs) > 0 {
		return File{}, r.err()
	}
	d.join(r, root, &f)
	if len(r.errs) > 0 {
		return File{}, r.err()
	}
	return f, nil
}

// parse returns the file's one mapping, or nil.
func (r *reader) parse(text []byte) *yaml.Node {
	whole := func(problem, remedy string) *yaml.Node {
		r.bad(at{node: &yaml.Node{}}, nil, problem, remedy)
		return nil
	}
	switch {
	case bytes.IndexByte(text, 0) >= 0 || !utf8.Valid(text):
		return whole("isn't text in UTF-8", "pass a YAML file")
	case len(text) > maxSize:
		return whole(fmt.Sprintf("has more than %d bytes, too many for a topology file", maxSize), "split it, or check that it is the right file")
	}
	lines := &lineReader{rest: text}
	decoder := yaml.NewDecoder(lines)
	var doc yaml.Node
	err := decoder.Decode(&doc)
	empty := errors.Is(err, io.EOF) || err == nil && (len(doc.Content) == 0 || doc.Content[0].ShortTag() == "!!null")
	if err != nil && !empty {
		return r.notYAML(err, lines.read)
	}
	if empty {
		return whole("is empty", "add a work queue:\n\nwork-queues:\n  orders:\n")
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		r.bad(at{node: root}, value(root), fmt.Sprintf("is %s, and should be a mapping", is(root)), "start the file with a section, such as work-queues:")
		return nil
	}
	var second yaml.Node
	switch err := decoder.Decode(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		return r.notYAML(err, lines.read)
	default:
		r.bad(at{node: &second}, nil, "has a second document", "put each topology into its own file")
		return nil
	}
	return root
}

// notYAML reports a syntax error. read is how many lines the parser has read.
func (r *reader) notYAML(err error, read int) *yaml.Node {
	// The parser says "yaml: line 3: ..." or leaves the line out. Its line is that of the list,
	// mapping, or text that it is reading, or the one before. It stops reading where it notices
	// the mistake, and that is where people search; only for unclosed quotes it reads to the end.
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	n := &yaml.Node{Line: max(read, 1)}
	var line int
	if count, _ := fmt.Sscanf(text, "line %d:", &line); count == 1 {
		_, text, _ = strings.Cut(text, ": ")
		if strings.Contains(text, "unexpected end of stream") {
			n.Line = line
		}
	}
	r.bad(at{node: n}, nil, "isn't YAML: "+text, "check this line and the one above; YAML doesn't allow tabs for indentation, and names with special characters need quotes")
	return nil
}

// lineReader returns one line at a time, to know how far the parser has read.
type lineReader struct {
	rest []byte
	read int
}

func (l *lineReader) Read(p []byte) (int, error) {
	if len(l.rest) == 0 {
		return 0, io.EOF
	}
	line := l.rest
	if i := bytes.IndexByte(line, '\n'); i >= 0 {
		line = line[:i+1]
	}
	n := copy(p, line)
	if l.rest = l.rest[n:]; n == len(line) {
		l.read++
	}
	return n, nil
}

func (s retrySection) policy(r *reader, root *yaml.Node) retry.Policy {
	p := retry.Policy{
		MaxRetries: int(s.maxRetries), Jitter: s.jitter, GiveUpAfter: s.giveUpAfter, Immediate: s.immediate,
		Strategy: s.strategy, ReplayByMove: s.replayByMove, Claimable: s.claimable, Names: s.names,
	}
	here := retryPlace(root)
	switch {
	case len(s.delays) > 0 && s.exponential.first > 0:
		r.bad(here.at, nil, "has both delays and exponential", "keep one of them")
	case len(s.delays) > 0:
		p.Backoff = retry.Delays(s.delays...)
	case s.exponential.first > 0:
		e := s.exponential
		if e.factor == 0 {
			e.factor = 2
		}
		p.Backoff = retry.Exponential(e.first, e.factor)
		if e.max > 0 {
			p.Backoff = p.Backoff.Cap(e.max)
		}
	}
	if s.hasLadder {
		p.AnyDelay = &s.anyDelay
	}
	for _, u := range s.rules {
		p.Rules = append(p.Rules, u.rule())
	}
	if len(r.errs) == 0 {
		r.check(here, p.Validate())
	}
	return p
}

func (u ruleSection) rule() retry.ErrorRule {
	e := retry.ErrorRule{Do: u.do, MaxRetries: int(u.maxRetries)}
	if len(u.delays) > 0 {
		e.Backoff = retry.Delays(u.delays...)
	}
	var values []any
	if u.value != nil {
		values = append(values, u.value)
	}
	byReason, byHeader := retry.OnReason(client.Reason(u.reason)), retry.OnHeader(u.header, values...)
	e.If = func(err error) bool {
		return (u.reason == "" || byReason(err)) && (u.header == "" || byHeader(err))
	}
	return e
}

func (c centralSection) config() retry.CentralConfig {
	return retry.CentralConfig{
		Queues: c.queues, FailedQueue: c.failedQueue, Counter: c.counter, CounterEnd: c.counterEnd, CounterExchange: c.counterExchange,
		ReasonKey: c.reasonKey, TextKey: c.textKey, TypeKey: c.typeKey,
	}
}

// retryPlace is the place of the retry section, which becomes a policy.
func retryPlace(root *yaml.Node) place {
	p := place{at: at{root, argument.Root("retry")}, fields: policyFields}
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value == "retry" {
			p.node, p.keys = root.Content[i], root.Content[i+1]
		}
	}
	return p
}

// policyFields are the fields of a retry.Policy.
var policyFields = append(goFields(retryKeys), goField{path: []string{"Backoff"}, keys: []string{"exponential", "delays"}})

// build makes values of what was read, and checks each one at its place.
func (d *document) build(r *reader, f *File) {
	for _, w := range d.work {
		w.value.Name = w.name
		f.Work = append(f.Work, w.value)
	}
	for _, q := range d.fair {
		f.Fair = append(f.Fair, q.value.of(q.name))
	}
	for _, q := range d.queues {
		queue := withName(q.value, q.name)
		f.Other.Queues = append(f.Other.Queues, queue)
		r.check(q.place(fieldsOf(queue)), queue.Validate())
	}
	for _, x := range d.exchanges {
		x.value.Name = x.name
		f.Other.Exchanges = append(f.Other.Exchanges, x.value)
		r.check(x.place(goFields(exchangeKeys)), x.value.Validate())
	}
	for _, b := range d.bindings {
		f.Other.Bindings = append(f.Other.Bindings, b.value)
		r.check(place{b.at, b.at.node, goFields(bindingKeys)}, b.value.Validate())
	}
}

// join makes one topology of all.
func (d *document) join(r *reader, root *yaml.Node, f *File) {
	parts := []declare.Topology{}
	if d.centralAt != nil {
		parts = d.centralParts(r, f)
	} else if d.hasRetry || len(d.work) > 0 {
		// Each work queue alone, so that what is wrong with it has its place.
		for i, w := range d.work {
			one, err := retry.Topology(f.Policy, f.Work[i])
			r.check(w.place(goFields(workKeys)), err)
			parts = append(parts, one)
		}
		if len(d.work) == 0 {
			one, err := retry.Topology(f.Policy)
			r.check(retryPlace(root), err)
			parts = append(parts, one)
		}
	}
	for i, q := range d.fair {
		if d.centralAt != nil {
			r.bad(q.at, nil, "isn't possible with central, which would return failed messages past the lanes", "put it into a file without central")
			continue
		}
		one, err := f.Fair[i].Topology(f.Policy, q.value.queue)
		r.check(q.place(goFields(fairKeys)), err)
		parts = append(parts, one)
	}
	if len(r.errs) > 0 {
		return
	}
	parts = append(parts, f.Other)
	all, err := declare.Merge(parts...)
	if err != nil {
		d.contradictions(r, root, parts, err)
		return
	}
	f.Topology = all
	if len(all.Exchanges)+len(all.Queues)+len(all.Bindings) == 0 && f.Central == nil {
		r.bad(at{node: root}, nil, "declares nothing", "add a work queue:\n\nwork-queues:\n  orders:\n")
	}
}

// centralParts is the topology for the section central.
func (d *document) centralParts(r *reader, f *File) (parts []declare.Topology) {
	here := place{at{d.centralAt, argument.Root("central")}, d.centralKeys, goFields(centralKeys)}
	cfg := d.central.config()
	if len(d.work) == 0 || len(cfg.Queues) > 0 {
		existing, err := retry.CentralTopology(f.Policy, cfg)
		r.check(here, err)
		parts = append(parts, existing)
	}
	all := cfg
	for i, w := range d.work {
		one := cfg
		one.Queues = nil
		t, err := retry.CentralTopology(f.Policy, one, f.Work[i])
		if e := (*argument.Error)(nil); errors.As(err, &e) && e.Path[0].Name == "CentralConfig" && e.Path[1].Name != "Queues" {
			r.check(here, err)
			break // the same for all
		}
		r.check(w.place(goFields(workKeys)), err)
		parts = append(parts, t)
		all.Queues = append(all.Queues, w.name)
	}
	f.Central = &all
	return parts
}

// contradictions finds the places of resources that are declared twice with different values: in
// the file, or in the file and by the retry topology.
func (d *document) contradictions(r *reader, root *yaml.Node, parts []declare.Topology, err error) {
	type resource struct{ kind, name string }
	places := map[resource]at{}
	for _, x := range d.exchanges {
		places[resource{"Exchanges", x.name}] = x.at
	}
	for _, w := range d.work {
		places[resource{"Queues", w.name}] = w.at
	}
	for _, q := range d.fair {
		for _, name := range q.value.of(q.name).Queues() {
			places[resource{"Queues", name}] = q.at
		}
	}
	for _, q := range d.queues {
		places[resource{"Queues", q.name}] = q.at
	}
	var all declare.Topology // as Merge counts them
	for _, t := range parts {
		all.Queues, all.Exchanges = append(all.Queues, t.Queues...), append(all.Exchanges, t.Exchanges...)
	}
	list := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		list = joined.Unwrap()
	}
	for _, err := range list {
		var e *argument.Error
		if !errors.As(err, &e) {
			r.add(root, err)
			continue
		}
		kind, name := contradiction(e.Path, all)
		place, ok := places[resource{kind, name}]
		if !ok {
			place = at{root, theFile}
		}
		logged := *e
		logged.Path, logged.Remedy = place.path, "use another name, or leave it out: the retry topology declares what it needs"
		r.add(place.node, &logged)
	}
}

// Encode writes t as a file from which [Parse] reads the same topology. Use it to convert an
// existing topology. It writes every queue, exchange, and binding separately, and no work-queues.
// The error is that of t.Validate.
func Encode(t declare.Topology) ([]byte, error) {
	if err := t.Validate(); err != nil {
		return nil, err
	}
	t, err := declare.Merge(t)
	if err != nil {
		return nil, err
	}
	var d document
	for _, x := range t.Exchanges {
		d.exchanges = append(d.exchanges, named[declare.Exchange]{name: x.Name, value: x})
	}
	for _, q := range t.Queues {
		d.queues = append(d.queues, named[declare.Queue]{name: q.Address().QueueName(), value: asValue(q)})
	}
	for _, b := range t.Bindings {
		d.bindings = append(d.bindings, placed[declare.Binding]{value: b})
	}
	root := &yaml.Node{Kind: yaml.MappingNode}
	for _, k := range fileKeys() {
		if k.write == nil {
			continue
		}
		if n := k.write(&d); n != nil {
			root.Content = append(root.Content, textNode(k.name), n)
		}
	}
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(root); err != nil {
		return nil, err
	}
	return b.Bytes(), e.Close()
}

// schemaID is where editors find the schema. SchemaStore's catalog names it: see integration/tools/release/README.md.
const schemaID = "https://raw.githubusercontent.com/hopback/hopback/main/operate/topologyfile/schema.json"

// Schema returns the JSON schema of a topology file, for editors. It is in draft-07.
func Schema() []byte {
	schema := objectSchema(fileKeys())
	schema["$id"] = schemaID
	schema["$schema"] = "http://json-schema.org/draft-07/schema#"
	schema["title"] = "hopback topology"
	schema["description"] = "Queues of RabbitMQ with their retries and dead letters, and other queues, exchanges, and bindings, for hopback."
	schema["type"], schema["minProperties"] = "object", 1
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	_ = e.Encode(schema) // maps, strings and numbers
	return b.Bytes()
}
