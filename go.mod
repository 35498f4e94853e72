module github.com/hopback/hopback

go 1.26

require (
	github.com/Azure/go-amqp v1.7.0
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
)

require go.yaml.in/yaml/v3 v3.0.6 // indirect
