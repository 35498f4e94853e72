package client_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/httpapi"
)

var kinds = map[string]error{
	"ErrUnreachable": client.ErrUnreachable, "ErrAuthentication": client.ErrAuthentication, "ErrVirtualHost": client.ErrVirtualHost,
	"ErrTLS": client.ErrTLS, "ErrUnauthorized": client.ErrUnauthorized, "ErrNotFound": client.ErrNotFound, "ErrUnroutable": client.ErrUnroutable,
	"ErrRefused": client.ErrRefused, "ErrUserID": client.ErrUserID, "ErrTooLarge": client.ErrTooLarge, "ErrNotSent": client.ErrNotSent,
	"ErrOutcomeUnknown": client.ErrOutcomeUnknown, "ErrClosed": client.ErrClosed, "ErrConnectionLost": client.ErrConnectionLost,
	"ErrSessionLimit": client.ErrSessionLimit,
}

// The table in the documentation lists every kind, and is right.
func TestTheTableOfKindsIsRight(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "errors.go", nil, parser.ParseComments)
	require.NoError(t, err)
	decl := file.Decls[1].(*ast.GenDecl)
	rows := regexp.MustCompile(`(?m)^\t(Err\w+) +(yes|no) +(yes|no)`).FindAllStringSubmatch(decl.Doc.Text(), -1)
	table := map[string][]string{}
	for _, row := range rows {
		table[row[1]] = row[2:]
	}
	answer := map[bool]string{true: "yes", false: "no"}
	for _, spec := range decl.Specs {
		name := spec.(*ast.ValueSpec).Names[0].Name
		require.Contains(t, kinds, name)
		err := &client.Error{Op: "publish", Kind: kinds[name]}
		wrapped := fmt.Errorf("wrapped: %w", err)
		assert.Equal(t, []string{answer[client.SafeToRetry(wrapped)], answer[client.WorthRetrying(wrapped)]}, table[name], name)
		assert.Equal(t, client.WorthRetrying(err), client.WorthRetrying(kinds[name]), name)
		assert.Equal(t, client.WorthRetrying(err), err.WorthRetrying(), name)
	}
	assert.Len(t, table, len(decl.Specs))
	assert.Len(t, kinds, len(decl.Specs))
}

func TestWorthRetryingDependsOnTheCause(t *testing.T) {
	t.Parallel()
	of := func(kind, cause error) error { return &client.Error{Op: "publish", Kind: kind, Err: cause} }
	refused := func(condition string) error {
		return &client.Error{Op: "publish", Kind: client.ErrRefused, Condition: condition}
	}
	batch := func(errs ...error) error {
		b := &client.BatchError{Of: len(errs)}
		for i, err := range errs {
			b.Failed = append(b.Failed, client.BatchFailure{Index: i, Err: err})
		}
		return b
	}
	full, large := refused("amqp:resource-limit-exceeded"), of(client.ErrTooLarge, nil)
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"nil":                             {nil, false},
		"another package's":               {io.EOF, false},
		"an ended ctx":                    {of(client.ErrNotSent, context.DeadlineExceeded), true},
		"a closed publisher":              {of(client.ErrNotSent, client.ErrClosed), false},
		"closed before the answer":        {of(client.ErrOutcomeUnknown, client.ErrClosed), false},
		"an outage":                       {of(client.ErrNotSent, errors.Join(context.Canceled, of(client.ErrUnreachable, io.EOF))), true},
		"an outage with a wrong password": {of(client.ErrNotSent, errors.Join(context.Canceled, of(client.ErrAuthentication, nil))), false},
		"forbidden, and perhaps stored":   {of(client.ErrOutcomeUnknown, of(client.ErrUnauthorized, nil)), false},
		"a full queue":                    {full, true},
		"a queue in exclusive use":        {refused("amqp:resource-locked"), true},
		"an invalid field":                {refused("amqp:invalid-field"), false},
		"one endpoint of two":             {errors.Join(of(client.ErrAuthentication, nil), of(client.ErrUnreachable, nil)), true},
		"no endpoint":                     {errors.Join(of(client.ErrAuthentication, nil), of(client.ErrTLS, nil)), false},
		"a batch with a full queue":       {batch(large, full), true},
		"a batch of large messages":       {batch(large, large), false},
		"an invalid argument":             {argument.New("value", nil, "is nil", ""), false},
		"an invalid argument over a loss": {argument.New("value", nil, "is nil", "").Because(client.ErrConnectionLost), false},
		"a conflict":                      {&declare.Error{Reason: declare.ErrConflict}, false},
		"not found":                       {&declare.Error{Reason: declare.ErrNotFound}, false},
		"a queue in use":                  {&declare.Error{Reason: declare.ErrInUse}, true},
		"no leader":                       {&declare.Error{Reason: declare.ErrUnavailable}, true},
		"no reply":                        {&declare.Error{Reason: declare.ErrNoReply, Err: of(client.ErrOutcomeUnknown, io.EOF)}, true},
		"no permission":                   {&declare.Error{Reason: declare.ErrNoReply, Err: errors.New("write access to exchange 'x' in vhost '/' refused for user 'u'")}, false},
		"an API that is down":             {&httpapi.Error{Reason: declare.ErrUnavailable}, true},
		"an API with another password":    {&httpapi.Error{Reason: declare.ErrForbidden}, false},
	} {
		assert.Equal(t, c.want, client.WorthRetrying(c.err), name)
	}
}

// What a service gets for messages that can never be accepted, and for one that a full queue refuses.
func TestWhatIsWorthRetryingOnABroker(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.0.5", "4.3.6"} {
		broker := hopbacktest.Start(t, hopbacktest.Config{Version: version, MaxMessageSize: 10_000})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "full", DeadLetter: declare.Drop(), MaxLength: 1, Overflow: declare.OverflowRejectPublish},
		}})
		require.NoError(t, err)
		publish := func(to address.Address, v any) error {
			p, err := client.NewPublisher[any](t.Context(), conn, to, client.PublisherConfig{})
			if err != nil {
				return err
			}
			return p.Publish(t.Context(), v)
		}
		for name, err := range map[string]error{
			"too large":   publish(address.Queue("q"), make([]byte, 20_000)),
			"unencodable": publish(address.Queue("q"), func() {}),
			"not found":   publish(address.Queue("nope"), "x"),
			"unroutable":  publish(address.Exchange("amq.direct", "nope"), "x"),
		} {
			require.Error(t, err, name)
			assert.True(t, client.SafeToRetry(err), name)
			assert.False(t, client.WorthRetrying(err), "%s: %v", name, err)
		}
		var refused error
		for range 5 {
			refused = errors.Join(refused, publish(address.Queue("full"), "x"))
		}
		require.ErrorIs(t, refused, client.ErrRefused)
		assert.True(t, client.WorthRetrying(refused))
	}
}
