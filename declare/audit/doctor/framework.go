package doctor

import (
	"github.com/hopback/hopback/declare/audit"
	"github.com/hopback/hopback/declare/audit/internal/frameworks"
)

// Framework is a library or a system whose topology a virtual host has.
type Framework = frameworks.Framework

func recognize(s audit.Snapshot) []Framework { return frameworks.Recognize(s) }
