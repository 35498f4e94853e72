module github.com/hopback/hopback/operate/topologyfile

go 1.26.0

// The SDK of the same checkout.
replace github.com/hopback/hopback => ../..

require (
	github.com/hopback/hopback v0.1.0
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
	go.yaml.in/yaml/v3 v3.0.6
)

require github.com/Azure/go-amqp v1.7.0 // indirect
