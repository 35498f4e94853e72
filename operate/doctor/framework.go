package doctor

import (
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/internal/frameworks"
)

// Framework is a library or a system whose topology a virtual host has.
type Framework = frameworks.Framework

func recognize(s check.Snapshot) []Framework { return frameworks.Recognize(s) }
