module github.com/hopback/hopback

go 1.26

require (
	github.com/Azure/go-amqp v1.7.0
	github.com/spf13/cobra v1.10.2
	github.com/spf13/pflag v1.0.9
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
	go.yaml.in/yaml/v3 v3.0.6
	golang.org/x/time v0.15.0
)

require github.com/inconshreveable/mousetrap v1.1.0 // indirect
