package declare

import (
	"context"
	"errors"
	"reflect"
	"strings"

	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/values"
)

// conflictDetails completes a refusal with all differences: the broker's text has only the first.
func conflictDetails(ctx context.Context, r Requester, d Declaration, e *Error) {
	if e.Reason != ErrConflict {
		return
	}
	if d.Resource.Kind == kindQueue {
		info, err := Inspect(ctx, r, d.Resource.Name)
		if err == nil {
			e.Differences = conflicts(d.Body, queueBody(info))
		}
	}
	if len(e.Differences) == 0 && e.Conflict != nil {
		e.Differences = []Conflict{*e.Conflict}
	}
	e.Remedies = remedies(d.Resource.Kind, e.Differences)
}

// unlike finds the differences in a queue that the broker reports as existing: the broker doesn't
// compare every argument.
func (d Declaration) unlike(status int, reply any) error {
	info, missing := parseQueueInfo(reply)
	if missing != "" {
		return nil // an older or a newer reply; the broker has compared what it compares
	}
	e := d.Differs(queueBody(info))
	if e == nil {
		return nil
	}
	e.Status = status
	return e
}

// asError finds the *Error in err.
func asError(err error) *Error {
	var e *Error
	errors.As(err, &e)
	return e
}

func queueBody(q QueueInfo) map[string]any {
	return map[string]any{"durable": q.Durable, "exclusive": q.Exclusive, "auto_delete": q.AutoDelete, "arguments": q.Arguments}
}

// conflicts compares a Declaration with an existing resource, field by field and then argument by
// argument.
func conflicts(want, have map[string]any) []Conflict {
	wantArgs, _ := want["arguments"].(map[string]any)
	haveArgs, _ := have["arguments"].(map[string]any)
	var list []Conflict
	compare := func(key string, w, h any, wok, hok bool) {
		if wok == hok && reflect.DeepEqual(w, h) {
			return
		}
		c := Conflict{Argument: key, Wanted: settingOf(w, wok), Found: settingOf(h, hok)}
		if c.Wanted.Set && c.Found.Set && c.Wanted.Type == c.Found.Type {
			// Only where the types differ do they say more than the values.
			c.Wanted.Type, c.Found.Type = "", ""
		}
		list = append(list, c)
	}
	for _, key := range values.SortedKeys(want) {
		if key != "arguments" {
			h, ok := have[key]
			compare(key, want[key], h, true, ok)
		}
	}
	for _, key := range values.SortedKeys(union(wantArgs, haveArgs)) {
		w, wok := wantArgs[key]
		h, hok := haveArgs[key]
		if key == "x-queue-type" && !wok {
			continue // the broker adds its virtual host's default
		}
		compare(key, w, h, wok, hok)
	}
	return list
}

func settingOf(v any, set bool) Setting {
	if !set {
		return Setting{}
	}
	text, typ := values.Describe(v)
	return Setting{Value: text, Type: typ, Set: true}
}

// remedies lists what can be done about a resource that exists with other settings.
func remedies(kind string, differences []Conflict) []string {
	if kind != kindQueue {
		return []string{
			"declare an exchange under another name, bind it, and move the publishers",
			"delete it while nobody publishes to it, and run this again; its bindings are deleted with it",
		}
	}
	var ways []string
	var byPolicy []string
	for _, d := range differences {
		if a, ok := queuearg.Known[d.Argument]; ok && a.Policy && d.Wanted.Set && !d.Found.Set {
			byPolicy = append(byPolicy, strings.TrimPrefix(d.Argument, "x-"))
		}
	}
	if len(byPolicy) > 0 {
		ways = append(ways, "set "+strings.Join(byPolicy, ", ")+" with a policy, which can change a live queue, and remove it from the declaration")
	}
	return append(ways,
		"declare it as it exists",
		"declare it under a new name and move the messages, as package operate/migrate does",
		"delete it once it is empty and unused, and run this again")
}
