// Package bearer supplies the tokens with which a client logs in to Kafka by SASL OAUTHBEARER.
//
//	consumer.WithSASL(consumer.SASL{Mechanism: "oauthbearer", Token: bearer.FromFile("/var/run/secrets/kafka/token")})
//
// The relay takes the same sources from its configuration (kafka.sasl.token), or with relay.WithKafkaToken. For Amazon MSK see
// package msk.
//
// Blocking: a Source blocks until the file, the program or the server has supplied a token, or its context ends.
// Connections that need a token at the same time share one request. Cost: FromFile reads the file for each
// connection. The others keep a token for 80 % of its lifetime.
package bearer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"
)

// Source returns a token that is valid for some time. Clients call it for each connection, from several goroutines. An error must
// not contain the token or a secret, because clients log it.
type Source = func(ctx context.Context) (string, error)

const (
	maxToken  = 64 << 10 // bytes
	maxReason = 500      // bytes of the response of a command or an authorization server in an error
)

// FromFile returns a Source that reads the token from a file for each connection, so that it may be replaced at any time. White
// space around the token is ignored.
func FromFile(path string) Source {
	return func(context.Context) (string, error) {
		text, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("reading the token: %w", err)
		}
		token, err := checkToken(text)
		if err != nil {
			return "", fmt.Errorf("file %s: %w", path, err)
		}
		return token, nil
	}
}

// FromCommand returns a Source that runs a program, without a shell, and takes the token from its standard output. The program has
// 15 seconds. If the token is a JWT, the Source runs the program again after 80 % of its lifetime, and otherwise for each
// connection.
func FromCommand(name string, args ...string) Source {
	return keep(func(ctx context.Context) (string, time.Time, error) {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.WaitDelay = time.Second
		var message limited
		cmd.Stderr = &message
		text, err := cmd.Output()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return "", time.Time{}, fmt.Errorf("running %s: %w%s", name, err, message.suffix())
		}

		token, err := checkToken(text)
		if err != nil {
			return "", time.Time{}, fmt.Errorf("output of %s: %w", name, err)
		}
		return token, expiry(token), nil
	})
}

// ClientCredentials is a client of an OAuth 2.0 or OpenID Connect authorization server.
type ClientCredentials struct {
	TokenURL     string // of the authorization server; required
	ClientID     string // required
	ClientSecret string // required, unless Secret is set
	Scopes       []string
	Audience     string // parameter audience, which some servers require; "" sends none
	// Secret replaces ClientSecret. It is called for each request, so that a secret can be rotated while the program runs.
	// Defaults to none.
	Secret func() string
}

// FromClientCredentials returns a Source that requests tokens with the grant client_credentials. It requests the next token after
// 80 % of the lifetime of the last one, and uses that until it expires while the server does not respond.
func FromClientCredentials(credentials ClientCredentials) Source {
	request := clientcredentials.Config{
		TokenURL: credentials.TokenURL, ClientID: credentials.ClientID, ClientSecret: credentials.ClientSecret, Scopes: credentials.Scopes,
	}
	if credentials.Audience != "" {
		request.EndpointParams = map[string][]string{"audience": {credentials.Audience}}
	}

	return keep(func(ctx context.Context) (string, time.Time, error) {
		// Only one request runs at a time.
		if credentials.Secret != nil {
			request.ClientSecret = credentials.Secret()
		}
		issued, err := request.Token(ctx)
		if rejected, ok := errors.AsType[*oauth2.RetrieveError](err); ok {
			reason := limited(rejected.Body)
			return "", time.Time{}, fmt.Errorf("%s rejects a token: %s%s", credentials.TokenURL, rejected.Response.Status, reason.suffix())
		}
		if err != nil {
			return "", time.Time{}, fmt.Errorf("requesting a token from %s: %w", credentials.TokenURL, err)
		}

		token, err := checkToken([]byte(issued.AccessToken))
		if err != nil {
			return "", time.Time{}, fmt.Errorf("reading the token of %s: %w", credentials.TokenURL, err)
		}
		if issued.Expiry.IsZero() {
			return token, expiry(token), nil
		}
		return token, issued.Expiry, nil
	})
}

// checkToken returns the token in text. Its characters are those of RFC 6750, so that it cannot end the message that contains it.
func checkToken(text []byte) (string, error) {
	token := strings.TrimSpace(string(text))
	switch {
	case token == "":
		return "", errors.New("there is no token")
	case len(token) > maxToken:
		return "", fmt.Errorf("the token has %d bytes; at most %d are allowed", len(token), maxToken)
	case strings.ContainsFunc(token, func(char rune) bool { return char <= ' ' || char > '~' || char == '"' || char == ',' }):
		return "", errors.New("it is not a token: it contains a character that no bearer token has, such as a space or a quote")
	}
	return token, nil
}

// limited collects the beginning of a text.
type limited []byte

func (l *limited) Write(data []byte) (int, error) {
	*l = append(*l, data[:min(len(data), maxReason-min(len(*l), maxReason))]...)
	return len(data), nil
}

// suffix returns the text in one line, after a colon, or "" if there is none.
func (l *limited) suffix() string {
	text := strings.Join(strings.Fields(strings.ToValidUTF8(string((*l)[:min(len(*l), maxReason)]), "?")), " ")
	if text == "" {
		return ""
	}
	return ": " + text
}
