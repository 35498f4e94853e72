package hopbacktest

// Told is o whose Want methods tell t.
func Told(o *Outcome, t tb) *Outcome {
	told := *o
	told.t = t
	return &told
}
