package main

import (
	"errors"
	"net"
	"net/url"
)

// path is a way to the broker.
type path struct {
	url string
	how string // "at 127.0.0.1:5672"
	// memory is set for a hopbacktest broker, which speaks AMQP 1.0 only and has no streams.
	memory bool
	// end stops what choosePath has started; nil if that is nothing.
	end func()
}

// choosePath finds the broker that given names, and starts one in memory. The caller ends it.
func choosePath(given string) (path, error) {
	u, err := url.Parse(given)
	if err != nil {
		return path{}, errors.New("-url can't be parsed") // it may hold a password
	}
	if u.Scheme != memoryScheme {
		port := u.Port()
		if port == "" {
			port = map[string]string{"amqp": "5672", "amqps": "5671"}[u.Scheme]
		}
		return path{url: given, how: "at " + net.JoinHostPort(u.Hostname(), port)}, nil
	}
	given, end, err := startMemory(u.Opaque)
	if err != nil {
		return path{}, err
	}
	u, err = url.Parse(given)
	if err != nil {
		end()
		return path{}, err
	}
	return path{url: given, how: "in memory, in another process, at " + u.Host, memory: true, end: end}, nil
}
