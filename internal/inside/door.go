package inside

// Door leads to what an exported type offers to other packages of this module. The type embeds a Door
// under a name that isn't exported, so users see neither a field nor a method, and the compiler still
// checks what Of is called with.
type Door[T any] struct{ inside T }

// NewDoor returns a Door that leads to inside.
func NewDoor[T any](inside T) Door[T] { return Door[T]{inside} }

func (d *Door[T]) open() T { return d.inside }

// Of returns what v offers. v is a *client.Conn of client.Connect, and not nil.
func Of[T any](v interface{ open() T }) T { return v.open() }
