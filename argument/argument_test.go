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
	err := argument.Wrap(io.EOF, "Queue.Name", "a\nb", "has a line break", "remove it")
	assert.EqualError(t, err, `hopback: Queue.Name = "a\nb" has a line break (EOF); remove it`)
	assert.ErrorIs(t, err, io.EOF)
	assert.True(t, err.SafeToRetry())

	var e *argument.Error
	assert.True(t, errors.As(error(err), &e))
	assert.Equal(t, "Queue.Name", e.Name)
}

func TestErrorSurvivesHostileValues(t *testing.T) {
	var nilURL *url.URL
	for _, v := range []any{nil, "", strings.Repeat("é", 1<<20), "\xff\xfe", []byte("\x00"), 7, -1.5, nilURL, struct{}{}, func() {}} {
		msg := argument.New("x", v, "is bad", "").Error()
		assert.True(t, utf8.ValidString(msg), "%T", v)
		assert.Less(t, len(msg), 300, "%T", v)
	}
}
