package hopbacktest

// Notified is o whose Want methods tell t.
func Notified(o *Outcome, t tb) *Outcome {
	notified := *o
	notified.t = t
	return &notified
}
