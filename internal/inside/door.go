package inside

// Door lets an exported type offer something to other packages of this module only. The type embeds a Door under an
// unexported name, so users see neither a field nor a method, and the compiler checks the argument of Of.
type Door[T any] struct{ inside T }

// NewDoor returns a Door through which Of gets inside.
func NewDoor[T any](inside T) Door[T] { return Door[T]{inside} }

func (d *Door[T]) open() T { return d.inside }

// Of returns what v offers through its Door. v is a *client.Conn from client.Connect, and not nil.
func Of[T any](v interface{ open() T }) T { return v.open() }
