package condition_test

import (
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/condition"
)

func TestKinds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		condition    amqp.ErrCond
		description  string
		kind, ofLink error
	}{
		{amqp.ErrCondNotFound, "", condition.ErrNotFound, condition.ErrNotFound},
		{amqp.ErrCondResourceDeleted, "", condition.ErrNotFound, condition.ErrNotFound},
		{amqp.ErrCondUnauthorizedAccess, "write access refused", condition.ErrUnauthorized, condition.ErrUnauthorized},
		{amqp.ErrCondUnauthorizedAccess, "user_id property set to 'a' but authenticated user was 'b'", condition.ErrUserID, condition.ErrUserID},
		{amqp.ErrCondUnauthorizedAccess, "credential expired", nil, condition.ErrConnectionLost},
		{amqp.ErrCondMessageSizeExceeded, "", condition.ErrTooLarge, condition.ErrTooLarge},
		{amqp.ErrCondDetachForced, "", nil, condition.ErrConnectionLost},
		{amqp.ErrCondConnectionForced, "", nil, condition.ErrConnectionLost},
		{amqp.ErrCondInternalError, "", nil, condition.ErrConnectionLost},
		{amqp.ErrCondFramingError, "", nil, condition.ErrConnectionLost},
		{amqp.ErrCondPreconditionFailed, "", nil, condition.ErrRefused},
		{amqp.ErrCondNotAllowed, "", nil, condition.ErrRefused},
		{amqp.ErrCondInvalidField, "", nil, condition.ErrRefused},
		{amqp.ErrCondResourceLocked, "", nil, condition.ErrRefused},
		{"", "", nil, condition.ErrRefused},
	} {
		assert.Equal(t, c.kind, condition.Kind(string(c.condition), c.description), c.condition)
		assert.Equal(t, c.ofLink, condition.OfLink(string(c.condition), c.description), c.condition)
	}
}
