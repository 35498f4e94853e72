package desk

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// Go's types that only hold a text say nothing to people, and neither does a name that only hopback
// knows.
func TestTypesOfErrorsThatPeopleSee(t *testing.T) {
	t.Parallel()
	for stored, shown := range map[string]string{
		"*errors.errorString": "", "*fmt.wrapError": "", "*fmt.wrapErrors": "", "*errors.joinError": "",
		"*failure.PanicError": "*client.PanicError", "*client.PanicError": "*client.PanicError", "*failure.Error": "*client.Error", "*net.OpError": "*net.OpError", "": "",
	} {
		assert.Equal(t, shown, groupOf("orders", "permanent", stored, "boom").ErrorType)
	}
	assert.NotEqual(t, groupOf("q", "r", "*fmt.wrapError", "boom").ID, groupOf("q", "r", "", "boom").ID, "IDs are as before")
}
