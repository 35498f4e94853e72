package rabbitmq

// EvalCommand is for a test of what Eval does without erl_call.
var EvalCommand = evalCommand
