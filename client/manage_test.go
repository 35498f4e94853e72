package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// fakeManagement answers requests on one session after the other. answer is
// called, with no lock held, for each request; its messages are the replies.
type fakeManagement struct {
	t      testing.TB
	answer func(s *fakeManagementSession, request *Message) []*Message

	mu       sync.Mutex
	sessions []*fakeManagementSession
}

type fakeManagementSession struct {
	linktest.FakeSession
	b       *linktest.FakeBroker
	r       *linktest.FakeReceiver
	answer  func(s *fakeManagementSession, request *Message) []*Message
	largest int // the most requests that had no reply
	open    int
}

func startManagement(t *testing.T, answer func(s *fakeManagementSession, request *Message) []*Message) (*Management, *fakeManagement) {
	f := &fakeManagement{t: t, answer: answer}
	c := bareConn(t, nil)
	c.mgmt.open = f.open
	t.Cleanup(func() { c.mgmt.close(context.Background()) })
	return c.mgmt, f
}

func (f *fakeManagement) open(context.Context) (link.Session, requestLink, link.ReceiverLink, error) {
	b := linktest.NewFakeBroker(f.t)
	s := &fakeManagementSession{b: b, answer: f.answer}
	s.FakeSession = linktest.FakeSession{B: b, Gone: make(chan struct{}), In: link.NewIntake()}
	s.r = &linktest.FakeReceiver{B: b, Presettled: true}
	s.Receivers = []*linktest.FakeReceiver{s.r}
	b.Sessions = []*linktest.FakeSession{&s.FakeSession}
	_ = s.r.IssueCredit(managementRequests)
	f.mu.Lock()
	f.sessions = append(f.sessions, s)
	f.mu.Unlock()
	return s, fakeRequests{s}, s.r, nil
}

func (s *fakeManagementSession) Intake() *link.Intake { return s.In }

// fakeRequests is the sending link of a fakeManagementSession.
type fakeRequests struct{ *fakeManagementSession }

func (s fakeRequests) send(m *Message) (lost bool, err error) {
	s.b.Update(func() {
		if err = s.r.Err; err != nil {
			return
		}
		s.b.Log("%s %s", *m.Properties.Subject, *m.Properties.To)
		s.open++
		s.largest = max(s.largest, s.open)
	})
	if err == nil {
		s.reply(s.answer(s.fakeManagementSession, m)...)
	}
	return err != nil, err
}

// reply sends replies, each for a credit.
func (s *fakeManagementSession) reply(replies ...*Message) {
	s.b.Update(func() {
		s.open -= len(replies)
		s.b.Ready = append(s.b.Ready, replies...)
	})
}

func (s *fakeManagementSession) kill(err error) { s.b.Kill(err) }

func replyTo(request *Message, status string, body any) *Message {
	return &Message{
		Properties: &amqp.MessageProperties{CorrelationID: request.Properties.MessageID, Subject: &status},
		Value:      body,
	}
}

// echo answers with the path.
func echo(_ *fakeManagementSession, m *Message) []*Message {
	return []*Message{replyTo(m, "200", *m.Properties.To)}
}

func silence(*fakeManagementSession, *Message) []*Message { return nil }

func TestManagementMatchesRepliesInAnyOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const requests = 500
		var mu sync.Mutex
		var held []*Message
		m, f := startManagement(t, func(_ *fakeManagementSession, request *Message) []*Message {
			mu.Lock()
			defer mu.Unlock()
			held = append(held, replyTo(request, "200", *request.Properties.To))
			return nil
		})
		stop := make(chan struct{})
		replying := async(func() bool {
			for {
				select {
				case <-stop:
					return true
				case <-time.After(time.Millisecond):
				}
				mu.Lock()
				rand.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
				replies := held
				held = nil
				mu.Unlock()
				if len(replies) > 0 {
					f.sessions[0].reply(replies...)
				}
			}
		})
		var wg sync.WaitGroup
		for i := range requests {
			wg.Go(func() {
				path := fmt.Sprintf("/queues/q%d", i)
				status, body, err := m.Request(within(t, time.Hour), "GET", path, nil)
				assert.NoError(t, err)
				assert.Equal(t, 200, status)
				assert.Equal(t, path, body)
			})
		}
		wg.Wait()
		close(stop)
		<-replying
		assert.Len(t, f.sessions, 1)
		assert.LessOrEqual(t, f.sessions[0].largest, managementRequests)
		assert.Greater(t, f.sessions[0].largest, 1, "many are in flight at once")
	})
}

func TestManagementDropsALateReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var late []*Message
		m, f := startManagement(t, func(_ *fakeManagementSession, request *Message) []*Message {
			if strings.HasSuffix(*request.Properties.To, "slow") {
				late = append(late, replyTo(request, "404", "late"))
				return nil
			}
			return append(late, replyTo(request, "200", *request.Properties.To))
		})
		_, _, err := m.Request(within(t, time.Second), "GET", "/queues/slow", nil)
		require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.False(t, failure.SafeToRetry(err))
		for range 3 {
			status, body, err := m.Request(within(t, time.Second), "GET", "/queues/q", nil)
			require.NoError(t, err)
			assert.Equal(t, 200, status)
			assert.Equal(t, "/queues/q", body)
			late = nil
		}
		assert.Len(t, f.sessions, 1)
	})
}

// RabbitMQ 4.0 ends the session over a request that comes before the credit for
// its reply: those whose callers have left count, too.
func TestManagementNeverHasMoreRequestsUnderWayThanCredit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, f := startManagement(t, silence)
		for range 3 {
			var wg sync.WaitGroup
			for range managementRequests {
				wg.Go(func() {
					_, _, err := m.Request(within(t, time.Second), "GET", "/queues/slow", nil)
					assert.Error(t, err)
				})
			}
			wg.Wait()
		}
		synctest.Wait()
		s := f.sessions[0]
		assert.Equal(t, managementRequests, s.largest)

		// When the broker answers at last, requests go on.
		for id := range uint64(managementRequests) {
			s.reply(replyTo(&Message{Properties: &amqp.MessageProperties{MessageID: id + 1}}, "200", nil))
		}
		synctest.Wait()
		s.answer = echo
		_, body, err := m.Request(within(t, time.Second), "GET", "/queues/q", nil)
		require.NoError(t, err)
		assert.Equal(t, "/queues/q", body)
	})
}

func TestManagementWithdrawsWhatIsNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sending := make(chan struct{})
		m, f := startManagement(t, func(s *fakeManagementSession, request *Message) []*Message {
			<-sending
			return echo(s, request)
		})
		first := async(func() error { _, _, err := m.Request(t.Context(), "GET", "/queues/first", nil); return err })
		synctest.Wait()
		_, _, err := m.Request(within(t, time.Second), "DELETE", "/queues/second", nil)
		require.ErrorIs(t, err, failure.ErrNotSent)
		assert.True(t, failure.SafeToRetry(err))
		close(sending)
		require.NoError(t, <-first)
		synctest.Wait()
		assert.Empty(t, f.sessions[0].b.History("DELETE"))
	})
}

