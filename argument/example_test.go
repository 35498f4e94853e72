package argument_test

import (
	"errors"
	"fmt"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// Every function of hopback returns the same type of error for an invalid argument.
func ExampleError() {
	_, err := address.Queue("orders\n").Build()
	fmt.Println(err)

	var invalid *argument.Error
	if errors.As(err, &invalid) {
		fmt.Println("argument:", invalid.Path)
		fmt.Println("problem: ", invalid.Problem)
		fmt.Println("remedy:  ", invalid.Remedy)
	}
	// Output:
	// hopback: queue name = "orders\n" has a line break; remove the carriage return or line feed
	// argument: queue name
	// problem:  has a line break
	// remedy:   remove the carriage return or line feed
}
