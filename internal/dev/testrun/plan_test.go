package main

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Every package of integration is in the plan.
func TestThePlanHasAllOfIntegration(t *testing.T) {
	planned := append([]string{"./integration", "./integration/broker", "./integration/browser", "./integration/chaos", "./integration/cluster", "./integration/differ", "./integration/doctor"}, subjects...)
	var found []string
	r := newRunner(t.Context(), io.Discard)
	for _, pkg := range r.list("../../../integration/...") {
		_, below, _ := strings.Cut(pkg, "/hopback/integration")
		if !strings.HasPrefix(below, "/internal/") && !strings.HasPrefix(below, "/previous") {
			found = append(found, "./integration"+below)
		}
	}
	slices.Sort(planned)
	assert.Equal(t, planned, found)
}
