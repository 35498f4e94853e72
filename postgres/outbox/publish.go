package outbox

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/internal/refuse"
)

// Publish writes v to the outbox as JSON, in db's transaction. Once that has committed, a [Relay]
// publishes the message to the address to. It is short for a [Publisher] without Codec and Key:
// see [Publisher.Publish] for edit, the result, and errors.
func Publish[T any](ctx context.Context, db postgres.DB, to address.Address, v T, edit ...func(*client.Message)) (messageID string, err error) {
	return Publisher[T]{To: to}.Publish(ctx, db, v, edit...)
}

// Publisher writes values of type T to the outbox. Use it instead of [Publish] for another
// encoding, or for ordering by a key. It is safe for concurrent use.
type Publisher[T any] struct {
	// To is the address of the messages. It may be empty if each call sets an address with
	// client.PublishTo.
	To address.Address
	// Codec encodes values into message bodies. A value that is a *client.Message is written
	// unchanged. Default: client.JSONCodec.
	Codec client.Codec
	// Key returns the key of a value. A relay with [OrderByKey] publishes messages with the same
	// key in order. An empty key means none. A key has at most 1,000 bytes of UTF-8 without NUL.
	// Default: nil, no keys.
	Key func(T) string
}

// maxKey bounds Key.
const maxKey = 1000

// Publish writes v to the outbox, in db's transaction. It returns the message-id, which stays the
// same if a relay publishes the message twice.
//
// Each edit is called on the message before it is checked, to set properties, headers, or
// annotations. A nil edit is skipped. The message-id is random unless an edit sets one; it must
// be a string.
//
// After an *argument.Error nothing was written, because v can't be encoded or the message can't
// be sent. Any other error is the database's.
func (p Publisher[T]) Publish(ctx context.Context, db postgres.DB, v T, edit ...func(*client.Message)) (messageID string, err error) {
	ids, err := p.write(ctx, db, []T{v}, oneByOne[T](edit))
	if err != nil {
		return "", err
	}
	return ids[0], nil
}

// oneByOne converts the edits of Publish to one for PublishAll.
func oneByOne[T any](edit []func(*client.Message)) func(T, *client.Message) {
	return func(_ T, m *client.Message) {
		for _, e := range edit {
			if e != nil {
				e(m)
			}
		}
	}
}

// PublishAll writes vs to the outbox in order, as [Publisher.Publish] does, in few statements. It
// returns their message-ids. If one value can't be encoded, nothing is written.
func (p Publisher[T]) PublishAll(ctx context.Context, db postgres.DB, vs []T, edit ...func(v T, m *client.Message)) (messageIDs []string, err error) {
	return p.write(ctx, db, vs, edit...)
}

// atOnce is how many messages one statement writes, and bytesAtOnce their total size. A statement
// may have 65,535 parameters and 1 GiB, which PostgreSQL holds in memory.
const (
	atOnce      = 1000
	bytesAtOnce = 16 << 20
)

func (p Publisher[T]) write(ctx context.Context, db postgres.DB, vs []T, edit ...func(v T, m *client.Message)) ([]string, error) {
	rows, err := p.rows(db, vs, edit...)
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(vs))
	for i, r := range rows {
		ids[i] = r.id
	}
	args := make([]any, 0, columns*min(len(vs), atOnce))
	for len(rows) > 0 {
		args = args[:0]
		n, size := 0, 0
		for _, r := range rows[:min(len(rows), atOnce)] {
			if size += len(r.message); n > 0 && size > bytesAtOnce {
				break
			}
			n++
			args = append(args, r.message, r.id, r.address, nullable(r.key))
		}
		if _, err := db.Exec(ctx, insertion(n), args...); err != nil {
			return nil, fmt.Errorf("outbox: %w", err)
		}
		rows = rows[n:]
	}
	return ids, nil
}

// row is a message as a table holds it.
type row struct {
	message          []byte
	id, address, key string
}

// rows encodes vs, and refuses values that can't be written or sent.
func (p Publisher[T]) rows(db postgres.DB, vs []T, edit ...func(v T, m *client.Message)) ([]row, error) {
	if err := refuse.NilDB(db); err != nil {
		return nil, err
	}
	if !p.To.IsZero() {
		if _, err := p.To.Build(); err != nil {
			return nil, err
		}
	}
	rows := make([]row, len(vs))
	for i, v := range vs {
		m, err := p.message(v)
		if err != nil {
			return nil, err
		}
		for _, e := range edit {
			if e != nil {
				e(v, m)
			}
		}
		r := &rows[i]
		if r.id, r.address, err = check(m); err != nil {
			return nil, err
		}
		if p.Key != nil {
			if r.key = p.Key(v); len(r.key) > maxKey || !text(r.key) {
				return nil, argument.New("Publisher.Key", r.key, "is over 1,000 bytes, or isn't UTF-8 without NUL", "return a short key, such as a customer's number")
			}
		}
		if r.message, err = m.MarshalBinary(); err != nil {
			return nil, argument.New("value", fmt.Sprintf("%T", v), "can't be encoded as an AMQP message", "check the edit functions").Because(err)
		}
	}
	return rows, nil
}

