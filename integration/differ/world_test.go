package differ

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// step is what could be seen of an operation.
type step struct {
	// logged is what the broker said, in order for each link, each message that was published,
	// each request.
	logged map[string][]string
	// counts are of the queues, behind it.
	counts map[string]string
	// half is what was seen of its first half, of an operation that has two.
	half *step
}

// halved is an operation in two halves. The second half begins when the first one has had its
// effect. Otherwise a queue might come to the second one before its own dead letters are back,
// or to what another connection does before a settled message.
type halved interface{ then(w *world) }

// world is what a sequence runs in: a client of one broker, and what was seen.
type world struct {
	vhost  string
	prefix string // of all names
	dial   func() (net.Conn, error)
	// quiet returns when the broker in memory does nothing any more. It is nil with a real one:
	// the test waits until that has done what the one in memory did.
	quiet func()
	// hangs says, in memory, whether a queue has hung up, as RabbitMQ 4.3's may. A sequence ends
	// before that, unless hang is set: it harms what else is done with the broker.
	hangs    func(queue string) bool
	hang     bool
	patience time.Duration
	slowly   func(delete func()) // deletes what isn't deleted in a hurry

	events   chan event
	done     chan struct{}
	conns    map[string]*conn
	sessions map[string]*session
	links    map[string]*link
	queues   []string
	careful  map[string]time.Time // at-least-once queues, and when they were declared
	requests uint64
	replies  map[uint64]*frames.Message
	settled  map[string][]uint32
	regrant  *link // whose outcomes the second half is to show the effect of
	now      step
	before   step // the expected one before
	broken   error
}

// event is a frame, or the end of a connection.
type event struct {
	conn  *conn
	frame frames.Frame
	err   error
}

type conn struct {
	name     string
	nc       net.Conn
	opened   bool
	over     bool
	channels uint16
	sessions map[uint16]*session
}

type session struct {
	name    string
	conn    *conn
	channel uint16
	begun   bool
	over    bool
	handles uint32
	nextID  uint32 // of a delivery
	sent    uint32 // transfers
	got     uint32
	links   map[string]*link
	peers   map[uint32]*link
	out     map[uint32]string // what was published
}

type link struct {
	name      string
	session   *session
	handle    uint32
	sender    bool
	settled   bool
	opened    send // of a sender
	there     bool // the broker has attached it
	over      bool
	count     uint32
	credit    uint32
	published int
	first     *frames.Transfer
	payload   []byte
	unsettled []uint32 // delivery-ids
}

func newWorld(dial func() (net.Conn, error), vhost, prefix string) *world {
	return &world{
		vhost: vhost, prefix: prefix, dial: dial, patience: 20 * time.Second, slowly: func(f func()) { f() },
		events: make(chan event, 1<<14), done: make(chan struct{}), conns: map[string]*conn{}, sessions: map[string]*session{},
		links: map[string]*link{}, careful: map[string]time.Time{}, replies: map[uint64]*frames.Message{}, settled: map[string][]uint32{},
	}
}

// name is a sequence's name in this run, and plain the other way round.
func (w *world) name(s string) string  { return strings.ReplaceAll(s, "@", w.prefix) }
func (w *world) plain(s string) string { return strings.ReplaceAll(s, w.prefix, "@") }

func (w *world) say(stream, format string, args ...any) {
	w.now.logged[stream] = append(w.now.logged[stream], w.plain(fmt.Sprintf(format, args...)))
}

// play runs a sequence. want, if not nil, is what is awaited. It returns what was seen, up to
// the first step that differs.
func (w *world) play(s sequence, want []step) (seen []step, err error) {
	defer w.close()
	for _, op := range s {
		if d, ok := op.(declare); ok && !slices.Contains(w.queues, d.Queue) {
			w.queues = append(w.queues, d.Queue)
		}
	}
	expedite := false
	defer w.cleanUp()
	for i, op := range append(slices.Clone(s), w.tail()...) {
		if want != nil && i == len(want) {
			break
		}
		w.now = step{logged: map[string][]string{}, counts: map[string]string{}}
		op.do(w)
		if expedite = expedite || expedited(op); expedite {
			w.pause()
		}
		var wanted step
		if want != nil {
			wanted = want[i]
		}
		missing := false
		if op, ok := op.(halved); ok {
			w.before = w.see(wanted.half, w.before, expedite)
			half := step{logged: maps.Clone(w.now.logged), counts: maps.Clone(w.now.counts)}
			missing = want != nil && differ(half, *wanted.half)
			w.now.half = &half
			if op.then(w); expedite {
				w.pause()
			}
		}
		if !missing {
			w.before = w.see(&wanted, w.before, expedite)
		}
		hangs := slices.Contains(slices.Collect(maps.Values(w.now.counts)), hung)
		if hangs && !w.hang {
			break
		}
		seen = append(seen, w.now)
		if w.broken != nil || want != nil && differ(w.now, want[i]) || hangs {
			break
		}
	}
	return seen, w.broken
}

