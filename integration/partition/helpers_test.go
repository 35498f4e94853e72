package partition_test

import (
	"io"
	"log/slog"

	"github.com/hopback/hopback/integration/internal/suite"
)

// slogOf is the logger of a worker.
func slogOf(*suite.Site) *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }
