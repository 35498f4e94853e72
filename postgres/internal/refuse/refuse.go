// Package refuse refuses bad input.
package refuse

import (
	"reflect"

	"github.com/hopback/hopback/argument"
)

// NilDB returns an *argument.Error if db is nil, or holds a nil pointer.
func NilDB(db any) error {
	if v := reflect.ValueOf(db); v.IsValid() && (v.Kind() != reflect.Pointer || !v.IsNil()) {
		return nil
	}
	return argument.At(argument.Root("db"), argument.CodeMissing, nil, "is nil", "pass a connection, a pool, or a transaction")
}