// hung is said in place of the counts of a queue that has: RabbitMQ's are old ones.
const hung = "hung"

// see sees what there is to be seen in memory, or awaits with a real broker what is wanted.
func (w *world) see(want *step, before step, expedite bool) step {
	if w.quiet != nil {
		w.until(never)
		w.observe(w.queues)
		return before
	}
	w.await(*want, before, expedite)
	return *want
}

// pause lets what is brief come to its end.
func (w *world) pause() {
	if w.quiet != nil {
		w.quiet()
		time.Sleep(time.Second)
		w.quiet()
		return
	}
	time.Sleep(2 * brief * time.Millisecond)
}

// await waits until the broker has said what is wanted, and the queues are as wanted.
// In a hurry each queue is asked for, since what is brief may be late.
func (w *world) await(want, before step, expedite bool) {
	deadline := time.Now().Add(w.patience)
	w.pump(deadline, func() bool { return same(w.now.logged, want.logged) || against(w.now.logged, want.logged) })
	if against(w.now.logged, want.logged) { // what else it says is soon said
		w.pump(time.Now().Add(100*time.Millisecond), never)
		return
	}
	var changed []string
	for _, q := range w.queues {
		if want.counts[q] != hung && (expedite || want.counts[q] != before.counts[q]) {
			changed = append(changed, q)
		} else {
			w.now.counts[q] = want.counts[q]
		}
	}
	for pause := time.Millisecond; len(changed) > 0 && w.broken == nil; pause = min(2*pause, 50*time.Millisecond) {
		w.observe(changed)
		changed = slices.DeleteFunc(changed, func(q string) bool { return w.now.counts[q] == want.counts[q] })
		if len(changed) == 0 || time.Now().After(deadline) {
			break
		}
		w.pump(time.Now().Add(pause), never)
	}
}

func never() bool { return false }

// pump carries out events until so, or until the deadline.
func (w *world) pump(deadline time.Time, so func() bool) bool {
	if w.quiet != nil {
		for !so() {
			w.quiet()
			if len(w.events) == 0 {
				return false
			}
			for len(w.events) > 0 {
				w.take(<-w.events)
			}
		}
		return true
	}
	var timer *time.Timer
	for {
		select {
		case e := <-w.events:
			w.take(e)
			continue
		default:
		}
		if so() {
			return true
		}
		if timer == nil {
			timer = time.NewTimer(time.Until(deadline))
			defer timer.Stop()
		}
		select {
		case e := <-w.events:
			w.take(e)
		case <-timer.C:
			return false
		}
	}
}

// until waits for an answer that has to come.
func (w *world) until(so func() bool) bool { return w.pump(time.Now().Add(w.patience), so) }

// observe counts what is in queues.
func (w *world) observe(queues []string) {
	for _, q := range queues {
		if w.hangs != nil && w.hangs(w.name(q)) {
			w.now.counts[q] = hung
			continue
		}
		m := w.request("GET", "/queues/"+q, nil)
		if m == nil {
			w.now.counts[q] = "no answer"
			continue
		}
		w.now.counts[q] = counted(m)
	}
}

// idle is counted of a queue without messages and consumers.
const idle = "0 messages, 0 consumers"

// counted is what an answer says of a queue's messages and consumers, or its status.
func counted(m *frames.Message) string {
	v, _, err := frames.ReadValue(m.Body)
	if err != nil {
		return m.Properties.Subject.Value
	}
	d, ok := v.(frames.Described).Value.(frames.Map)
	if !ok {
		return m.Properties.Subject.Value
	}
	messages, _ := d.Get("message_count")
	consumers, _ := d.Get("consumer_count")
	return fmt.Sprintf("%v messages, %v consumers", messages, consumers)
}

