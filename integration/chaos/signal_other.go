//go:build !unix

package chaos

import (
	"errors"
	"os"
)

func pauseProcess(*os.Process) error    { return errors.ErrUnsupported }
func continueProcess(*os.Process) error { return errors.ErrUnsupported }
func logStacks(*os.Process) error       { return errors.ErrUnsupported }
