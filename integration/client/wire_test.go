package client_test

import (
	"bytes"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/frames"
)

// The broker in memory answers on the wire as RabbitMQ does, frame by frame: the same is
// said to both, and the answers compared.

// spoken is a connection on which a test says what it likes.
type spoken struct {
	t  *testing.T
	nc net.Conn
	r  *frames.Reader
	// direct is the address of the latest dynamic source.
	direct string
}

// speak logs in, and sends the protocol header.
func speak(t *testing.T, raw string) *spoken {
	u, err := url.Parse(raw)
	require.NoError(t, err)
	nc, err := net.Dial("tcp", u.Host)
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(suite.Patience)))
	p := &spoken{t: t, nc: nc, r: frames.NewReader(nc, 64<<10, 1<<20)}
	password, _ := u.User.Password()
	init, err := frames.Append(nil, frames.Frame{Type: frames.TypeSASL, Body: &frames.Init{Mechanism: "PLAIN", InitialResponse: []byte("\x00" + u.User.Username() + "\x00" + password)}})
	require.NoError(t, err)
	p.write(frames.ProtocolSASL.Header(), init)
	_, err = p.r.AwaitProtocol()
	require.NoError(t, err)
	p.next()
	require.Zero(t, p.next().Body.(*frames.Outcome).Code)
	p.write(frames.ProtocolAMQP.Header())
	_, err = p.r.AwaitProtocol()
	require.NoError(t, err)
	return p
}

func (p *spoken) write(parts ...[]byte) {
	for _, b := range parts {
		_, err := p.nc.Write(b)
		require.NoError(p.t, err)
	}
}

func (p *spoken) next() frames.Frame {
	for {
		f, err := p.r.AwaitFrame()
		if err != nil {
			return frames.Frame{Channel: 99} // the connection has ended
		}
		if a, ok := f.Body.(*frames.Attach); ok && a.Source != nil && a.Source.Dynamic {
			p.direct, _ = a.Source.Address.(string)
		}
		if f.Body != nil {
			return f
		}
	}
}

// shown is a frame in the form in which it is compared.
func shown(f frames.Frame) string {
	return directName.ReplaceAllString(shownInFull(f), "amq.rabbitmq.reply-to.*")
}

// directName is an address of direct reply-to, which is made up.
var directName = regexp.MustCompile(`amq\.rabbitmq\.reply-to\.[\w+/=%.]+`)

func shownInFull(f frames.Frame) string {
	if f.Channel == 99 {
		return "the connection has ended"
	}
	detail := func(e *frames.Error) string {
		if e == nil {
			return "no error"
		}
		text, _, _ := strings.Cut(e.Description, "\n")
		if e.Condition == "amqp:internal-error" {
			text = "..." // RabbitMQ shows its stack
		}
		return fmt.Sprintf("%s %q %v", e.Condition, text, e.Info)
	}
	kind := strings.TrimPrefix(fmt.Sprintf("%T", f.Body), "*frames.")
	switch b := f.Body.(type) {
	case *frames.Open:
		b.ContainerID, b.Properties = "", nil
		return fmt.Sprintf("%s %+v", kind, *b)
	case *frames.Attach:
		source, target := "none", fmt.Sprint(b.Target)
		if b.Source != nil {
			source = fmt.Sprintf("%+v", *b.Source)
		}
		if t, ok := b.Target.(*frames.Target); ok && t != nil {
			target = fmt.Sprintf("%+v", *t)
		}
		c := *b
		c.Source, c.Target = nil, nil
		return fmt.Sprintf("%d %s %+v source %s target %s", f.Channel, kind, c, source, target)
	case *frames.Detach:
		return fmt.Sprintf("%d %s %d %v %s", f.Channel, kind, b.Handle, b.Closed, detail(b.Error))
	case *frames.End:
		return fmt.Sprintf("%d %s %s", f.Channel, kind, detail(b.Error))
	case *frames.Close:
		return fmt.Sprintf("%s %s", kind, detail(b.Error))
	case *frames.Disposition:
		c := *b
		c.State = nil
		state := fmt.Sprintf("%T", b.State)
		if r, ok := b.State.(*frames.Rejected); ok {
			state += " " + detail(r.Error)
		}
		return fmt.Sprintf("%d %s %+v %s", f.Channel, kind, c, state)
	case *frames.Transfer:
		c := *b
		c.State = nil
		m, err := frames.DecodeMessage(f.Payload)
		if err != nil {
			return fmt.Sprintf("%d %s %+v part of %d", f.Channel, kind, c, len(f.Payload))
		}
		text := ""
		for _, section := range []any{m.Header, m.Properties} {
			text += fmt.Sprintf(" %+v", section)
		}
		var annotations []string
		for _, e := range m.Annotations {
			annotations = append(annotations, fmt.Sprintf("%v=%v", e.Key, e.Value))
		}
		slices.Sort(annotations) // RabbitMQ's have no order
		return fmt.Sprintf("%d %s %+v%s %v %x", f.Channel, kind, c, text, annotations, m.Body)
	}
	return fmt.Sprintf("%d %s %+v", f.Channel, kind, f.Body)
}