// conn is a connection, which is opened if it isn't yet. It is nil if that fails.
func (w *world) conn(name string) *conn {
	if c := w.conns[name]; c != nil && !c.over {
		return c
	}
	nc, err := w.dial()
	if err != nil {
		w.broken = errors.Join(w.broken, err)
		return nil
	}
	c := &conn{name: name, nc: nc, sessions: map[uint16]*session{}}
	w.conns[name] = c
	init, _ := frames.Append(frames.ProtocolSASL.Header(), frames.Frame{Type: frames.TypeSASL, Body: &frames.Init{Mechanism: "PLAIN", InitialResponse: []byte("\x00guest\x00guest")}})
	open, _ := frames.Append(frames.ProtocolAMQP.Header(), frames.Frame{Body: &frames.Open{ContainerID: "differ", Hostname: "vhost:" + w.vhost, ChannelMax: frames.Some(uint16(63)), MaxFrameSize: frames.Some(uint32(65536))}})
	if _, err = nc.Write(init); err == nil {
		go w.read(c, open)
	}
	if !w.until(func() bool { return c.opened || c.over }) || c.over {
		w.broken = errors.Join(w.broken, fmt.Errorf("connection %s isn't opened", name), err)
		return nil
	}
	return c
}

// read logs in, and reads what comes.
func (w *world) read(c *conn, open []byte) {
	r := frames.NewReader(c.nc, 64<<10, 1<<20)
	notify := func(e event) bool {
		select {
		case w.events <- e:
			return true
		case <-w.done:
			return false
		}
	}
	err := func() error {
		if _, err := r.AwaitProtocol(); err != nil {
			return err
		}
		if _, err := r.AwaitFrame(); err != nil {
			return err
		}
		if _, err := r.AwaitFrame(); err != nil {
			return err
		}
		if _, err := c.nc.Write(open); err != nil {
			return err
		}
		if _, err := r.AwaitProtocol(); err != nil {
			return err
		}
		for {
			f, err := r.AwaitFrame()
			if err != nil {
				return err
			}
			if f.Body != nil && !notify(event{conn: c, frame: f}) {
				return nil
			}
		}
	}()
	notify(event{conn: c, err: err})
}

func (c *conn) write(channel uint16, body frames.Performative, payload []byte) {
	if c.over {
		return
	}
	b, err := frames.Append(nil, frames.Frame{Channel: channel, Body: body, Payload: payload})
	if err != nil {
		panic(err)
	}
	_, _ = c.nc.Write(b)
}

// session is a session, which is begun if it isn't yet, such as the second one of the first
// connection: "c0.1".
func (w *world) session(name string) *session {
	if s := w.sessions[name]; s != nil && !s.over && !s.conn.over {
		return s
	}
	on, _, _ := strings.Cut(name, ".")
	c := w.conn(on)
	if c == nil || c.channels == 64 {
		return nil
	}
	// RabbitMQ 4.0 forgets a session some time after its end, so no channel is used again.
	s := &session{name: name, conn: c, channel: c.channels, links: map[string]*link{}, peers: map[uint32]*link{}, out: map[uint32]string{}}
	c.channels++
	c.sessions[s.channel] = s
	w.sessions[name] = s
	s.write(&frames.Begin{IncomingWindow: 1 << 20, OutgoingWindow: 1 << 20}, nil)
	if !w.until(func() bool { return s.begun || s.over }) || s.over {
		return nil
	}
	return s
}

func (s *session) write(body frames.Performative, payload []byte) {
	s.conn.write(s.channel, body, payload)
}

// gone notes that a session is over, and all its links with it.
func (s *session) gone() {
	s.over = true
	for _, l := range s.links {
		l.over = true
	}
}

