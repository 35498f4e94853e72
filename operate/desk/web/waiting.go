package web

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/oldbroker"
)

const (
	// waitingLimit is how long an action about a waiting message may take.
	waitingLimit = 10 * time.Second
	// maxWaitingToken is the longest token, in bytes.
	maxWaitingToken = 512
	// maxMinutes is the longest time that a message can be rescheduled by: a year.
	maxMinutes = 366 * 24 * 60
)

// waitingData is the page about a waiting message. The broker doesn't show those, so a person names
// the queue and the token.
type waitingData struct {
	page
	Queue, Key string
	Named      bool
	Answer     string
	Bad        bool
}

func namedWaiting(v *visit) (queue, token string, no *refusal) {
	queue, token = v.form.Get("in"), v.form.Get("key")
	if len(queue) > 255 || len(token) > maxWaitingToken {
		return "", "", refuse(http.StatusBadRequest, "Too long", "A queue's name has at most 255 bytes, and a token at most 512.")
	}
	return queue, token, nil
}

// claims reports whether the broker knows tokens.
func (h *Handler) claims() bool { return !oldbroker.Of(h.desk.Broker().AtLeast).LacksTokens }

// waitingForm asks for a queue and a token, and then shows what can be done. Nothing is changed.
func (h *Handler) waitingForm(v *visit) *refusal {
	queue, token, no := namedWaiting(v)
	if no != nil {
		return no
	}
	if !h.claims() {
		return refuse(http.StatusConflict, "This needs RabbitMQ 4.4", "Waiting messages can be canceled, run, or rescheduled by their token only on RabbitMQ 4.4 or later, and the broker is "+h.desk.Broker().Version+".")
	}
	h.render(v.w, http.StatusOK, "waiting", waitingData{page: h.page(v, "Waiting message"), Queue: queue, Key: token, Named: queue != "" && token != ""})
	return nil
}

// waiting cancels, runs, or reschedules the messages that wait under a token.
func (h *Handler) waiting(v *visit) *refusal {
	queue, token, no := namedWaiting(v)
	if no != nil {
		return no
	}
	if queue == "" || token == "" {
		return refuse(http.StatusBadRequest, "No message is named", "Go back, and enter the queue and the token.")
	}
	var do func(context.Context, *client.Claimer) (int, error)
	did := ""
	switch v.form.Get("do") {
	case "cancel":
		did = "canceled"
		do = func(ctx context.Context, c *client.Claimer) (int, error) { return c.Cancel(ctx, token) }
	case "run-now":
		did = "made ready"
		do = func(ctx context.Context, c *client.Claimer) (int, error) { return c.RunNow(ctx, token) }
	case "reschedule":
		minutes, err := strconv.Atoi(strings.TrimSpace(v.form.Get("minutes")))
		if err != nil || minutes < 1 || minutes > maxMinutes {
			return refuse(http.StatusUnprocessableEntity, "No time is named", "Go back, and enter a number of minutes, at most a year.")
		}
		did = "rescheduled"
		do = func(ctx context.Context, c *client.Claimer) (int, error) {
			return c.Reschedule(ctx, token, time.Now().Add(time.Duration(minutes)*time.Minute))
		}
	default:
		return refuse(http.StatusBadRequest, "No action is named", "Go back and use a button on that page.")
	}
	ctx, cancel := context.WithTimeout(v.Context(), waitingLimit)
	defer cancel()
	n, err := h.claim(ctx, queue, do)
	h.did(v, ActionWaiting, "waiting messages were "+did, "queue", queue, "token", token, "messages", n, "error", err)
	data := waitingData{page: h.page(v, "Waiting message"), Queue: queue, Key: token, Named: true, Bad: err != nil || n == 0}
	switch {
	case errors.As(err, new(*argument.Error)):
		return refuse(http.StatusConflict, "This queue's messages can't be claimed", plainError(err))
	case errors.Is(err, client.ErrOutcomeUnknown):
		data.Answer = "It isn't known whether the message was " + did + ": " + plainError(err)
	case err != nil:
		data.Answer = "The message wasn't " + did + ": " + plainError(err)
	case n == 0:
		data.Answer = "No message waits under this token. It may be due, handled, or never have been parked."
	default:
		data.Answer = many(n, "message") + " " + map[bool]string{true: "was ", false: "were "}[n == 1] + did + ". The broker has confirmed it."
	}
	h.render(v.w, http.StatusOK, "waiting", data)
	return nil
}

func (h *Handler) claim(ctx context.Context, queue string, do func(context.Context, *client.Claimer) (int, error)) (int, error) {
	c, err := h.desk.Claimer(ctx, queue)
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close(ctx) }()
	return do(ctx, c)
}