// step is something that is said: frames, on the channels that their order in a
// conversation gives them.
type step struct {
	channel uint16
	body    frames.Performative
	payload []byte
	raw     []byte
	// toDirect makes the payload of a message to the address of the dynamic source.
	toDirect func(address string) []byte
}

// logged is s on a connection.
func (p *spoken) logged(s step) []byte {
	if s.toDirect != nil {
		s.payload = s.toDirect(p.direct)
	}
	return s.bytes(p.t)
}

func (s step) bytes(t *testing.T) []byte {
	if s.raw != nil {
		return s.raw
	}
	b, err := frames.Append(nil, frames.Frame{Channel: s.channel, Body: s.body, Payload: s.payload})
	require.NoError(t, err)
	return b
}

// marker is a channel on which a session begins and ends behind each step.
const marker = 60

// answers is what the broker in memory says to each step. It answers in order, so
// its answer to a step comes before its answer to the marker.
func answers(t *testing.T, raw string, steps []step) (all [][]string) {
	p := speak(t, raw)
	for _, s := range steps {
		p.write(p.logged(s))
		var logged []string
		if _, opens := s.body.(*frames.Open); opens {
			logged = append(logged, shown(p.next()))
		}
		for _, m := range []frames.Performative{&frames.Begin{}, &frames.End{}} {
			_, _ = p.nc.Write(step{channel: marker, body: m}.bytes(t))
		}
		for {
			f := p.next()
			if f.Channel != marker {
				logged = append(logged, shown(f))
			}
			_, ended := f.Body.(*frames.End)
			_, closed := f.Body.(*frames.Close)
			if closed {
				return append(all, logged)
			}
			if f.Channel == marker && ended || f.Channel == 99 {
				break
			}
		}
		all = append(all, logged)
	}
	return all
}

// known are the conversations in which RabbitMQ 4.0 answers otherwise, and why.
var known = map[string]string{
	"an address of version 1": "4.0 still permits them",
	"released and again":      "its delivery-count begins elsewhere",

	"direct reply-to":                "it is of 4.2 and later",
	"direct reply-to without credit": "it is of 4.2 and later",
	"direct reply-to, detached":      "it is of 4.2 and later",
}

