package frames

import "reflect"

// Optional is a field that may be absent.
type Optional[T any] struct {
	Value T
	Set   bool
}

// Some is a field that is there.
func Some[T any](v T) Optional[T] { return Optional[T]{v, true} }

// Or is the value, or def where the field is absent.
func (o Optional[T]) Or(def T) T {
	if o.Set {
		return o.Value
	}
	return def
}

// composite is a described list whose fields have names and types, such as a
// performative.
type composite interface {
	// kind is the code of its descriptor, and its name.
	kind() (code uint64, name string)
	// walk goes through its fields in their order. The same walk reads and writes, so
	// reader and writer agree.
	walk(f *fields)
}

// composites has an empty one of each kind, by the code and the name of its descriptor.
var composites = func() map[any]func() composite {
	all := map[any]func() composite{}
	for _, make := range []func() composite{
		func() composite { return &Open{} }, func() composite { return &Begin{} }, func() composite { return &Attach{} },
		func() composite { return &Flow{} }, func() composite { return &Transfer{} }, func() composite { return &Disposition{} },
		func() composite { return &Detach{} }, func() composite { return &End{} }, func() composite { return &Close{} },
		func() composite { return &Error{} }, func() composite { return &Source{} }, func() composite { return &Target{} },
		func() composite { return &Received{} }, func() composite { return &Accepted{} }, func() composite { return &Rejected{} },
		func() composite { return &Released{} }, func() composite { return &Modified{} },
		func() composite { return &Mechanisms{} }, func() composite { return &Init{} }, func() composite { return &Challenge{} },
		func() composite { return &Response{} }, func() composite { return &Outcome{} },
		func() composite { return &MessageHeader{} }, func() composite { return &Properties{} },
	} {
		code, name := make().kind()
		all[code] = make
		all[Symbol("amqp:"+name+":list")] = make
	}
	return all
}()

// described reads a described value: a pointer to a composite if it is one that is
// known, and a Described if not.
func (d *decoder) described() any {
	if len(d.b) == 0 || d.b[0] != CodeDescribed {
		d.fail("a value without a descriptor")
		return nil
	}
	d.take(1)
	if !d.deeper() {
		return nil
	}
	defer func() { d.depth-- }()
	descriptor := d.value()
	switch descriptor.(type) {
	case uint64, Symbol:
	default:
		return Described{descriptor, d.value()}
	}
	make, ok := composites[descriptor]
	if !ok {
		return Described{descriptor, d.value()}
	}
	c := make()
	d.fields(c)
	if d.err != nil {
		return nil
	}
	return c
}

// fields reads the list of c's fields.
func (d *decoder) fields(c composite) { d.walk(c, &fields{}) }

// walk is fields with a walk that may be used again.
func (d *decoder) walk(c composite, f *fields) {
	_, name := c.kind()
	*f = fields{d: d, name: name}
	switch code := byte(d.number(1)); {
	case d.err != nil:
		return
	case code == CodeList0:
		c.walk(f)
	case code == CodeList8 || code == CodeList32:
		var behind []byte
		f.left, behind = d.enter(code)
		if !d.room(f.left) {
			return
		}
		c.walk(f)
		for ; f.left > 0 && d.err == nil; f.left-- {
			d.value() // of a later version
		}
		d.leave(behind)
	default:
		d.fail("%s isn't a list but 0x%02x", name, code)
	}
}

// composite writes c.
func (e *encoder) composite(c composite) { e.walk(c, &fields{}) }

// walk is composite with a walk that may be used again.
func (e *encoder) walk(c composite, f *fields) {
	if e.depth++; e.depth > MaxDepth {
		e.fail("values are nested more than %d deep", MaxDepth)
		return
	}
	code, name := c.kind()
	e.b = append(e.b, CodeDescribed)
	e.value(code)
	at := len(e.b)
	e.b = append(e.b, CodeList32)
	sizes := e.begin()
	*f = fields{e: e, name: name, end: len(e.b)}
	c.walk(f)
	e.depth--
	if e.err != nil {
		return
	}
	e.b = e.b[:f.end] // absent fields at the end are left out
	if f.count == 0 {
		e.b = append(e.b[:at], CodeList0)
		return
	}
	e.end(sizes, f.count)
	e.shorten(at)
}

// fields is a walk through a composite's fields. It either reads or writes.
type fields struct {
	name string

	d    *decoder
	left int // fields that are still to come

	e          *encoder
	n          int // fields written
	count, end int // as of the last that isn't absent
}

