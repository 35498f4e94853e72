// Command tls-and-oauth is the program of docs/tls-and-oauth.md: it publishes over TLS, with a client certificate.
package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/hopback/hopback"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

func main() {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqps://guest:guest@localhost:5671/")
	config, err := tlsConfig(cmp.Or(os.Getenv("CERTS"), "."))
	if err != nil {
		log.Fatal(err)
	}
	if err := publish(context.Background(), url, config); err != nil {
		log.Fatal(err)
	}
}

// tlsConfig trusts the authority ca.pem, and identifies this client by client.pem.
func tlsConfig(dir string) (*tls.Config, error) {
	ca, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return nil, err
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(ca) {
		return nil, errors.New("ca.pem has no certificate")
	}
	own, err := tls.LoadX509KeyPair(filepath.Join(dir, "client.pem"), filepath.Join(dir, "client.key"))
	if err != nil {
		return nil, err
	}
	return &tls.Config{RootCAs: authorities, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12}, nil
}

func publish(ctx context.Context, url string, config *tls.Config) error {
	conn, err := hopback.Connect(ctx, url, hopback.Config{TLS: config})
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	orders := hopback.Queue[Order]{Conn: conn, Name: "orders"}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	if err := orders.Publish(ctx, Order{ID: "o-1"}); err != nil {
		return err
	}
	fmt.Println("published over TLS")
	return nil
}
