package audit

import (
	"reflect"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/values"
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

// bindingArguments are b's Match, Headers and Arguments as the broker has them.
func bindingArguments(b declare.Binding) map[string]any {
	args, _ := bindingDeclaration(b).Body["arguments"].(map[string]any)
	return args
}

// withArguments returns of with the Match, Headers and Arguments of args.
func withArguments(of declare.Binding, args map[string]any) declare.Binding {
	match, headers, rest := values.SplitBinding(args)
	of.Match, of.Headers, of.Arguments = declare.Match(match), headers, rest
	return of
}

// bindingName names b for people.
func bindingName(b declare.Binding) string { return bindingDeclaration(b).Resource.Name }

// sameBinding compares what makes two bindings one.
func sameBinding(a, b declare.Binding) bool {
	return a.Source == b.Source && a.Queue == b.Queue && a.Exchange == b.Exchange && a.Key == b.Key &&
		reflect.DeepEqual(bindingArguments(a), bindingArguments(b))
}

// queueNames are the names of t's queues, each once, in order.
func queueNames(t declare.Topology) []string {
	var list []string
	for _, d := range (declare.Topology{Queues: t.Queues}).Declarations() {
		list = append(list, d.Resource.Name)
	}
	return list
}