// read returns the next field, nil if it is absent.
func (f *fields) read() any {
	if f.left == 0 || f.d.err != nil {
		return nil
	}
	f.left--
	return f.d.value()
}

// write writes the next field; absent is nil.
func (f *fields) write(v any) {
	f.e.value(v)
	f.n++
	if v != nil {
		f.count, f.end = f.n, len(f.e.b)
	}
}

func (f *fields) wrong(v any, want any) {
	f.d.fail("%s has a %T in place of a %T", f.name, v, want)
}

// field reads or writes one. there says that it isn't absent when it is written, and set that
// it wasn't when it was read.
func field[T any](f *fields, p *T, there bool) (set bool) {
	if f.e != nil {
		switch {
		case !there:
			f.write(nil)
		case !f.writeDirect(p):
			f.write(*p)
		}
		return there
	}
	if set, ok := f.readDirect(p); ok {
		return set
	}
	v := f.read()
	t, ok := v.(T)
	if !ok && v != nil {
		f.wrong(v, t)
	}
	*p = t
	return ok
}

// required is a field that must not be absent.
func required[T any](f *fields, p *T) {
	if !field(f, p, true) {
		f.d.fail("%s lacks a required %T", f.name, *p)
	}
}

// optional is a field that may be absent.
func optional[T any](f *fields, p *Optional[T]) { p.Set = field(f, &p.Value, p.Set) }

// orZero is a field that is absent where it has its zero value.
func orZero[T comparable](f *fields, p *T) {
	var zero T
	field(f, p, *p != zero)
}

// orNil is a binary or a map that is absent where it is nil.
func orNil[T []byte | Map](f *fields, p *T) { field(f, p, *p != nil) }

// anything is a field of any type.
func anything(f *fields, field *any) {
	if f.e != nil {
		f.write(*field)
		return
	}
	*field = f.read()
}

// symbols is a field that holds one symbol or an array of them. It is absent where it
// is nil. It is written as an array, also of one: RabbitMQ 4.3.6 looks for a capability in
// nothing else. A list is read as an array.
func symbols(f *fields, field *[]Symbol) {
	if f.e != nil {
		s := *field
		if s == nil {
			f.write(nil)
			return
		}
		a := Array{Type: CodeSymbol32, Elements: make([]any, len(s))}
		for i := range s {
			a.Elements[i] = s[i]
		}
		f.write(a)
		return
	}
	*field = nil
	var all []any
	switch v := f.read().(type) {
	case nil:
		return
	case Symbol:
		*field = []Symbol{v}
		return
	case Array:
		all = v.Elements
	case List: // as qpid-proton writes it in Python
		all = v
	default:
		f.wrong(v, Symbol(""))
		return
	}
	read := []Symbol{} // not as many as there are: if they're no symbols, they may take no room
	for _, e := range all {
		s, ok := e.(Symbol)
		if !ok {
			f.wrong(e, s)
			return
		}
		read = append(read, s)
	}
	*field = read
}

// child is a composite of one kind in a field.
func child[T any, P interface {
	*T
	composite
}](f *fields, field *P) {
	if f.e != nil {
		if *field == nil {
			f.write(nil)
		} else {
			f.composite(*field)
		}
		return
	}
	*field = nil
	v := f.described()
	c, ok := v.(P)
	if !ok && v != nil {
		f.wrong(v, c)
		return
	}
	*field = c
}

// children is a described value of any kind in a field: a pointer to a composite, or a
// Described.
func children(f *fields, field *any) {
	if f.e == nil {
		*field = f.described()
		return
	}
	switch c := (*field).(type) {
	case nil:
		f.write(nil)
	case composite:
		if v := reflect.ValueOf(c); v.Kind() == reflect.Pointer && v.IsNil() {
			f.write(nil)
			return
		}
		f.composite(c)
	case Described:
		f.write(c)
	default:
		f.e.fail("%s: no descriptor for a %T", f.name, c)
	}
}

func (f *fields) composite(c composite) {
	f.e.composite(c)
	f.n++
	f.count, f.end = f.n, len(f.e.b)
}

func (f *fields) described() any {
	if f.left > 0 && len(f.d.b) > 0 && f.d.b[0] == CodeDescribed {
		f.left--
		return f.d.described()
	}
	if v := f.read(); v != nil {
		f.d.fail("%s has a %T in place of a described value", f.name, v)
	}
	return nil
}