func TestManagementRepeatsAloneWhatALostSessionLeftUnanswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refusal := &amqp.SessionError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: "configure access to queue 'secret' refused"}}
		m, f := startManagement(t, nil)
		f.answer = func(s *fakeManagementSession, request *Message) []*Message {
			f.mu.Lock()
			shared := s == f.sessions[0]
			f.mu.Unlock()
			switch {
			case strings.HasSuffix(*request.Properties.To, "secret"):
				if shared {
					time.Sleep(time.Second) // until the others are in flight
				}
				s.kill(refusal)
				return nil
			case shared:
				return nil
			}
			return echo(s, request)
		}
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				path := fmt.Sprintf("/queues/q%d", i)
				if i == 9 {
					path = "/queues/secret"
				}
				status, body, err := m.Request(within(t, time.Minute), "PUT", path, map[string]any{"durable": true})
				if i == 9 {
					assert.ErrorIs(t, err, failure.ErrUnauthorized)
					assert.ErrorContains(t, err, "secret")
					return
				}
				assert.NoError(t, err, path)
				assert.Equal(t, 200, status)
				assert.Equal(t, path, body)
			})
			if i == 8 {
				synctest.Wait()
			}
		}
		wg.Wait()
		for _, s := range f.sessions[1:] {
			assert.LessOrEqual(t, len(s.b.History("PUT")), 1, "alone")
		}
		_, body, err := m.Request(within(t, time.Minute), "GET", "/queues/next", nil)
		require.NoError(t, err)
		assert.Equal(t, "/queues/next", body)
	})
}

func TestManagementTellsWhenTheOnlyRequestEndsTheSession(t *testing.T) {
	for _, c := range []struct {
		reason error
		kind   error
	}{
		{&amqp.SessionError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: "refused"}}, failure.ErrUnauthorized},
		{linktest.ErrFakeConn, failure.ErrOutcomeUnknown},
	} {
		synctest.Test(t, func(t *testing.T) {
			m, f := startManagement(t, func(s *fakeManagementSession, _ *Message) []*Message {
				s.kill(c.reason)
				return nil
			})
			_, _, err := m.Request(within(t, time.Minute), "PUT", "/queues/q", nil)
			require.ErrorIs(t, err, c.kind)
			assert.Len(t, f.sessions, 1, "it isn't repeated")
		})
	}
}

func TestManagementSurvivesStrangeReplies(t *testing.T) {
	status := func(s string) func(*Message) *Message {
		return func(m *Message) *Message { return replyTo(m, s, nil) }
	}
	for _, c := range []struct {
		name  string
		reply func(request *Message) *Message
		want  string // of the error; empty: the strange reply is ignored, or is none
	}{
		{"without properties", func(*Message) *Message { return &Message{Value: "?"} }, ""},
		{"with an unknown correlation id", func(*Message) *Message {
			return replyTo(&Message{Properties: &amqp.MessageProperties{MessageID: uint64(999)}}, "200", nil)
		}, ""},
		{"with a correlation id of another type", func(m *Message) *Message {
			r := replyTo(m, "200", nil)
			r.Properties.CorrelationID = fmt.Sprint(m.Properties.MessageID)
			return r
		}, ""},
		{"without a status", func(m *Message) *Message {
			r := replyTo(m, "", nil)
			r.Properties.Subject = nil
			return r
		}, "no status"},
		{"with an empty status", status(""), "status is"},
		{"with a word for a status", status("OK"), `status is \"OK\"`},
		{"with an impossible status", status("99999"), "99999"},
		{"with a negative status", status("-200"), "-200"},
		{"with a status of a megabyte", status(strings.Repeat("\xff", 1<<20)), "status is"},
		{"with a nil body", status("200"), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, f := startManagement(t, func(_ *fakeManagementSession, request *Message) []*Message {
					return []*Message{c.reply(request), replyTo(request, "200", nil)}
				})
				code, body, err := m.Request(within(t, time.Second), "GET", "/queues/q", nil)
				if c.want == "" {
					require.NoError(t, err)
					assert.Equal(t, 200, code)
					assert.Nil(t, body)
				} else {
					assert.Error(t, err)
					assert.ErrorContains(t, err, strings.ReplaceAll(c.want, `\"`, `"`))
					assert.Less(t, len(err.Error()), 2048)
				}
				f.sessions[0].answer = echo
				_, body, err = m.Request(within(t, time.Second), "GET", "/queues/next", nil)
				require.NoError(t, err)
				assert.Equal(t, "/queues/next", body)
			})
		})
	}
}

func TestManagementOpensAgainAfterARefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, f := startManagement(t, echo)
		refusals := []error{linktest.ErrFakeConn, &failure.Error{Op: "open session", Kind: failure.ErrSessionLimit}}
		m.open = func(ctx context.Context) (link.Session, requestLink, link.ReceiverLink, error) {
			if len(refusals) > 0 {
				err := refusals[0]
				refusals = refusals[1:]
				return nil, nil, nil, err
			}
			return f.open(ctx)
		}
		for range 2 {
			_, _, err := m.Request(within(t, time.Second), "GET", "/queues/q", nil)
			require.ErrorIs(t, err, failure.ErrNotSent)
			synctest.Wait()
		}
		_, _, err := m.Request(within(t, time.Second), "GET", "/queues/q", nil)
		require.NoError(t, err)
	})
}

func TestManagementRefusesRequestsThatWouldEndTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, f := startManagement(t, echo)
		for _, c := range []struct {
			method, path string
			body         any
		}{
			{"PATCH", "/queues/q", nil}, {"", "/queues/q", nil}, {"GET", "", nil}, {"GET", "queues/q", nil},
			{"GET", "/queues/a b", nil}, {"GET", "/queues/ü", nil}, {"GET", "/queues/\n", nil},
			{"GET", "/" + strings.Repeat("q", 8192), nil},
			{"PUT", "/queues/q", make(chan int)}, {"PUT", "/queues/q", map[string]any{"a": (*string)(nil)}},
		} {
			_, _, err := m.Request(t.Context(), c.method, c.path, c.body)
			require.ErrorAs(t, err, new(*argument.Error), "%s %.20s", c.method, c.path)
		}
		assert.Empty(t, f.sessions)
	})
}

func TestManagementUnderRandomFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := startManagement(t, func(s *fakeManagementSession, request *Message) []*Message {
			switch rand.IntN(50) {
			case 0:
				s.kill(linktest.ErrFakeConn)
			case 1:
				time.Sleep(time.Millisecond)
			case 2:
				return nil
			}
			return echo(s, request)
		})
		var wg sync.WaitGroup
		var mu sync.Mutex
		var kinds []error
		for i := range 300 {
			wg.Go(func() {
				path := fmt.Sprintf("/queues/q%d", i)
				_, body, err := m.Request(within(t, time.Minute), "GET", path, nil)
				if err == nil {
					assert.Equal(t, path, body)
				}
				mu.Lock()
				defer mu.Unlock()
				kinds = append(kinds, err)
			})
		}
		wg.Wait()
		time.Sleep(time.Second) // sessions of single requests may be closing still
		assert.Len(t, kinds, 300)
		assert.True(t, slices.ContainsFunc(kinds, func(err error) bool { return err == nil }))
		for _, err := range kinds {
			if err != nil {
				assert.True(t, errors.Is(err, failure.ErrNotSent) || errors.Is(err, failure.ErrOutcomeUnknown), "%v", err)
			}
		}
	})
}

func TestManagementSendsNothingInAnAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, f := startManagement(t, echo)
		_, _, err := m.Request(within(t, time.Second), "GET", "/queues/q", nil)
		require.NoError(t, err)
		f.sessions[0].In.Set(true)
		_, _, err = m.Request(within(t, time.Second), "PUT", "/queues/q", nil)
		require.ErrorIs(t, err, failure.ErrNotSent)
		assert.True(t, failure.SafeToRetry(err))
		later := async(func() error { _, _, err := m.Request(within(t, time.Minute), "GET", "/queues/later", nil); return err })
		time.Sleep(time.Second)
		f.sessions[0].In.Set(false)
		require.NoError(t, <-later)
		assert.Equal(t, []string{"GET /queues/q", "GET /queues/later"}, f.sessions[0].b.History("GET", "PUT"))
	})
}
