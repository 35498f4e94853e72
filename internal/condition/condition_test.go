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
		{amqp.ErrCondPreconditionFailed, "stream queue 'log' in vhost '/' does not have a running replica on the local node", nil, condition.ErrConnectionLost},
		{amqp.ErrCondNotAllowed, "", nil, condition.ErrRefused},
		{amqp.ErrCondInvalidField, "", nil, condition.ErrRefused},
		{amqp.ErrCondResourceLocked, "", nil, condition.ErrRefused},
		{"", "", nil, condition.ErrRefused},
	} {
		assert.Equal(t, c.kind, condition.Kind(string(c.condition), c.description), c.condition)
		assert.Equal(t, c.ofLink, condition.OfLink(string(c.condition), c.description), c.condition)
	}
}

func TestRefusalsOfUserIDs(t *testing.T) {
	t.Parallel()
	for description, user := range map[string]string{
		"user_id property set to 'ada' but authenticated user was 'bob'":                                         "bob",
		"user_id property set to 'x' but authenticated user was 'y' but authenticated user was 'bob'":            "bob",
		"user_id property set to '' but authenticated user was 'o'hara'":                                         "o'hara",
		"write access to exchange 'x' in vhost '/' refused for user 'bob'":                                       "",
		"user_id property set to 'ada'":                                                                          "",
		"user_id property set to 'ada' but authenticated user was '":                                             "",
		"user_id property set to 'ada' but authenticated user was 'bob":                                          "",
		"write access to exchange 'user_id property set to 'ada' but authenticated user was 'bob'' in vhost '/'": "",
	} {
		got, ok := condition.UserID(description)
		assert.Equal(t, user, got, description)
		assert.Equal(t, user != "", ok, description)
	}
}
