package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
)

// connectWithToken logs in with tokens of an authorization server.
func connectWithToken(ctx context.Context, broker, server, id, secret string) (*hopback.Conn, error) {
	return hopback.Connect(ctx, broker, hopback.Config{
		SASL: client.OAuth2(func(ctx context.Context) (client.Token, error) {
			form := url.Values{"grant_type": {"client_credentials"}, "client_id": {id}, "client_secret": {secret}}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, server, strings.NewReader(form.Encode()))
			if err != nil {
				return client.Token{}, err
			}
			req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return client.Token{}, err
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return client.Token{}, fmt.Errorf("token: %s", resp.Status)
			}
			var token struct {
				Value   string `json:"access_token"`
				Seconds int    `json:"expires_in"`
			}
			if err := json.NewDecoder(resp.Body).Decode(&token); err != nil {
				return client.Token{}, err
			}
			return client.Token{Value: token.Value, Expires: time.Now().Add(time.Duration(token.Seconds) * time.Second)}, nil
		}),
	})
}

// connectWithTokenFile logs in with a token that something else keeps fresh in a file.
func connectWithTokenFile(ctx context.Context, broker, file string) (*hopback.Conn, error) {
	return hopback.Connect(ctx, broker, hopback.Config{
		SASL: client.OAuth2(func(context.Context) (client.Token, error) {
			text, err := os.ReadFile(file)
			return client.Token{Value: strings.TrimSpace(string(text)), Expires: time.Now().Add(10 * time.Minute)}, err
		}),
	})
}