func TestTheBrokerInMemoryAnswersAsRabbitMQ(t *testing.T) {
	some := func(n uint32) frames.Optional[uint32] { return frames.Some(n) }
	begin := step{channel: 1, body: &frames.Begin{IncomingWindow: 100, OutgoingWindow: 100}}
	text, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x75), Value: []byte("text")})
	require.NoError(t, err)
	valid := text
	to := func(address any) *frames.Attach {
		return &frames.Attach{Name: "sender", Source: &frames.Source{}, Target: &frames.Target{Address: address}, InitialDeliveryCount: some(0)}
	}
	from := func(address any) *frames.Attach {
		return &frames.Attach{Name: "receiver", Handle: 1, Role: true, Source: &frames.Source{Address: address}, Target: &frames.Target{}}
	}
	attach := func(a *frames.Attach) step { return step{channel: 1, body: a} }
	with := func(a *frames.Attach, change func(*frames.Attach)) step {
		change(a)
		return attach(a)
	}
	transfer := func(x frames.Transfer, payload []byte) step {
		if x.DeliveryTag == nil {
			x.DeliveryTag = []byte{1}
		}
		return step{channel: 1, body: &x, payload: payload}
	}
	flow := func(f frames.Flow) step {
		if f.IncomingWindow == 0 {
			f.IncomingWindow = 100
		}
		f.OutgoingWindow = 100
		return step{channel: 1, body: &f}
	}
	message := func(m frames.Message) []byte {
		if m.Body == nil {
			m.Body = text
		}
		b, err := m.Append(nil)
		require.NoError(t, err)
		return b
	}
	publish := func(id uint32, payload []byte) step {
		return transfer(frames.Transfer{DeliveryID: some(id), DeliveryTag: []byte{byte(id)}}, payload)
	}
	q := attach(to("/queues/q"))
	node := "/management"
	paired := frames.Map{{Key: frames.Symbol("paired"), Value: true}}
	requests := func() *frames.Attach {
		return &frames.Attach{Name: "m", Handle: 0, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: "$me"}, Target: &frames.Target{Address: node}, InitialDeliveryCount: some(0), Properties: paired}
	}
	replies := func() *frames.Attach {
		return &frames.Attach{Name: "m", Handle: 1, Role: true, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: node}, Target: &frames.Target{Address: "$me"}, Properties: paired}
	}
	direct := func() *frames.Attach {
		return &frames.Attach{
			Name: "direct", Handle: 1, Role: true, SenderSettleMode: frames.Some[uint8](1), Target: &frames.Target{},
			Source: &frames.Source{Dynamic: true, Durable: some(0), Timeout: some(0), ExpiryPolicy: "link-detach", Capabilities: []frames.Symbol{"rabbitmq:volatile-queue", "other"}}, // an array: RabbitMQ takes no single symbol
		}
	}
	reply := func(id uint32) step {
		return step{channel: 1, body: &frames.Transfer{DeliveryID: some(id), DeliveryTag: []byte{byte(id)}}, toDirect: func(address string) []byte {
			return message(frames.Message{Properties: &frames.Properties{To: address, CorrelationID: "c"}})
		}}
	}
	conversations := map[string][]step{
		"direct reply-to":                           {begin, attach(direct()), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), attach(to(nil)), reply(0), reply(1)},
		"direct reply-to without credit":            {begin, attach(direct()), attach(to(nil)), reply(0), flow(frames.Flow{Handle: some(1), LinkCredit: some(1)}), reply(1), reply(2), flow(frames.Flow{Handle: some(1), DeliveryCount: some(1), LinkCredit: some(3), Drain: true}), reply(3)},
		"direct reply-to, detached":                 {begin, attach(direct()), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), attach(to(nil)), {channel: 1, body: &frames.Detach{Handle: 1, Closed: true}}, reply(0)},
		"direct reply-to, nobody's":                 {begin, attach(to("/queues/amq.rabbitmq.reply-to.nonsense")), q},
		"publish":                                   {begin, q, publish(0, text), publish(1, text), {channel: 1, body: &frames.Detach{Closed: true}}, {channel: 1, body: &frames.End{}}, {body: &frames.Close{}}},
		"publish and consume":                       {begin, q, publish(0, text), attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), {channel: 1, body: &frames.Disposition{Role: true, First: 0, Settled: frames.Some(true), State: &frames.Accepted{}}}, {channel: 1, body: &frames.Disposition{Role: true, First: 0, Settled: frames.Some(true), State: &frames.Accepted{}}}},
		"settle without settling":                   {begin, q, publish(0, text), attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), {channel: 1, body: &frames.Disposition{Role: true, First: 0, Settled: frames.Some(false), State: &frames.Modified{DeliveryFailed: true}}}, flow(frames.Flow{Handle: some(1), LinkCredit: some(10), Drain: true})},
		"neither settled nor not":                   {begin, q, publish(0, text), attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), {channel: 1, body: &frames.Disposition{Role: true, First: 0, State: &frames.Modified{DeliveryFailed: true}}}, flow(frames.Flow{Handle: some(1), LinkCredit: some(10), Drain: true})},
		"an outcome that is none":                   {begin, q, publish(0, text), attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), {channel: 1, body: &frames.Disposition{Role: true, First: 0, Settled: frames.Some(true)}}},
		"released and again":                        {begin, q, publish(0, text), attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(1)}), {channel: 1, body: &frames.Disposition{Role: true, First: 0, Settled: frames.Some(true), State: &frames.Released{}}}, flow(frames.Flow{Handle: some(1), DeliveryCount: some(1), LinkCredit: some(1)})},
		"aborted":                                   {begin, q, transfer(frames.Transfer{DeliveryID: some(0), More: true}, text), transfer(frames.Transfer{Aborted: true}, nil), publish(1, text)},
		"a parameter of a modified that isn't ours": {begin, q, publish(0, text), attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), {channel: 1, body: &frames.Disposition{Role: true, First: 0, Settled: frames.Some(true), State: &frames.Modified{Annotations: frames.Map{{Key: frames.Symbol("not-x"), Value: "v"}}}}}},
		"drain an empty queue":                      {begin, attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(10), Drain: true}), flow(frames.Flow{Handle: some(1), LinkCredit: some(5), Echo: true})},
		"settled and unsettled":                     {begin, with(to("/queues/q"), func(a *frames.Attach) { a.SenderSettleMode = frames.Some[uint8](0) }), transfer(frames.Transfer{DeliveryID: some(0), Settled: frames.Some(true)}, text)},
		"unsettled on settled":                      {begin, with(to("/queues/q"), func(a *frames.Attach) { a.SenderSettleMode = frames.Some[uint8](1) }), publish(0, text)},
		"receives settled":                          {begin, q, publish(0, text), with(from("/queues/q"), func(a *frames.Attach) { a.SenderSettleMode = frames.Some[uint8](1) }), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)})},
		"in parts":                                  {begin, q, transfer(frames.Transfer{DeliveryID: some(0), More: true}, text[:3]), transfer(frames.Transfer{}, text[3:])},
		"parts of two":                              {begin, q, transfer(frames.Transfer{DeliveryID: some(0), More: true}, text[:3]), transfer(frames.Transfer{DeliveryID: some(1)}, text[3:])},
		"parts settled otherwise":                   {begin, q, transfer(frames.Transfer{DeliveryID: some(0), More: true}, text[:3]), transfer(frames.Transfer{Settled: frames.Some(true)}, text[3:])},
		"second mode of transfer":                   {begin, q, transfer(frames.Transfer{DeliveryID: some(0), ReceiverSettleMode: frames.Some[uint8](1)}, text)},
		"no such queue to":                          {begin, attach(to("/queues/none")), q},
		"no such queue from":                        {begin, attach(from("/queues/none")), q},
		"no such exchange":                          {begin, attach(to("/exchanges/none")), q},
		"a bad address":                             {begin, attach(to("/queues/")), q},
		"another bad address":                       {begin, attach(to("/exchanges//k")), q},
		"an address that is no text":                {begin, attach(from(uint32(7))), q},
		"no source":                                 {begin, with(from("x"), func(a *frames.Attach) { a.Source = nil })},
		"unroutable":                                {begin, attach(to("/exchanges/amq.direct/none")), publish(0, text)},
		"anonymous":                                 {begin, attach(to(nil)), publish(0, message(frames.Message{Properties: &frames.Properties{To: "/queues/q"}})), publish(1, text), publish(2, message(frames.Message{Properties: &frames.Properties{To: "/exchanges/none/k"}})), publish(3, message(frames.Message{Properties: &frames.Properties{To: "nonsense"}})), publish(4, message(frames.Message{Properties: &frames.Properties{To: "/queues/none"}}))},
		"anonymous and settled":                     {begin, attach(to(nil)), transfer(frames.Transfer{DeliveryID: some(0), Settled: frames.Some(true)}, text)},
		"no message":                                {begin, q, publish(0, []byte{1, 2, 3})},
		"nothing of a message":                      {begin, q, publish(0, nil)},
		"another's user-id":                         {begin, q, publish(0, message(frames.Message{Properties: &frames.Properties{UserID: []byte("somebody")}}))},
		"receiver mode second":                      {begin, with(from("/queues/q"), func(a *frames.Attach) { a.ReceiverSettleMode = frames.Some[uint8](1) })},
		"link recovery":                             {begin, with(from("/queues/q"), func(a *frames.Attach) { a.Unsettled = frames.Map{{Key: []byte{1}, Value: nil}} })},
		"a transaction":                             {begin, with(to(""), func(a *frames.Attach) { a.Target = frames.Described{Descriptor: uint64(0x30), Value: frames.List{}} })},
		"handle in use":                             {begin, q, q},
		"handle too large":                          {begin, with(to("/queues/q"), func(a *frames.Attach) { a.Handle = 256 })},
		"handle-max":                                {{channel: 1, body: &frames.Begin{IncomingWindow: 1, OutgoingWindow: 1, HandleMax: some(3)}}, with(to("/queues/q"), func(a *frames.Attach) { a.Handle = 4 })},
		"unknown handle of a flow":                  {begin, flow(frames.Flow{Handle: some(9), LinkCredit: some(1)})},
		"unknown handle of transfer":                {begin, transfer(frames.Transfer{Handle: 9, DeliveryID: some(0)}, valid)},
		"unknown handle of a detach":                {begin, {channel: 1, body: &frames.Detach{Handle: 9}}, q},
		"a flow from the future":                    {begin, flow(frames.Flow{NextIncomingID: some(1000)})},
		"a sender's disposition":                    {begin, {channel: 1, body: &frames.Disposition{First: 0, Settled: frames.Some(true)}}},
		"a state that is none":                      {begin, q, publish(0, text), attach(from("/queues/q")), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), {channel: 1, body: &frames.Disposition{Role: true, First: 0, State: &frames.Received{}}}},
		"channel too high":                          {{channel: 64, body: &frames.Begin{IncomingWindow: 1, OutgoingWindow: 1}}},
		"unknown channel":                           {{channel: 7, body: &frames.End{}}, {channel: 7, body: &frames.Flow{}}, begin},
		"a frame too large":                         {{raw: []byte{0, 2, 0, 1, 2, 0, 0, 0}}},
		"a performative that isn't":                 {{raw: []byte{0, 0, 0, 12, 2, 0, 0, 0, 0, 0x53, 0x77, 0x45}}, begin, {raw: []byte{0, 0, 0, 12, 2, 0, 0, 1, 0, 0x53, 0x77, 0x45}}},
		"an address of version 1":                   {begin, attach(from("/queue/q"))},
		"half a begin":                              {{raw: []byte{0, 0, 0, 12, 2, 0, 0, 0, 0, 0x53, 0x11, 0x45}}},
		"an extended header":                        {{raw: []byte{0, 0, 0, 16, 3, 0, 0, 0, 1, 2, 3, 4, 0, 0x53, 0x18, 0x45}}},
		"management":                                {begin, attach(replies()), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), attach(requests()), transfer(frames.Transfer{DeliveryID: some(0), Settled: frames.Some(true)}, manageRequest(t, "GET", "/queues/none", nil))},
		"management, requests first":                {begin, attach(requests()), transfer(frames.Transfer{DeliveryID: some(0), Settled: frames.Some(true)}, manageRequest(t, "GET", "/queues/none", nil))},
		"management without credit":                 {begin, attach(replies()), attach(requests()), transfer(frames.Transfer{DeliveryID: some(0), Settled: frames.Some(true)}, manageRequest(t, "GET", "/queues/none", nil))},
		"management, unsettled":                     {begin, attach(replies()), flow(frames.Flow{Handle: some(1), LinkCredit: some(10)}), attach(requests()), transfer(frames.Transfer{DeliveryID: some(0)}, manageRequest(t, "GET", "/queues/none", nil))},
		"management that isn't paired":              {begin, with(requests(), func(a *frames.Attach) { a.Properties = nil }), q},
		"management, credit drained":                {begin, attach(replies()), flow(frames.Flow{Handle: some(1), LinkCredit: some(10), Drain: true})},
	}
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		version := suite.FullVersion(s.Version)
		open := step{body: &frames.Open{ContainerID: "test", Hostname: "vhost:" + s.VHost}}
		for name, steps := range conversations {
			if !s.Newer() && known[name] != "" {
				continue
			}
			t.Run(name, func(t *testing.T) {
				b := hopbacktest.Start(t, hopbacktest.Config{Version: version})
				b.AddVHost(s.VHost)
				memory, err := b.Listen("127.0.0.1:0")
				require.NoError(t, err)
				for _, raw := range []string{memory, s.URL} {
					manageOnce(t, raw, s.VHost, "DELETE", "/queues/q", nil)
					manageOnce(t, raw, s.VHost, "PUT", "/queues/q", frames.Map{{Key: "arguments", Value: frames.Map{{Key: "x-queue-type", Value: "quorum"}}}})
				}
				all := append([]step{open}, steps...)
				want := answers(t, memory, all)
				p := speak(t, s.URL)
				for i, logged := range want {
					p.write(p.logged(all[i]))
					var got []string
					for range logged {
						got = append(got, shown(p.next()))
					}
					slices.Sort(got) // RabbitMQ's queues answer when they like
					slices.Sort(logged)
					if !assert.Equal(t, got, logged, "RabbitMQ %s, and the broker in memory, answer to step %d: %T", s.Version, i, all[i].body) {
						return
					}
				}
			})
		}
	})
}

