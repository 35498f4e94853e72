package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/hopback/hopback/client"
)

const tokenVariable = "HOPBACK_TOKEN"

// login is how the command proves who it is, and to whom it talks.
type login struct {
	ca, cert, key, serverName string
	tokenFile                 string
	external                  bool
}

// connectionFlags are those that every command with a broker has.
func (c *command) connectionFlags(f *pflag.FlagSet) {
	f.StringVar(&c.url, "url", "", "AMQP `URL` of the broker (default $HOPBACK_URL, or amqp://guest:guest@localhost:5672/)")
	f.StringVar(&c.managementURL, "management-url", "", "`URL` of its HTTP API, or none (default $HOPBACK_MANAGEMENT_URL, or port 15672 of the same host)")
	f.StringVar(&c.login.ca, "ca", "", "PEM `file` of the certificate authorities to trust in place of the system's")
	f.StringVar(&c.login.cert, "cert", "", "PEM `file` of a client certificate, with what it is signed by")
	f.StringVar(&c.login.key, "key", "", "PEM `file` of its private key (default that of --cert)")
	f.StringVar(&c.login.serverName, "server-name", "", "`name` in the broker's certificate (default the URL's host)")
	f.BoolVar(&c.login.external, "external", false, "log in by the client certificate (SASL EXTERNAL)")
	f.StringVar(&c.login.tokenFile, "token-file", "", "`file` of an OAuth 2 token to log in with; it is read again when a new one is needed (default $HOPBACK_TOKEN)")
}

// tls is nil where nothing is asked for.
func (l *login) tls() (*tls.Config, error) {
	if l.key != "" && l.cert == "" {
		return nil, usage("--key is given without --cert; give the certificate, too")
	}
	if l.ca == "" && l.cert == "" && l.serverName == "" {
		return nil, nil
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: l.serverName}
	if l.ca != "" {
		pem, err := os.ReadFile(l.ca)
		if err != nil {
			return nil, coded(Usage, fmt.Errorf("--ca: %w", err))
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, usage("--ca: %s has no certificate in PEM form", l.ca)
		}
	}
	if l.cert != "" {
		key := l.key
		if key == "" {
			key = l.cert
		}
		pair, err := tls.LoadX509KeyPair(l.cert, key)
		if err != nil {
			return nil, coded(Usage, fmt.Errorf("--cert, --key: %w", err))
		}
		conf.Certificates = []tls.Certificate{pair}
	}
	return conf, nil
}

// sasl is the way to log in; the zero SASL is by the URL's user and password.
func (c *command) sasl() (client.SASL, error) {
	token := c.io.Env(tokenVariable)
	switch {
	case c.login.external && (token != "" || c.login.tokenFile != ""):
		return client.SASL{}, usage("--external and a token are two ways to log in; choose one of them")
	case c.login.external && c.login.cert == "":
		return client.SASL{}, usage("--external needs a client certificate; give --cert")
	case c.login.external:
		return client.External(), nil
	case c.login.tokenFile != "":
		if _, err := readToken(c.login.tokenFile); err != nil {
			return client.SASL{}, coded(Usage, fmt.Errorf("--token-file: %w", err))
		}
		return client.OAuth2(func(context.Context) (client.Token, error) {
			t, err := readToken(c.login.tokenFile)
			return client.Token{Value: t}, err
		}), nil
	case token != "":
		return client.OAuth2(func(context.Context) (client.Token, error) { return client.Token{Value: token}, nil }), nil
	}
	return client.SASL{}, nil
}

func readToken(file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	t := strings.TrimSpace(string(b))
	if t == "" {
		return "", errors.New("the file is empty")
	}
	return t, nil
}

// apiToken returns the token for each request to the HTTP API; nil without one. RabbitMQ
// takes a token as a password there.
func (c *command) apiToken() func(context.Context) (string, error) {
	token := c.io.Env(tokenVariable)
	switch {
	case c.login.tokenFile != "":
		return func(context.Context) (string, error) { return readToken(c.login.tokenFile) }
	case token != "":
		return func(context.Context) (string, error) { return token, nil }
	}
	return nil
}
