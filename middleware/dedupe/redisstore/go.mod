module github.com/hopback/hopback/middleware/dedupe/redisstore

go 1.26.0

// The SDK of the same checkout. A release requires a version of it instead.
replace github.com/hopback/hopback => ../../..

require (
	github.com/hopback/hopback v0.1.0
	github.com/redis/go-redis/v9 v9.23.0
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
)

require (
	github.com/Azure/go-amqp v1.7.0 // indirect
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	go.uber.org/atomic v1.12.0 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
	golang.org/x/sys v0.48.0 // indirect
)
