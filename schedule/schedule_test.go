package schedule_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/schedule"
)

func TestADelayIsRoundedUpALittle(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]uint64{
		math.MinInt64: 0, -time.Hour: 0, 0: 0, 1: 1, 100 * time.Millisecond: 1, 100*time.Millisecond + 1: 2,
		1023 * schedule.Unit: 1023, 1024 * schedule.Unit: 1024, 1024*schedule.Unit + 1: 1032,
	} {
		assert.Equal(t, want, schedule.Steps(d), d)
	}
	random := rand.New(rand.NewPCG(1, 1))
	for range 100_000 {
		d := time.Duration(random.Int64N(int64(schedule.MaxDelay) >> random.IntN(40)))
		held := time.Duration(schedule.Steps(d)) * schedule.Unit
		most := 800 * time.Millisecond
		if d <= 102*time.Second {
			most = 100 * time.Millisecond
		}
		if held < d || held-d >= most {
			require.Fail(t, "it is held too short or too long", "%v is held for %v", d, held)
		}
	}
	assert.Less(t, schedule.Steps(schedule.MaxDelay), uint64(1)<<schedule.Levels)
}

func TestAMessageEntersAtItsHighestBit(t *testing.T) {
	t.Parallel()
	zeros := strings.Repeat("0.", schedule.Levels-3)
	assert.Equal(t, "/exchanges/schedule_2/"+zeros+"1.0.1.to.orders", schedule.Entry(500*time.Millisecond, "orders"))
	assert.Equal(t, "/exchanges/schedule_due/"+zeros+"0.0.0.via", schedule.Entry(0, ""))
	assert.True(t, strings.HasPrefix(schedule.Entry(schedule.MaxDelay, "q"), "/exchanges/schedule_28/1."), schedule.Entry(schedule.MaxDelay, "q"))
}

