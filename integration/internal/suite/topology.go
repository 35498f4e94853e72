package suite

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/operate/httpapi"
	"github.com/hopback/hopback/retry"
)

// API reads the HTTP API of the site's virtual host.
func (s *Site) API(t *testing.T, edit ...func(*url.URL)) *httpapi.Reader {
	t.Helper()
	u, err := url.Parse(s.ManagementURL)
	require.NoError(t, err)
	for _, e := range edit {
		e(u)
	}
	r, err := httpapi.New(u.String(), s.VHost, httpapi.Config{Timeout: Patience})
	require.NoError(t, err)
	return r
}

// Sources are both ways to read the site.
func (s *Site) Sources(t *testing.T, conn *client.Conn) check.Sources {
	t.Helper()
	return check.Sources{AMQP: conn.Management(), HTTP: s.API(t)}
}

// Verified is the live broker, checked.
func Verified(ctx context.Context, src check.Sources, topology declare.Topology) (check.Verification, error) {
	s, err := check.Read(ctx, src, topology)
	if err != nil {
		return check.Verification{}, err
	}
	return check.Verify(s, topology), nil
}

// DeclareQueue declares a queue over the HTTP API: hopback itself refuses some of them.
func (s *Site) DeclareQueue(t *testing.T, name string, args map[string]any) {
	t.Helper()
	s.HTTP(t, http.MethodPut, "/queues/"+s.VHost+"/"+url.PathEscape(name), map[string]any{"durable": true, "arguments": args}, nil)
}

// DeclareExchange declares an exchange over the HTTP API.
func (s *Site) DeclareExchange(t *testing.T, name, kind string, durable bool, args map[string]any) {
	t.Helper()
	if args == nil {
		args = map[string]any{} // null is a 500
	}
	s.HTTP(t, http.MethodPut, "/exchanges/"+s.VHost+"/"+name, map[string]any{"type": kind, "durable": durable, "arguments": args}, nil)
}

// Bind binds a queue to an exchange over the HTTP API.
func (s *Site) Bind(t *testing.T, source, queue, key string) {
	t.Helper()
	s.HTTP(t, http.MethodPost, "/bindings/"+s.VHost+"/e/"+source+"/q/"+url.PathEscape(queue), map[string]any{"routing_key": key, "arguments": map[string]any{}}, nil)
}

// Guarded is what the guards say of a queue and a policy, as errors.
func Guarded(t *testing.T, conn *client.Conn, queue string, p retry.Policy) []*retry.GuardError {
	t.Helper()
	err := client.Prepare(t.Context(), retry.With(p)(Nop), client.Start{Queue: queue, Broker: conn.Broker(), Management: conn.Management()})
	if err == nil {
		return nil
	}
	if one, ok := err.(*retry.GuardError); ok {
		return []*retry.GuardError{one}
	}
	joined, ok := err.(interface{ Unwrap() []error })
	require.True(t, ok, "%v", err)
	var all []*retry.GuardError
	for _, e := range joined.Unwrap() {
		var g *retry.GuardError
		require.ErrorAs(t, e, &g)
		all = append(all, g)
	}
	return all
}

// Policy sets a policy, or an operator's, for the one queue or exchange of that name.
func (s *Site) Policy(t *testing.T, kind, name string, definition map[string]any) {
	t.Helper()
	s.HTTP(t, http.MethodPut, "/"+kind+"/"+s.VHost+"/"+name, map[string]any{"pattern": "^" + name + "$", "definition": definition}, nil)
}

// Found are what the doctor found, each as "severity rule resource".
func Found(r doctor.Report) (all []string) {
	for _, g := range r.Groups {
		for _, f := range g.Findings {
			all = append(all, fmt.Sprintf("%s %s %s", f.Severity, f.Rule, f.Resource))
		}
	}
	return all
}
