package migrate_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/migrate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What a move does is shown on brokers, in package integration.
func TestRunRefuses(t *testing.T) {
	t.Parallel()
	queue := declare.QuorumQueue{Name: "new", DeadLetter: declare.Drop()}
	none := []declare.Binding{}
	for says, cfg := range map[string]migrate.Config{
		"Config.New is nil":           {Old: "old", Bindings: none},
		"is the old queue's name":     {Old: "new", New: queue, Bindings: none},
		"without the HTTP API":        {Old: "old", New: queue},
		"negative":                    {Old: "old", New: queue, Bindings: none, Quiet: -1},
		"isn't a binding of the old":  {Old: "old", New: queue, Bindings: []declare.Binding{{Source: "x", Queue: "other"}}},
		"queue name is empty":         {New: queue, Bindings: none},
		"QuorumQueue(\"\").Name is e": {Old: "old", New: declare.QuorumQueue{DeadLetter: declare.Drop()}, Bindings: none},
	} {
		_, err := migrate.Run(t.Context(), &client.Conn{}, nil, cfg)
		var e *argument.Error
		require.ErrorAs(t, err, &e, says)
		assert.ErrorContains(t, err, says)
	}
	_, err := migrate.Run(t.Context(), nil, nil, migrate.Config{})
	require.ErrorContains(t, err, "conn is nil")
}
