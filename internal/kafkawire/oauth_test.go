package kafkawire_test

import (
	"context"
	"errors"
	"testing"

	"github.com/outrelay/outrelay/internal/kafkawire"
)

// The first message has the token by RFC 7628. A challenge means that the broker rejects it.
func TestOAuthSendsTheToken(t *testing.T) {
	t.Parallel()
	s := &kafkawire.SASL{Mechanism: "oauthbearer", Token: func(context.Context) (string, error) { return "abc", nil }}
	session, first, err := s.Start(t.Context())
	if err != nil || s.Name() != "OAUTHBEARER" || string(first) != "n,,\x01auth=Bearer abc\x01\x01" {
		t.Fatalf("got %q, %v", first, err)
	}
	if done, _, err := session.Next(t.Context(), nil); !done || err != nil {
		t.Errorf("an accepted token: %t, %v", done, err)
	}
	if _, _, err := session.Next(t.Context(), []byte(`{"status":"invalid_token"}`)); err == nil {
		t.Error("a rejected token is no error")
	}

	away := errors.New("away")
	s.Token = func(context.Context) (string, error) { return "", away }
	if _, _, err := s.Start(t.Context()); !errors.Is(err, away) {
		t.Errorf("a token that cannot be read: %v", err)
	}
}