// manageRequest is a request to the management.
func manageRequest(t *testing.T, method, path string, body any) []byte {
	value, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x77), Value: body})
	require.NoError(t, err)
	b, err := (&frames.Message{
		Properties: &frames.Properties{MessageID: uint64(7), To: path, Subject: frames.Some(method), ReplyTo: "$me"}, Body: value,
	}).Append(nil)
	require.NoError(t, err)
	return b
}

// manageOnce sends one request on a separate connection.
func manageOnce(t *testing.T, raw, vhost, method, path string, body any) {
	p := speak(t, raw)
	some := func(n uint32) frames.Optional[uint32] { return frames.Some(n) }
	paired := frames.Map{{Key: frames.Symbol("paired"), Value: true}}
	for _, s := range []step{
		{body: &frames.Open{ContainerID: "test", Hostname: "vhost:" + vhost}},
		{channel: 1, body: &frames.Begin{IncomingWindow: 100, OutgoingWindow: 100}},
		{channel: 1, body: &frames.Attach{Name: "m", Handle: 1, Role: true, SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: "/management"}, Target: &frames.Target{Address: "$me"}, Properties: paired}},
	} {
		p.write(s.bytes(t))
		p.next()
	}
	p.write(step{channel: 1, body: &frames.Flow{IncomingWindow: 100, OutgoingWindow: 100, Handle: some(1), LinkCredit: some(1)}}.bytes(t))
	p.write(step{channel: 1, body: &frames.Attach{Name: "m", SenderSettleMode: frames.Some[uint8](1), Source: &frames.Source{Address: "$me"}, Target: &frames.Target{Address: "/management"}, InitialDeliveryCount: some(0), Properties: paired}}.bytes(t))
	p.next()
	p.next()
	p.write(step{channel: 1, body: &frames.Transfer{DeliveryID: some(0), DeliveryTag: []byte{0}, Settled: frames.Some(true)}, payload: manageRequest(t, method, path, body)}.bytes(t))
	f := p.next()
	m, err := frames.DecodeMessage(f.Payload)
	require.NoError(t, err, "%s", shown(f))
	if bytes.Contains(f.Payload, []byte("cluster_not_formed")) { // a busy broker keeps nothing of the queue
		_ = p.nc.Close()
		manageOnce(t, raw, vhost, method, path, body)
		return
	}
	require.Contains(t, []string{"200", "201", "204"}, m.Properties.Subject.Value, "%x", m.Body)
	_ = p.nc.Close()
}
