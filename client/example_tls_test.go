package client_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log"
	"net"
	"net/http/httptest"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// With an amqps URL the connection uses TLS. Config.TLS trusts the broker's own certificate
// authority; leave it out if the system trusts it. To log in with a client certificate, set
// TLS.Certificates, and SASL to client.External().
func ExampleConnect_tls() {
	url, authority, stop := tlsBroker()
	defer stop()
	roots := x509.NewCertPool()
	roots.AddCert(authority) // or roots.AppendCertsFromPEM(pem) with the file's content

	ctx := context.Background()
	conn, err := client.Connect(ctx, url, client.Config{TLS: &tls.Config{RootCAs: roots}})
	if err != nil {
		log.Fatal(err) // errors.Is(err, client.ErrTLS) if the handshake failed
	}
	defer conn.Close(ctx)
	fmt.Println("connected to", conn.Broker().Product)
	// Output: connected to RabbitMQ
}

// tlsBroker starts a broker in memory behind a TLS listener, with the certificate of httptest.
// It returns the broker's URL and its certificate authority.
func tlsBroker() (url string, authority *x509.Certificate, stop func()) {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	web := httptest.NewTLSServer(nil)
	defer web.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go broker.Serve(tls.NewListener(l, &tls.Config{Certificates: web.TLS.Certificates}))
	return "amqps://guest:guest@" + l.Addr().String() + "/", web.Certificate(), broker.Close
}