func TestTopologyIsSoundAndSharedByServices(t *testing.T) {
	t.Parallel()
	one, err := schedule.Topology(schedule.Names{}, "orders", "a*b", strings.Repeat("q", 194))
	require.NoError(t, err)
	two, err := schedule.Topology(schedule.Names{}, "mails")
	require.NoError(t, err)
	queues := declare.Topology{}
	for _, name := range []string{"orders", "a*b", strings.Repeat("q", 194), "mails"} {
		queues.Queues = append(queues.Queues, declare.QuorumQueue{Name: name, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
	}
	all, err := declare.Merge(one, two, queues)
	require.NoError(t, err)
	assert.Len(t, all.Queues, schedule.Levels+2+4)
	for _, f := range check.Verify(check.FromTopology(all), all).Findings {
		assert.NotEqual(t, "error", f.Severity, "%+v", f)
	}
	for _, bad := range []string{"", "a.*.b", "#", "a\nb", "\xff", strings.Repeat("q", 195)} {
		_, err := schedule.Topology(schedule.Names{}, "fine", bad)
		refused(t, err, "queues[1]")
	}
	for _, bad := range []string{"\n", "\xff", strings.Repeat("p", 201)} {
		_, err := schedule.Topology(schedule.Names{Prefix: bad})
		refused(t, err, "Names.Prefix")
	}
}

func refused(t *testing.T, err error, text string) {
	t.Helper()
	var bad *argument.Error
	require.ErrorAs(t, err, &bad)
	assert.ErrorContains(t, err, text)
}

func TestWhatCanNotBeScheduledIsRefusedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "4.3.6", "orders")
		p := newPublisher[any](w, address.Queue("orders"))
		soon := schedule.After(time.Minute)
		try := func(text string, when schedule.When, v any, edit ...func(*client.Message)) {
			t.Helper()
			_, err := p.Publish(t.Context(), when, v, edit...)
			refused(t, err, text)
		}
		try("when is not set", schedule.When{}, 1)
		try("when is the zero time", schedule.At(time.Time{}), 1)
		try("more than 366 days ahead", schedule.At(time.Now().AddDate(2, 0, 0)), 1)
		try("more than 366 days ahead", schedule.At(time.Now().AddDate(9000, 0, 0)), 1)
		try("more than 366 days ahead", schedule.After(schedule.MaxDelay+1), 1)
		try("more than 366 days ahead", schedule.After(math.MaxInt64), 1)
		try("can't be encoded", soon, func() {})
		try("made the codec panic", soon, panics{})
		try("message is nil", soon, (*client.Message)(nil))
		try("message body is missing", soon, &client.Message{})
		for _, key := range []string{annotation.Due, annotation.To, annotation.TTL, annotation.Priority, "x-opt-delivery-time"} {
			try(key, soon, 1, func(m *client.Message) { m.Annotations = map[any]any{key: int64(1)} })
		}
		for _, id := range []any{"", 7, uint64(7), []byte("a"), "\xff", strings.Repeat("i", 513)} {
			try("MessageID", soon, 1, func(m *client.Message) { m.Properties.MessageID = id })
		}
		try("Header.TTL", soon, 1, func(m *client.Message) { m.Header.TTL = -1 })
		try("Header.TTL", soon, 1, func(m *client.Message) { m.Header.TTL = 50 * day })
		_, err := p.PublishAll(t.Context(), []any{1, 2}, nil)
		refused(t, err, "when is nil")
		_, err = p.PublishAll(t.Context(), []any{1, 2}, func(v any) schedule.When {
			return map[any]schedule.When{1: soon}[v]
		})
		refused(t, err, "when(1) is not set")
		_, err = p.PublishAll(t.Context(), []any{1, func() {}}, func(any) schedule.When { return soon })
		refused(t, err, "can't be encoded")

		_, err = p.Publish(t.Context(), soon, strings.Repeat("x", 17<<20))
		require.ErrorIs(t, err, client.ErrTooLarge)

		each := newPublisher[int](w, address.Address{})
		_, err = each.Publish(t.Context(), soon, 1)
		refused(t, err, "Properties.To")
		_, err = each.Publish(t.Context(), soon, 1, func(m *client.Message) { to := "orders"; m.Properties.To = &to })
		require.ErrorAs(t, err, new(*argument.Error))
		_, err = schedule.NewPublisher[int](t.Context(), w.conn, address.Queue(""), schedule.PublisherConfig{})
		require.ErrorAs(t, err, new(*argument.Error))
		_, err = schedule.NewPublisher[int](t.Context(), nil, address.Queue("q"), schedule.PublisherConfig{})
		refused(t, err, "conn")
		_, err = schedule.NewPublisher[int](t.Context(), w.conn, address.Queue("q"), schedule.PublisherConfig{Names: schedule.Names{Prefix: "\n"}})
		refused(t, err, "PublisherConfig.Names.Prefix")
		_, err = schedule.NewPublisher[int](t.Context(), w.conn, address.Queue("q"), schedule.PublisherConfig{PublisherConfig: client.PublisherConfig{Codec: client.RawCodec{}}})
		refused(t, err, "can't be encoded")
		refused(t, schedule.Dispatch(t.Context(), nil, schedule.DispatchConfig{}), "conn")
		refused(t, schedule.Dispatch(t.Context(), w.conn, schedule.DispatchConfig{Concurrency: -1}), "Concurrency")
		refused(t, schedule.Dispatch(t.Context(), w.conn, schedule.DispatchConfig{Names: schedule.Names{Prefix: "\n"}}), "Prefix")

		time.Sleep(2 * time.Minute)
		assert.Zero(t, w.ready("orders"), "nothing was sent")

		other, err := schedule.NewPublisher[int](t.Context(), w.conn, address.Queue("orders"), schedule.PublisherConfig{Names: schedule.Names{Prefix: "other_"}})
		require.NoError(t, err)
		_, err = other.Publish(t.Context(), soon, 1)
		require.ErrorIs(t, err, client.ErrNotFound)
		assert.ErrorContains(t, err, "apply schedule.Topology")
		require.NoError(t, other.Close(t.Context()))
		_, err = other.Publish(t.Context(), soon, 1)
		require.ErrorIs(t, err, client.ErrClosed)
	})
}

type panics struct{}

func (panics) MarshalJSON() ([]byte, error) { panic("no") }

// got collects messages and when they came.
type got struct {
	mu   sync.Mutex
	came []arrival
	do   func(*client.Delivery) error
}

type arrival struct {
	id string
	at time.Time
	m  *client.Message
}

func (g *got) Handle(_ context.Context, d *client.Delivery) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	id, _ := d.Message().Properties.MessageID.(string)
	g.came = append(g.came, arrival{id, time.Now(), d.Message()})
	if g.do != nil {
		return g.do(d)
	}
	return nil
}

// all returns what has come.
func (g *got) all() []arrival {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.came)
}

func (g *got) ids() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	ids := make([]string, len(g.came))
	for i, c := range g.came {
		ids[i] = c.id
	}
	return strings.Join(ids, " ")
}

func id(id string) func(*client.Message) {
	return func(m *client.Message) { m.Properties.MessageID = id }
}

