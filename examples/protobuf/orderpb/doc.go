// Package orderpb has the messages of order.proto, made by protoc and protoc-gen-go:
//
//	protoc --go_out=. --go_opt=paths=source_relative order.proto
package orderpb