// take carries out an event.
func (w *world) take(e event) {
	c := e.conn
	if e.err != nil || c.over {
		if !c.over {
			w.say(c.name, "the connection has ended")
		}
		c.gone()
		return
	}
	s := c.sessions[e.frame.Channel]
	switch b := e.frame.Body.(type) {
	case *frames.Open:
		c.opened = true
		return
	case *frames.Close:
		w.say(c.name, "close %s", detail(b.Error))
		c.write(0, &frames.Close{}, nil)
		c.gone()
		return
	}
	if s == nil || s.over {
		w.say(c.name, "%T for no session", e.frame.Body)
		return
	}
	switch b := e.frame.Body.(type) {
	case *frames.Begin:
		s.begun, s.got = true, b.NextOutgoingID
	case *frames.End:
		w.say(s.name, "end %s", detail(b.Error))
		s.write(&frames.End{}, nil)
		s.gone()
	case *frames.Attach:
		l := s.links[b.Name]
		if l == nil {
			w.say(s.name, "attach of %q", b.Name)
			return
		}
		l.there, s.peers[b.Handle] = true, l
		if !l.sender {
			l.count = b.InitialDeliveryCount.Or(0)
		}
		if l.name != "management" {
			w.say(l.name, "%s", attached(b))
		}
	case *frames.Flow:
		l := s.peers[b.Handle.Or(1<<32-1)]
		if l == nil || l.sender || l.name == "management" {
			return
		}
		l.count, l.credit = b.DeliveryCount.Or(0), b.LinkCredit.Or(0)
		w.say(l.name, "flow count %d credit %d available %d drain %v %s", l.count, l.credit, b.Available.Or(0), b.Drain, text(b.Properties))
	case *frames.Transfer:
		s.got++
		if l := s.peers[b.Handle]; l != nil {
			w.transfer(l, b, e.frame.Payload)
		}
	case *frames.Disposition:
		w.disposition(s, b)
	case *frames.Detach:
		l := s.peers[b.Handle]
		if l == nil {
			w.say(s.name, "detach of %d", b.Handle)
			return
		}
		w.say(l.name, "detach closed %v %s", b.Closed, detail(b.Error))
		if !l.over {
			s.write(&frames.Detach{Handle: l.handle, Closed: true}, nil)
		}
		l.over = true
		delete(s.peers, b.Handle)
	}
}

func (c *conn) gone() {
	c.over = true
	_ = c.nc.Close()
	for _, s := range c.sessions {
		s.gone()
	}
}

func (w *world) transfer(l *link, t *frames.Transfer, payload []byte) {
	if l.first == nil {
		l.first, l.payload = t, nil
	}
	l.payload = append(l.payload, payload...)
	if t.More {
		return
	}
	first := l.first
	l.first = nil
	m, err := frames.DecodeMessage(l.payload)
	if l.name == "management" {
		if err == nil {
			if id, ok := m.Properties.CorrelationID.(uint64); ok {
				w.replies[id] = m
			}
		}
		return
	}
	l.count++
	l.credit--
	id := first.DeliveryID.Or(0)
	if !first.Settled.Or(false) {
		l.unsettled = append(l.unsettled, id)
	}
	if err != nil {
		w.say(l.name, "delivery %x settled %v that can't be read", first.DeliveryTag, first.Settled.Or(false))
		return
	}
	w.say(l.name, "delivery %x settled %v %s", first.DeliveryTag, first.Settled.Or(false), shownMessage(m))
}

func (w *world) disposition(s *session, d *frames.Disposition) {
	for id := d.First; id <= d.Last.Or(d.First); id++ {
		if d.Role == frames.RoleReceiver {
			stream, ok := s.out[id]
			if !ok {
				stream = s.name
			}
			w.say(stream, "%s settled %v", shownState(d.State), d.Settled.Or(false))
			continue
		}
		for _, l := range s.links {
			if i := slices.Index(l.unsettled, id); i >= 0 {
				w.say(l.name, "the broker settles delivery %d: %s settled %v", i, shownState(d.State), d.Settled.Or(false))
			}
		}
	}
}

// request sends a request to the management, and returns the answer; nil if there is none.
func (w *world) request(method, path string, body any) *frames.Message {
	s := w.session("m.0")
	if s == nil {
		return nil
	}
	if s.links["management"] == nil {
		paired := frames.Map{{Key: frames.Symbol("paired"), Value: true}}
		l := &link{name: "management", session: s}
		s.links[l.name] = l
		s.write(&frames.Attach{Name: l.name, Handle: 1, Role: true, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: "/management"}, Target: &frames.Target{Address: "$me"}, Properties: paired}, nil)
		grant := s.flow(1, 0, 1<<20, false)
		grant.DeliveryCount, grant.Echo = frames.Optional[uint32]{}, false
		s.write(grant, nil)
		s.write(&frames.Attach{Name: l.name, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: "$me"}, Target: &frames.Target{Address: "/management"}, InitialDeliveryCount: frames.Some[uint32](0), Properties: paired}, nil)
	}
	w.requests++
	id := w.requests
	value, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x77), Value: body})
	if err != nil {
		panic(err)
	}
	payload, err := (&frames.Message{Properties: &frames.Properties{MessageID: id, To: w.name(path), Subject: frames.Some(method), ReplyTo: "$me"}, Body: value}).Append(nil)
	if err != nil {
		panic(err)
	}
	s.write(&frames.Transfer{DeliveryID: frames.Some(s.nextID), DeliveryTag: []byte{0}, Settled: frames.Some(true)}, payload)
	s.nextID++
	s.sent++
	if !w.until(func() bool { return w.replies[id] != nil || s.over }) && w.quiet == nil {
		w.broken = fmt.Errorf("no answer to %s %s within %v", method, path, w.patience)
	}
	m := w.replies[id]
	delete(w.replies, id)
	return m
}

// flow is a link's.
func (s *session) flow(handle, count, credit uint32, drain bool) *frames.Flow {
	return &frames.Flow{
		NextIncomingID: frames.Some(s.got), IncomingWindow: 1 << 20, NextOutgoingID: s.sent, OutgoingWindow: 1 << 20,
		Handle: frames.Some(handle), DeliveryCount: frames.Some(count), LinkCredit: frames.Some(credit), Drain: drain, Echo: true,
	}
}

// cleanUp deletes what the sequence has declared, on a real broker.
func (w *world) cleanUp() {
	if w.quiet != nil || w.broken != nil {
		return
	}
	w.now = step{logged: map[string][]string{}}
	for _, q := range w.queues {
		w.deleteQueue(q)
	}
	for i := range 4 {
		w.request("DELETE", fmt.Sprintf("/exchanges/@x%d", i), nil)
	}
}

// deleteQueue deletes a queue. One that dead-letters at least once isn't deleted while its
// leader starts: enough of that ends RabbitMQ's supervisor of dead-letter workers.
func (w *world) deleteQueue(name string) (m *frames.Message) {
	del := func() { m = w.request("DELETE", "/queues/"+name, nil) }
	at, careful := w.careful[name]
	if !careful || w.quiet != nil {
		del()
		return m
	}
	time.Sleep(time.Until(at.Add(time.Second)))
	w.slowly(del)
	return m
}

func (w *world) close() {
	close(w.done)
	for _, c := range w.conns {
		c.write(0, &frames.Close{}, nil)
		_ = c.nc.Close()
	}
	for len(w.events) > 0 {
		<-w.events
	}
	if w.quiet != nil {
		w.quiet()
	}
}

// alive is a link that is attached, or nil.
func (w *world) alive(name string, sender bool) *link {
	l := w.links[name]
	if l == nil || l.over || l.session.over || l.session.conn.over || l.sender != sender || !l.there {
		return nil
	}
	return l
}

func same(a, b map[string][]string) bool {
	return maps.EqualFunc(a, b, func(a, b []string) bool { return slices.Equal(a, b) })
}

// against says whether something was said that isn't wanted.
func against(logged, want map[string][]string) bool {
	for stream, lines := range logged {
		if len(lines) > len(want[stream]) || !slices.Equal(lines, want[stream][:len(lines)]) {
			return true
		}
	}
	return false
}

func differ(a, b step) bool {
	return !same(a.logged, b.logged) && !sameUpToCrash(a.logged, b.logged) || !maps.Equal(a.counts, b.counts)
}

// sameUpToCrash reports whether in both a connection has ended by an error in RabbitMQ itself, and one
// of them has only fewer deliveries: how many are written before that is chance.
func sameUpToCrash(a, b map[string][]string) bool {
	crashed := false
	for stream := range a {
		crashed = crashed || slices.Contains(a[stream], "close internal error") && slices.Contains(b[stream], "close internal error")
	}
	if !crashed {
		return false
	}
	all := maps.Clone(a)
	maps.Copy(all, b)
	for stream := range all {
		n := min(len(a[stream]), len(b[stream]))
		if !slices.Equal(a[stream][:n], b[stream][:n]) || len(a[stream]) != len(b[stream]) && !strings.HasPrefix(stream, "r") {
			return false
		}
	}
	return true
}
