// Package anew gives package desk what package retry knows of a message that begins anew.
package anew

import "github.com/hopback/hopback/client"

// Copy returns a copy of a dead letter without its history of failures and waits: its
// retries count from 0, and retry.Policy.GiveUpAfter counts from its next failure. The copy
// keeps all that client.Copy keeps, and the exchange and the routing key that the message
// was first published with. The dead letter isn't changed. Package retry sets it.
var Copy func(dead *client.Message) *client.Message
