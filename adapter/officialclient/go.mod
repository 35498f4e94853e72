module github.com/hopback/hopback/adapter/officialclient

go 1.26

require (
	github.com/Azure/go-amqp v1.7.0
	github.com/hopback/hopback v0.1.0
	github.com/rabbitmq/rabbitmq-amqp-go-client v1.0.0
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/gorilla/websocket v1.5.3 // indirect
	go.opentelemetry.io/otel v1.40.0 // indirect
	go.opentelemetry.io/otel/metric v1.40.0 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
)

// The SDK of the same checkout. A release requires a version of it instead.
replace github.com/hopback/hopback => ../..
