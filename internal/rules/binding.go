package rules

import (
	"reflect"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/values"
)

// bindingQuestion is the AMQP request for a binding: it lists the bindings with one source,
// destination, and key.
func bindingQuestion(b declare.Binding) string {
	dest := "&dste=" + address.Escape(b.Exchange)
	if b.Queue != "" {
		dest = "&dstq=" + address.Escape(b.Queue)
	}
	return "/bindings?src=" + address.Escape(b.Source) + dest + "&key=" + address.Escape(b.Key)
}

// bindingDeclaration is the request that declares b.
func bindingDeclaration(b declare.Binding) declare.Declaration {
	return declare.Topology{Bindings: []declare.Binding{b}}.Declarations()[0]
}

// BindingArguments are b's Match, Headers and Arguments as the broker has them.
func BindingArguments(b declare.Binding) map[string]any {
	args, _ := bindingDeclaration(b).Body["arguments"].(map[string]any)
	return args
}

// WithArguments returns of with the Match, Headers and Arguments of args.
func WithArguments(of declare.Binding, args map[string]any) declare.Binding {
	match, headers, rest := values.SplitBinding(args)
	of.Match, of.Headers, of.Arguments = declare.Match(match), headers, rest
	return of
}

// BindingName names b for people.
func BindingName(b declare.Binding) string { return bindingDeclaration(b).Resource.Name }

// SameBinding compares what makes two bindings one.
func SameBinding(a, b declare.Binding) bool {
	return a.Source == b.Source && a.Queue == b.Queue && a.Exchange == b.Exchange && a.Key == b.Key &&
		reflect.DeepEqual(BindingArguments(a), BindingArguments(b))
}

// QueueNames are the names of t's queues, each once, in order.
func QueueNames(t declare.Topology) []string {
	var list []string
	for _, d := range (declare.Topology{Queues: t.Queues}).Declarations() {
		list = append(list, d.Resource.Name)
	}
	return list
}
