package fair_test

import (
	"testing"

	"github.com/hopback/hopback/integration/internal/suite"
)

func TestMain(m *testing.M) { suite.Main(m) }