// A message waits for a year in few queues, with nobody connected, and one that is
// scheduled long after it for a minute comes first.
func TestAMessageForNextYear(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, version, "orders")
			p := newPublisher[int](w, address.Queue("orders"))
			next := time.Now().Add(365*day + 1234567*time.Microsecond)
			sent, err := p.Publish(t.Context(), schedule.At(next), 1, id("next year"))
			require.NoError(t, err)
			assert.Equal(t, schedule.Scheduled{ID: "next year", Due: next.Truncate(time.Millisecond)}, sent)
			require.NoError(t, w.conn.Close(t.Context()))
			time.Sleep(364 * day)

			w.conn = w.connect()
			_, err = newPublisher[int](w, address.Queue("orders")).Publish(t.Context(), schedule.After(time.Minute), 2, id("soon"))
			require.NoError(t, err)
			require.NoError(t, w.conn.Close(t.Context()))
			time.Sleep(day)
			w.conn = w.connect()
			assert.Equal(t, 1, w.ready("orders"), "not early")
			time.Sleep(2200 * time.Millisecond)
			var g got
			w.consume("orders", &g)
			synctest.Wait()
			assert.Equal(t, "soon next year", g.ids())
			assert.LessOrEqual(t, len(g.all()[1].m.Annotations), 12)
		})
	}
}

// A queue that is full takes its messages when it has room, and blocks no other.
func TestDispatchWaitsForAFullQueueAndForNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "4.3.6")
		w.apply(declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "full", MaxLength: 1, Overflow: declare.OverflowRejectPublish, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "free", DeadLetter: declare.Drop()},
		}})
		full, free := newPublisher[int](w, address.Queue("full")), newPublisher[int](w, address.Queue("free"))
		for i := range 100 {
			_, err := full.Publish(t.Context(), schedule.After(0), i)
			require.NoError(t, err)
		}
		for i := range 100 {
			_, err := free.Publish(t.Context(), schedule.After(time.Second), i)
			require.NoError(t, err)
		}
		w.dispatch(schedule.DispatchConfig{Concurrency: 8})
		time.Sleep(time.Minute)
		assert.Equal(t, 100, w.ready("free"))
		assert.LessOrEqual(t, w.ready("full"), 2, "one, and one too many as RabbitMQ does")
		var g got
		w.consume("full", &g)
		time.Sleep(30 * time.Minute)
		assert.GreaterOrEqual(t, len(g.all()), 100)
		different := map[string]bool{}
		for _, c := range g.all() {
			different[c.id] = true
		}
		assert.Len(t, different, 100, "none is lost")
		assert.Zero(t, w.ready(schedule.Names{}.DispatchQueue()))
		assert.Zero(t, w.ready(lostQueue))
	})
}

// A queue that doesn't answer blocks no other, even if all of Dispatch's places wait for it.
func TestDispatchWaitsForASilentQueueAndForNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "4.3.6")
		w.apply(declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "silent", DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "free", DeadLetter: declare.Drop()},
		}})
		silent, free := newPublisher[int](w, address.Queue("silent")), newPublisher[int](w, address.Queue("free"))
		release, err := w.broker.Queue("silent").HoldConfirms()
		require.NoError(t, err)
		for i := range 16 {
			_, err := silent.Publish(t.Context(), schedule.After(0), i)
			require.NoError(t, err)
		}
		for i := range 16 {
			_, err := free.Publish(t.Context(), schedule.After(time.Second), i)
			require.NoError(t, err)
		}
		w.dispatch(schedule.DispatchConfig{Concurrency: 8})
		time.Sleep(5 * time.Minute)
		assert.Equal(t, 16, w.ready("free"))
		release()
		time.Sleep(time.Hour)
		assert.GreaterOrEqual(t, w.ready("silent"), 16, "none is lost")
		assert.Zero(t, w.ready(schedule.Names{}.DispatchQueue()))
	})
}

// What others put into the ladder's queue, or what has no target, is kept where it says so.
func TestDispatchKeepsWhatItCanNotDeliver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "4.0.5")
		raw, err := client.NewPublisher[*client.Message](t.Context(), w.conn, address.Queue(schedule.Names{}.DispatchQueue()), client.PublisherConfig{})
		require.NoError(t, err)
		annotated := func(to any) *client.Message {
			m := client.NewMessage(nil)
			m.Annotations = map[any]any{annotation.To: to}
			return m
		}
		strange := []*client.Message{client.NewMessage(nil), annotated("orders"), annotated(int64(1)), annotated("/queues/none"), annotated("/exchanges/none/x"), annotated("/exchanges/amq.topic/x")}
		for _, m := range strange {
			require.NoError(t, raw.Publish(t.Context(), m))
		}
		w.dispatch(schedule.DispatchConfig{})
		time.Sleep(time.Second)
		assert.Equal(t, len(strange), w.ready(lostQueue))
		var g got
		w.consume(lostQueue, &g)
		time.Sleep(time.Second)
		for _, c := range g.all() {
			assert.Equal(t, string(client.ReasonUndeliverable), c.m.Annotations[client.AnnotationReason])
			assert.NotEmpty(t, c.m.Annotations[client.AnnotationError])
		}
	})
}

