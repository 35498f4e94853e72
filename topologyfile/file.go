package topologyfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// MaxSize is the largest size of a file in bytes, enough for some ten thousand
// queues.
const MaxSize = 1 << 20

// File is a valid topology file.
type File struct {
	// Policy is the policy of the section retry, for retry.With in a worker. The
	// worker adds RetryIf and Rules. A rule with delays of its own needs queues
	// for them, which aren't in Topology.
	Policy retry.Policy
	// Work are the work-queues, and Other what else is declared.
	Work  []declare.QuorumQueue
	Other declare.Topology
	// Topology is all of it: what the policy needs for the work queues, and the
	// rest.
	Topology declare.Topology
}

// Parse reads a file. name stands in its errors. The error is every *[Error],
// joined, up to 20 of them.
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
		return whole("isn't text in UTF-8", "give a YAML file")
	case len(text) > MaxSize:
		return whole(fmt.Sprintf("has more than %d bytes, and so isn't a topology file", MaxSize), "give a YAML file of at most that size, or split it")
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
		return whole("is empty", "name a work queue:\n\nwork-queues:\n  orders:\n")
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		r.bad(at{node: root}, value(root), fmt.Sprintf("is %s, and should be a mapping", is(root)), "begin it with work-queues: for example")
		return nil
	}
	var second yaml.Node
	switch err := decoder.Decode(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		return r.notYAML(err, lines.read)
	default:
		r.bad(at{node: &second}, nil, "has a second document", "keep each topology in a file of its own")
		return nil
	}
	return root
}

// notYAML reports a syntax error. read is how many lines the parser has read.
func (r *reader) notYAML(err error, read int) *yaml.Node {
	// The parser says "yaml: line 3: ..." or leaves the line out. Its line is that of
	// the list, mapping or text that it is in the middle of, or the one before. It
	// stops reading where it notices what is wrong, and that is where people look;
	// only for quotes that aren't closed it reads on to the end.
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	n := &yaml.Node{Line: max(read, 1)}
	var line int
	if count, _ := fmt.Sscanf(text, "line %d:", &line); count == 1 {
		_, text, _ = strings.Cut(text, ": ")
		if strings.Contains(text, "unexpected end of stream") {
			n.Line = line
		}
	}
	r.wrap(at{node: n}, argument.New("the file", nil, "isn't YAML: "+text, "mend it in this line or above it; tabs can't indent, and names with special characters need quotes"))
	return nil
}

// lineReader hands out a line at a time, so that it is known how far the parser came.
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
		Strategy: s.strategy, Names: s.names,
	}
	here := at{node: root}.retry()
	switch {
	case len(s.delays) > 0 && s.exponential.first > 0:
		r.bad(here, nil, "has both delays and exponential", "keep one of them")
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
	if len(r.errs) == 0 {
		r.wrap(here, inFile(p.Validate()))
	}
	return p
}

// retry is the place of the retry section.
func (a at) retry() at {
	for i := 0; i+1 < len(a.node.Content); i += 2 {
		if a.node.Content[i].Value == "retry" {
			return at{a.node.Content[i], "retry"}
		}
	}
	return at{a.node, "retry"}
}

// inFile says things in the file's words rather than in Go's.
func inFile(err error) error {
	var e *argument.Error
	if err == nil || !errors.As(err, &e) {
		return err
	}
	said := *e
	said.Name = goToFile.Replace(said.Name)
	said.Remedy = inKeys(goToFile.Replace(said.Remedy))
	if said.Err != nil {
		said.Err = inFile(said.Err)
	}
	return &said
}

var goToFile = strings.NewReplacer(
	"Policy.Backoff", "retry.delays", "Policy.MaxRetries", "retry.max-retries", "Policy.AnyDelay", "retry.any-delay", "Policy.Immediate", "retry.immediate",
	"Policy.Names.Prefix", "retry.names.prefix", "Policy.Names.", "retry.names: ", "Ladder.Unit", "retry.any-delay.unit", "Ladder.Levels", "retry.any-delay.levels",
	"0 for the default, or retry.NoRetries", "or none", "AnyDelay", "any-delay", "declare.", "", "leave it nil", "leave it out",
	"round it with Round(time.Second)", "write whole seconds", "round it with Round(time.Millisecond)", "write whole milliseconds",
	"set it to declare.AtMostOnce", "set its strategy to at-most-once", "set DeadLetter.Strategy to declare.AtMostOnce", "give dead-letter the strategy at-most-once",
)

var (
	// goValue begins the names of declare's errors: QuorumQueue("orders").
	goValue = regexp.MustCompile(`^(QuorumQueue|ClassicQueue|Stream|RawQueue|Exchange|Binding)\(.*\)`)
	goField = regexp.MustCompile(`\b(leave|set) ([A-Z][A-Za-z]+)`)
)

// inKeys writes the fields that a remedy names as keys.
func inKeys(remedy string) string {
	return goField.ReplaceAllStringFunc(remedy, func(m string) string {
		verb, field, _ := strings.Cut(m, " ")
		return verb + " " + kebab(field)
	})
}

// kebab is a Go field's name as a key: max-age for MaxAge.
func kebab(field string) string {
	var b strings.Builder
	before := '.'
	for _, r := range field {
		if unicode.IsUpper(r) && unicode.IsLower(before) {
			b.WriteByte('-')
		}
		b.WriteRune(unicode.ToLower(r))
		before = r
	}
	return b.String()
}

