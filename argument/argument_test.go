package argument_test

import (
	"errors"
	"io"
	"net/url"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestErrorSaysWhichWhatAndWhatToDo(t *testing.T) {
	err := argument.New("Queue.Name", "a\nb", "has a line break", "remove it").Because(io.EOF)
	assert.EqualError(t, err, `hopback: Queue.Name = "a\nb" has a line break (EOF); remove it`)
	assert.ErrorIs(t, err, io.EOF)
	assert.True(t, err.SafeToRetry())

	var e *argument.Error
	assert.True(t, errors.As(error(err), &e))
	assert.Equal(t, "Queue.Name", e.Path.String())
}

func TestPathIsWrittenAsGoCode(t *testing.T) {
	rule := argument.Root("Policy").Field("Rules").Index(2)
	for want, path := range map[string]argument.Path{
		"":                           nil,
		"Policy":                     argument.Root("Policy"),
		"Policy.Rules[2].MaxRetries": rule.Field("MaxRetries"),
		"Policy.Rules[2].Backoff(3)": rule.Field("Backoff").Call(3),
		`Q.Arguments["a\n\xff\"]"]`:  argument.Root("Q").Field("Arguments").Key("a\n\xff\"]"),
		`Q["` + strings.Repeat("k", 80) + `…"][-1]`: argument.Root("Q").Key(strings.Repeat("k", 1000)).Index(-1),
	} {
		assert.Equal(t, want, path.String())
	}
	// A path that was made longer twice is two paths.
	a, b := rule.Field("If"), rule.Field("Do")
	assert.Equal(t, "Policy.Rules[2].If Policy.Rules[2].Do", a.String()+" "+b.String())
}

// Other is printed without what it shares with Path.
func TestErrorNamesTheOtherArgument(t *testing.T) {
	binding := argument.Root("Binding")
	both := func(path, other argument.Path) string {
		return argument.At(path, argument.CodeConflict, nil, "is set, and so is", "").And(other).Error()
	}
	assert.Equal(t, "hopback: Binding.Queue is set, and so is Exchange", both(binding.Field("Queue"), binding.Field("Exchange")))
	assert.Equal(t, `hopback: Binding.Arguments["a"] is set, and so is Headers["a"]`, both(binding.Field("Arguments").Key("a"), binding.Field("Headers").Key("a")))
	assert.Equal(t, "hopback: Binding.Headers[0] is set, and so is Binding.Headers[1]", both(binding.Field("Headers").Index(0), binding.Field("Headers").Index(1)))
	assert.Equal(t, "hopback: Binding.Queue is set, and so is Other", both(binding.Field("Queue"), argument.Root("Other")))
	assert.Equal(t, "hopback: Binding.Queue is set, and so is Binding", both(binding.Field("Queue"), binding))
	assert.Equal(t, "hopback:  is set, and so is Binding", both(nil, binding))
}

func TestErrorSurvivesHostileValues(t *testing.T) {
	var nilURL *url.URL
	for _, v := range []any{nil, "", strings.Repeat("é", 1<<20), "\xff\xfe", []byte("\x00"), 7, -1.5, nilURL, struct{}{}, func() {}} {
		msg := argument.New("x", v, "is bad", "").Error()
		assert.True(t, utf8.ValidString(msg), "%T", v)
		assert.Less(t, len(msg), 300, "%T", v)
	}
}
