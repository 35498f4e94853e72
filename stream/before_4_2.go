package stream

import "github.com/hopback/hopback/internal/oldbroker"

// needs returns the filter that only later brokers support, and since which version; "" if there
// is none.
func (f Filter) needs(old oldbroker.Quirks) (name, since string) {
	switch {
	case f.SQL != "" && old.IgnoresSQLFilters:
		return "SQL", "4.2"
	case len(f.Properties) > 0 && old.IgnoresPropertyFilters:
		return "Properties", "4.1"
	case len(f.ApplicationProperties) > 0 && old.IgnoresPropertyFilters:
		return "ApplicationProperties", "4.1"
	}
	return "", ""
}