// The caller's message is the caller's, and a message that was scheduled can be again.
func TestAMessageIsScheduledAgainAndTheCallersIsUnchanged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "4.3.6", "orders")
		p := newPublisher[*client.Message](w, address.Queue("orders"))
		m := client.NewMessage([]byte("x"))
		m.Header.TTL, m.Header.Priority = time.Hour, 9
		m.Annotations = map[any]any{"x-mine": "mine"}
		before := fmt.Sprintf("%+v %+v %+v", *m.Header, *m.Properties, m.Annotations)
		w.dispatch(schedule.DispatchConfig{})
		var g got
		g.do = func(d *client.Delivery) error {
			if len(g.came) == 2 {
				return nil
			}
			again := client.Copy(d.Message())
			delete(again.Annotations, annotation.Due)
			delete(again.Annotations, annotation.To)
			_, err := p.Publish(t.Context(), schedule.After(time.Hour), again)
			return err
		}
		w.consume("orders", &g)
		began := time.Now()
		_, err := p.PublishAll(t.Context(), []*client.Message{m}, func(*client.Message) schedule.When { return schedule.After(2 * time.Hour) })
		require.NoError(t, err)
		assert.Equal(t, before, fmt.Sprintf("%+v %+v %+v", *m.Header, *m.Properties, m.Annotations))
		time.Sleep(4 * time.Hour)
		came := g.all()
		require.Len(t, came, 2)
		assert.GreaterOrEqual(t, came[1].at.Sub(began), 3*time.Hour)
		assert.EqualValues(t, 9, came[0].m.Header.Priority)
		assert.Equal(t, time.Hour, came[0].m.Header.TTL, "it counts from when the message is delivered")
		assert.Equal(t, "mine", came[1].m.Annotations["x-mine"])
	})
}

// The broker is killed five times while messages wait. None is lost, none is early.
func TestMessagesOutliveTheBroker(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const messages = 300
				w := newWorld(t, version, "bound")
				w.apply(declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "unbound", DeadLetter: declare.Drop()}}})
				var g got
				w.consume("bound", &g)
				w.consume("unbound", &g)
				w.dispatch(schedule.DispatchConfig{})
				random := rand.New(rand.NewPCG(3, 4))
				due := map[string]time.Time{}
				var mu sync.Mutex
				stop := w.run(func(context.Context) error {
					for range 5 {
						time.Sleep(time.Minute)
						w.broker.Kill()
						time.Sleep(time.Duration(random.IntN(20)) * time.Second)
						w.broker.Restart()
					}
					return nil
				})
				for _, queue := range []string{"bound", "unbound"} {
					p := newPublisher[int](w, address.Queue(queue))
					for i := range messages / 2 {
						time.Sleep(time.Second)
						s, err := p.Publish(t.Context(), schedule.After(time.Duration(1+i)*time.Second), i)
						require.NoError(t, err)
						mu.Lock()
						due[s.ID] = s.Due
						mu.Unlock()
					}
				}
				stop()
				time.Sleep(15 * time.Minute)
				g.mu.Lock()
				defer g.mu.Unlock()
				for _, c := range g.came {
					assert.False(t, c.at.Before(due[c.id]), "it is early")
					delete(due, c.id)
				}
				assert.Empty(t, due, "lost")
			})
		})
	}
}

// A bound queue that is full holds its messages in the ladder, and with 32 of them all that
// leave the same level. That is why a queue with a max-length shouldn't be bound.
func TestABoundQueueThatIsFullBlocksItsLevel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "4.3.6", "orders")
		w.apply(declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "full", MaxLength: 1, Overflow: declare.OverflowRejectPublish, DeadLetter: declare.Drop()}}})
		bound, err := schedule.Topology(schedule.Names{}, "full")
		require.NoError(t, err)
		w.apply(bound)
		full, orders := newPublisher[int](w, address.Queue("full")), newPublisher[int](w, address.Queue("orders"))
		for i := range 40 {
			_, err := full.Publish(t.Context(), schedule.After(time.Second), i) // levels 3 and 1
			require.NoError(t, err)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(2 * time.Second)
		assert.LessOrEqual(t, w.ready("full"), 2, "one, and one too many as RabbitMQ does")
		_, err = orders.Publish(t.Context(), schedule.After(200*time.Millisecond), 1) // level 1
		require.NoError(t, err)
		_, err = orders.Publish(t.Context(), schedule.After(400*time.Millisecond), 2) // level 2
		require.NoError(t, err)
		time.Sleep(time.Second)
		assert.Equal(t, 1, w.ready("orders"), "that of the other level")
		_, err = declare.DeleteQueue(t.Context(), w.conn.Management(), "full")
		require.NoError(t, err)
		time.Sleep(10 * time.Minute)
		assert.Equal(t, 2, w.ready("orders"))
		assert.GreaterOrEqual(t, w.ready(schedule.Names{}.DispatchQueue()), 38, "what nobody dispatches waits where it says so")
	})
}
