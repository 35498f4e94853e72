package chaos

import (
	"context"
	"io"
	"net/http"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// openCluster starts a cluster of three nodes.
func (s *site) openCluster(ctx context.Context, out io.Writer, version string) error {
	c, err := rabbitmq.OwnCluster(ctx, out, version)
	if err != nil {
		return err
	}
	s.release, s.whole = c.Release, c.AwaitAll
	for _, n := range c.Nodes {
		s.nodes = append(s.nodes, &node{machine: n, url: n.URL, management: n.ManagementURL})
	}
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	err = api(ctx, s, http.MethodGet, "/overview", &overview)
	s.version = overview.Version
	return err
}
