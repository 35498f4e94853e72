package client

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/event"
)

func TestEventIsOneLineOfText(t *testing.T) {
	e := Event{Kind: EventTokenRefused, Op: "connection", Target: "a:5672", Err: errors.New("expired")}
	assert.Equal(t, "connection a:5672: token-refused: expired", e.String())
	e = Event{Kind: EventUp, Op: "consume", Target: "orders", Down: 1234567 * time.Microsecond}
	assert.Equal(t, "consume orders: up after 1.235s", e.String())
}

// Event and stateEvent have the same fields, and publicEvent leaves none out.
func TestPublicEventsHaveAllFields(t *testing.T) {
	var e event.StateEvent
	v := reflect.ValueOf(&e).Elem()
	require.Equal(t, reflect.TypeFor[Event]().NumField(), v.NumField())
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.String:
			f.SetString("x")
		case reflect.Int, reflect.Int64:
			f.SetInt(1)
		case reflect.Uint64:
			f.SetUint(1)
		case reflect.Interface:
			f.Set(reflect.ValueOf(errors.New("x")))
		default:
			f.Set(reflect.ValueOf(time.Now()))
		}
	}
	public := reflect.ValueOf(publicEvent(e))
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		assert.Equal(t, name, public.Type().Field(i).Name)
		assert.Equal(t, v.Field(i).Interface(), public.FieldByName(name).Convert(v.Field(i).Type()).Interface(), name)
	}
}

func TestKindsOfEventsAreTheSame(t *testing.T) {
	for public, internal := range map[EventKind]event.EventKind{
		EventUp: event.EventUp, EventLost: event.EventLost, EventRefused: event.EventRefused, EventBlocked: event.EventBlocked, EventUnblocked: event.EventUnblocked,
		EventLate: event.EventLate, EventTokenRenewed: event.EventTokenRenewed, EventTokenRefused: event.EventTokenRefused,
		EventForwardStalled: event.EventForwardStalled, EventForwardResumed: event.EventForwardResumed, EventEnded: event.EventEnded,
		EventStarved: event.EventStarved, EventClockDiffers: event.EventClockDiffers,
	} {
		assert.EqualValues(t, public, internal)
	}
}