// build makes values of what was read, and checks each one at its place.
func (d *document) build(r *reader, f *File) {
	for _, w := range d.work {
		w.value.Name = w.name
		f.Work = append(f.Work, w.value)
	}
	for _, q := range d.queues {
		queue := withName(q.value, q.name)
		f.Other.Queues = append(f.Other.Queues, queue)
		switch v := queue.(type) {
		case declare.QuorumQueue:
			if v.DeadLetter.IsZero() {
				r.noDeadLetter(q.at)
				continue
			}
		case declare.ClassicQueue:
			if v.DeadLetter.IsZero() {
				r.noDeadLetter(q.at)
				continue
			}
			if !v.DeadLetter.IsDrop() && v.DeadLetter.Strategy != declare.AtMostOnce {
				r.bad(q.at, nil, "is a classic queue, which can't dead-letter at least once", "add strategy: at-most-once to its dead-letter, or make it a quorum queue")
				continue
			}
		}
		r.check(q.at, queue.Validate())
	}
	for _, x := range d.exchanges {
		x.value.Name = x.name
		f.Other.Exchanges = append(f.Other.Exchanges, x.value)
		r.check(x.at, x.value.Validate())
	}
	for _, b := range d.bindings {
		f.Other.Bindings = append(f.Other.Bindings, b.value)
		r.check(b.at, b.value.Validate())
	}
}

func (r *reader) noDeadLetter(a at) {
	r.bad(a, nil, "has no dead-letter, so rejected, expired and exceeding messages would be lost without a trace",
		"write dead-letter: {queue: NAME}, {exchange: NAME} or drop; or put it under work-queues, which get a dead-letter queue of their own")
}

// check adds what a value says is wrong with it, each part in the file's words.
func (r *reader) check(a at, err error) {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			r.check(a, err)
		}
		return
	}
	err = inFile(err)
	var e *argument.Error
	if errors.As(err, &e) {
		if label := goValue.FindString(e.Name); label != "" {
			field, rest, _ := strings.Cut(e.Name[len(label):], "[")
			e.Name = fmt.Sprintf("%.200s%s", a.path, kebab(field))
			if rest != "" {
				e.Name += "[" + rest
			}
		}
	}
	r.wrap(a, err)
}

// join makes one topology of all.
func (d *document) join(r *reader, root *yaml.Node, f *File) {
	parts := []declare.Topology{}
	if d.hasRetry || len(d.work) > 0 {
		// Each work queue alone, so that what is wrong with it has its place.
		for i, w := range d.work {
			one, err := retry.Topology(f.Policy, f.Work[i])
			if cause := errors.Unwrap(err); cause != nil {
				err = cause // without the queue's number
			}
			r.check(w.at, err)
			parts = append(parts, one)
		}
		if len(d.work) == 0 {
			one, err := retry.Topology(f.Policy)
			r.check(at{node: root}.retry(), err)
			parts = append(parts, one)
		}
	}
	if len(r.errs) > 0 {
		return
	}
	all, err := declare.Merge(append(parts, f.Other)...)
	if err != nil {
		d.contradictions(r, root, err)
		return
	}
	f.Topology = all
	if len(all.Exchanges)+len(all.Queues)+len(all.Bindings) == 0 {
		r.bad(at{node: root}, nil, "declares nothing", "name a work queue:\n\nwork-queues:\n  orders:\n")
	}
}

// contradictions finds the places of things that are declared twice in different
// ways: in the file, or there and by the retry topology.
func (d *document) contradictions(r *reader, root *yaml.Node, err error) {
	places := map[string]at{}
	for _, x := range d.exchanges {
		places[fmt.Sprintf("%q", x.name)] = x.at
	}
	for _, w := range d.work {
		places[fmt.Sprintf("%q", w.name)] = w.at
	}
	for _, q := range d.queues {
		places[fmt.Sprintf("%q", q.name)] = q.at
	}
	var joined interface{ Unwrap() []error }
	list := []error{err}
	if errors.As(err, &joined) {
		list = joined.Unwrap()
	}
	for _, err := range list {
		var e *argument.Error
		if !errors.As(err, &e) {
			r.wrap(at{node: root}, err)
			continue
		}
		place, ok := places[e.Value]
		if !ok {
			place = at{node: root, path: "the file"}
		}
		said := *e
		said.Name, said.Remedy = place.path, "give it another name, or leave it out here: what the retry topology needs is declared by itself"
		r.wrap(place, &said)
	}
}

// Encode writes t as a file from which Parse reads the same topology. It writes
// every queue, exchange and binding by itself, and no work-queues. An error is
// that of t.Validate.
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

// asValue is what a pointer to a queue points to: both are a declare.Queue.
func asValue(q declare.Queue) declare.Queue {
	switch q := q.(type) {
	case *declare.QuorumQueue:
		return *q
	case *declare.ClassicQueue:
		return *q
	case *declare.Stream:
		return *q
	case *declare.RawQueue:
		return *q
	}
	return q
}

// Schema returns the JSON schema of a file, for editors.
func Schema() []byte {
	schema := objectSchema(fileKeys())
	schema["$schema"] = "http://json-schema.org/draft-07/schema#"
	schema["title"] = "hopback topology"
	schema["type"], schema["minProperties"] = "object", 1
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	_ = e.Encode(schema) // maps, strings and numbers
	return b.Bytes()
}
