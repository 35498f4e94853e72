package client

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestEventIsOneLineOfText(t *testing.T) {
	e := Event{Kind: EventTokenRefused, Op: "connection", Target: "a:5672", Err: errors.New("expired")}
	assert.Equal(t, "connection a:5672: token-refused: expired", e.String())
	e = Event{Kind: EventUp, Op: "consume", Target: "orders", Down: 1234567 * time.Microsecond}
	assert.Equal(t, "consume orders: up after 1.235s", e.String())
}