// message makes a message of v, with the properties that every message here has.
func (p Publisher[T]) message(v T) (m *client.Message, err error) {
	defer func() {
		if r := recover(); r != nil {
			m, err = nil, argument.New("value", fmt.Sprintf("%T", v), fmt.Sprintf("made the codec panic: %v", r), "fix the value's marshaler")
		}
	}()
	if given, ok := any(v).(*client.Message); ok {
		if given == nil {
			return nil, argument.New("message", nil, "is nil", "pass a message, such as client.NewMessage(body)")
		}
		// The edits and the address must not change the caller's message.
		m = new(*given)
		m.Header = new(client.Header{Durable: true, Priority: 4})
		if given.Header != nil {
			*m.Header = *given.Header
		}
		m.Properties = &client.Properties{}
		if given.Properties != nil {
			*m.Properties = *given.Properties
		}
		m.Annotations = maps.Clone(given.Annotations)
		m.ApplicationProperties = maps.Clone(given.ApplicationProperties)
	} else {
		codec := p.Codec
		if codec == nil {
			codec = client.JSONCodec{}
		}
		m = client.NewMessage(nil)
		m.Data = nil
		if err := codec.Encode(v, m); err != nil {
			return nil, argument.New("value", fmt.Sprintf("%T", v), "can't be encoded", "fix the value, or use another Codec").Because(err)
		}
	}
	if m.Properties == nil {
		m.Properties = &client.Properties{}
	}
	if m.Properties.MessageID == nil {
		m.Properties.MessageID = rand.Text()
	}
	if !p.To.IsZero() {
		client.PublishTo(p.To)(m)
	}
	return m, nil
}

// check returns the message-id and the address of a message that a relay can publish.
func check(m *client.Message) (id, to string, err error) {
	if m.Properties == nil || m.Properties.To == nil || *m.Properties.To == "" {
		return "", "", argument.New("message Properties.To", nil, "is missing", "pass an address, or set one with client.PublishTo")
	}
	id, ok := m.Properties.MessageID.(string)
	if !ok || id == "" || !text(id) {
		return "", "", argument.New("message Properties.MessageID", m.Properties.MessageID, "isn't a string of UTF-8 without NUL", "leave it out for a random one")
	}
	if _, err := address.Parse(*m.Properties.To); err != nil {
		return "", "", err
	}
	if err := client.Validate(m); err != nil {
		return "", "", err
	}
	return id, *m.Properties.To, nil
}

// text reports whether PostgreSQL can hold s as text.
func text(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

func nullable(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// columns is how many parameters a message takes.
const columns = 4

// insertion returns the statement that writes n messages.
//
// The transaction gets its number before the ids are assigned, because a relay concludes from a
// missing id that its transaction began before those that are visible. A materialized CTE is
// complete before the next reads from it.
//
// The last part wakes a sleeping relay. A sleeping relay holds the lock, so the statement
// notifies only then: transactions that notify commit one after another.
func insertion(n int) string {
	if n == 1 {
		return insertOne
	}
	var values strings.Builder
	for i := range n {
		if i > 0 {
			values.WriteByte(',')
		}
		values.WriteByte('(')
		for c := range columns {
			if c > 0 {
				values.WriteByte(',')
			}
			values.WriteByte('$')
			values.WriteString(strconv.Itoa(i*columns + c + 1))
			values.WriteString(casts[c])
		}
		values.WriteByte(')')
	}
	return insertHead + values.String() + insertTail
}

var casts = [columns]string{"::bytea", "::text", "::text", "::text"}

const (
	insertHead = `WITH began AS MATERIALIZED (SELECT pg_current_xact_id() AS xid),
written (message, message_id, address, key) AS (VALUES `
	insertTail = `),
numbered AS MATERIALIZED (SELECT nextval('hopback_outbox_id') AS id, xid, written.* FROM began, written),
inserted AS (
	INSERT INTO hopback_outbox (id, segment, message, message_id, address, key)
	SELECT id, (id >> 17) & 15, message, message_id, address, key FROM numbered
)
SELECT CASE WHEN pg_try_advisory_lock_shared(` + lockSleep + `)
	THEN pg_advisory_unlock_shared(` + lockSleep + `)::text
	ELSE pg_notify('hopback_outbox', 'hopback_outbox'::regclass::oid::text)::text END`
	insertOne = insertHead + "($1::bytea,$2::text,$3::text,$4::text)" + insertTail
)

// The advisory locks of an outbox, one set for each table of that name.
const (
	lockSleep = `(7525357070202399488 # ('hopback_outbox'::regclass::oid::bigint << 3 | 1))` // a relay sleeps
	lockOrder = `(7525357070202399488 # ('hopback_outbox'::regclass::oid::bigint << 3 | 2))` // shared: relays that don't keep the order
	lockKeyed = `(7525357070202399488 # ('hopback_outbox'::regclass::oid::bigint << 3 | 3))` // shared: relays that do
	lockDue   = `(7525357070202399488 # ('hopback_outbox'::regclass::oid::bigint << 3 | 5))` // a relay moves due messages
)
