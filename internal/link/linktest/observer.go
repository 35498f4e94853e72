package linktest

import (
	"time"

	"github.com/hopback/hopback/internal/link"
)

// Ignore is a link.Observer that does nothing.
type Ignore struct{}

func (Ignore) Up(link.Place, int, time.Duration)   {}
func (Ignore) Lost(link.Place, error)              {}
func (Ignore) Refused(link.Place, int, error)      {}
func (Ignore) Blocked(link.Place)                  {}
func (Ignore) Unblocked(link.Place, time.Duration) {}
func (Ignore) TokenRenewed(link.Place, int)        {}
func (Ignore) TokenRefused(link.Place, int, error) {}
func (Ignore) Ended(link.Place)                    {}
