module github.com/hopback/hopback/examples

go 1.26.0

// Those of the same checkout.
replace (
	github.com/hopback/hopback => ..
	github.com/hopback/hopback/postgres => ../postgres
)

require (
	github.com/Azure/go-amqp v1.7.0
	github.com/hopback/hopback v0.1.0
	github.com/hopback/hopback/postgres v0.1.0
	github.com/jackc/pgx/v5 v5.12.0
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
	google.golang.org/protobuf v1.36.12
)

require (
	github.com/jackc/pgpassfile v1.0.0 // indirect
	github.com/jackc/pgservicefile v0.0.0-20240606120523-5a60cdf6a761 // indirect
	github.com/jackc/puddle/v2 v2.2.3 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
	golang.org/x/sync v0.22.0 // indirect
	golang.org/x/text v0.41.0 // indirect
)
