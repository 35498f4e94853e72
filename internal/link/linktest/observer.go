package linktest

import (
	"context"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// Ignore is a link.Observer that does nothing, and a link.Requests that knows nothing.
type Ignore struct{}

func (Ignore) Up(link.Place, int, time.Duration)   {}
func (Ignore) Lost(link.Place, error)              {}
func (Ignore) Refused(link.Place, int, error)      {}
func (Ignore) Blocked(link.Place)                  {}
func (Ignore) Unblocked(link.Place, time.Duration) {}
func (Ignore) TokenRenewed(link.Place, int)        {}
func (Ignore) TokenRefused(link.Place, int, error) {}
func (Ignore) Ended(link.Place)                    {}

func (Ignore) Leader(context.Context, *link.Wire) string           { return "" }
func (Ignore) SendToken(context.Context, *link.Wire, string) error { return nil }
