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

// login has the flags for TLS and for logging in.
type login struct {
	ca, cert, key, serverName string
	tokenFile                 string
	external                  bool
}

// connectionFlags are those that every command with a broker has. "hopback help
// connection" lists them, in place of each command's help.
func (c *command) connectionFlags(f *pflag.FlagSet) {
	own := pflag.NewFlagSet("connection", pflag.ContinueOnError)
	own.StringVar(&c.url, "url", "", "AMQP `URL` of the broker (default $HOPBACK_URL, or amqp://guest:guest@localhost:5672/)")
	own.StringVar(&c.managementURL, "management-url", "", "`URL` of the HTTP API, or none (default $HOPBACK_MANAGEMENT_URL, or port 15672 of the same host)")
	own.StringVar(&c.login.ca, "ca", "", "PEM `file` of certificate authorities to trust instead of the system's")
	own.StringVar(&c.login.cert, "cert", "", "PEM `file` of a client certificate and its chain")
	own.StringVar(&c.login.key, "key", "", "PEM `file` of the client certificate's private key (default the file of --cert)")
	own.StringVar(&c.login.serverName, "server-name", "", "`name` to expect in the broker's certificate (default the URL's host)")
	own.BoolVar(&c.login.external, "external", false, "log in with the client certificate (SASL EXTERNAL)")
	own.StringVar(&c.login.tokenFile, "token-file", "", "`file` with an OAuth 2 token to log in with, read again whenever a token is needed (default $HOPBACK_TOKEN)")
	own.VisitAll(func(flag *pflag.Flag) {
		flag.Annotations = map[string][]string{connectionAnnotation: {"true"}}
		f.AddFlag(flag)
	})
}

// tls is nil without flags for TLS.
func (l *login) tls() (*tls.Config, error) {
	if l.key != "" && l.cert == "" {
		return nil, usage("--key is set without --cert; name the certificate with --cert")
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
			return nil, usage("--ca: %s has no certificate in PEM format; convert it, for example with openssl x509", l.ca)
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

// sasl is how to log in; the zero SASL logs in with the URL's user and password.
func (c *command) sasl() (client.SASL, error) {
	token := strings.TrimSpace(c.io.Env(tokenVariable))
	switch {
	case c.login.external && (token != "" || c.login.tokenFile != ""):
		return client.SASL{}, usage("--external and a token are two ways to log in; choose one")
	case c.login.external && c.login.cert == "":
		return client.SASL{}, usage("--external needs a client certificate; name it with --cert")
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
		return "", errors.New("the file is empty; write the token to it")
	}
	return t, nil
}

// apiToken returns the token for each request to the HTTP API; nil without one. There,
// RabbitMQ accepts a token as the password.
func (c *command) apiToken() func(context.Context) (string, error) {
	token := strings.TrimSpace(c.io.Env(tokenVariable))
	switch {
	case c.login.tokenFile != "":
		return func(context.Context) (string, error) { return readToken(c.login.tokenFile) }
	case token != "":
		return func(context.Context) (string, error) { return token, nil }
	}
	return nil
}
