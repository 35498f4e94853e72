package chaos

import (
	"context"
	"fmt"
	"io"

	"github.com/hopback/hopback/argument"
)

// openCluster starts a cluster.
func (s *site) openCluster(context.Context, io.Writer, string, int) error {
	return argument.New("nodes", len(s.nodes), "is not supported", fmt.Sprintf("use %d", 1))
}
