package main

import (
	"testing"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

func TestCharge(t *testing.T) {
	orders := hopbacktest.Run(t, policy, client.JSON(charge), Order{ID: "o-1"}, Order{ID: "gift"})

	orders.Message(0).WantHandled().WantAttempts(2).WantDelays(time.Second)
	orders.Message(1).WantDead(retry.ReasonPermanent).WantAttempts(1)
}
