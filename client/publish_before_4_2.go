package client

import "github.com/hopback/hopback/argument"

// refusesCC refuses additional routing keys if the broker would ignore them. While the broker's
// version is unknown, it refuses nothing.
func (c *Conn) refusesCC(argumentName string, keys int) error {
	w := c.pool.Up()
	if w == nil || w.Version == "" || !w.Old.IgnoresCC {
		return nil
	}
	return argument.New(argumentName, keys, "needs RabbitMQ 4.1 or later, and the broker is "+w.Version, "publish the message once for each key")
}
