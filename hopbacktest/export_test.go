package hopbacktest

// Told is o whose Want methods tell t.
func Told(o *Outcome, t TB) *Outcome {
	told := *o
	told.t = t
	return &told
}
