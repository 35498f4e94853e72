package main

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// Every package of integration is in the plan.
func TestThePlanHasAllOfIntegration(t *testing.T) {
	planned := append([]string{"./integration", "./integration/broker", "./integration/browser", "./integration/chaos/short", "./integration/cluster", "./integration/differ", "./integration/docs", "./integration/doctor"}, subjects...)
	planned = append(planned, toolUnits...)
	planned = append(planned, "./integration/proxy", "./integration/rabbitmq", "./integration/rabbitmq/cmd/broker", "./integration/surface", "./integration/vocabulary")
	var found []string
	r := newRunner(t.Context(), io.Discard)
	for _, pkg := range r.list("../../integration/...") {
		_, below, _ := strings.Cut(pkg, "/hopback/integration")
		if !strings.HasPrefix(below, "/internal/") && !strings.HasPrefix(below, "/previous") && below != "/partitionrig" && below != "/chaos/cmd/chaos" { // these have no tests
			found = append(found, "./integration"+below)
		}
	}
	slices.Sort(planned)
	assert.Equal(t, planned, found)
}

// Without a broker, one line says what was left out and what to do. It repeats no error of Docker's.
func TestOneLineSaysWhatWasLeftOut(t *testing.T) {
	why := &rabbitmq.NoWayError{Version: "4.3", Tried: []rabbitmq.Attempt{{How: rabbitmq.HowDocker, Err: errors.New("permission denied\nwhile trying to connect")}}}
	assert.Equal(t, "left out: all tests with a real RabbitMQ 4.3; to run them, set HOPBACK_URL_4_3 to the amqp:// URL of a RabbitMQ 4.3, "+
		"or install Docker with compose, or be root on Debian", leftOutLine(why))
}
