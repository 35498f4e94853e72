module github.com/hopback/hopback/examples/protobuf

go 1.26

// That of the same checkout.
replace github.com/hopback/hopback => ../..

require (
	github.com/hopback/hopback v0.0.0
	github.com/stretchr/testify v1.12.1
	google.golang.org/protobuf v1.36.12
)

require (
	github.com/Azure/go-amqp v1.7.0 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
)
