package kafkawire_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// The first message has the token by RFC 7628. A challenge means that the broker rejects it.
func TestOAuthSendsTheToken(t *testing.T) {
	t.Parallel()
	s := &sasl.Login{Mechanism: "oauthbearer", Token: func(context.Context) (string, error) { return "abc", nil }}
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

	s.Extensions = map[string]string{"logicalCluster": "lkc-1", "identityPoolId": "pool-1"}
	if _, first, _ := s.Start(t.Context()); string(first) != "n,,\x01auth=Bearer abc\x01identityPoolId=pool-1\x01logicalCluster=lkc-1\x01\x01" {
		t.Errorf("with extensions: %q", first)
	}

	away := errors.New("away")
	s.Token = func(context.Context) (string, error) { return "", away }
	if _, _, err := s.Start(t.Context()); !errors.Is(err, away) {
		t.Errorf("a token that cannot be read: %v", err)
	}
}

// The broker closes a connection when its login has expired. A link is stale before, so that no batch is in flight then.
func TestALinkEndsBeforeItsLoginExpires(t *testing.T) {
	t.Parallel()
	const session = 3 * time.Second
	stack := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true, Kafka: devstack.KafkaOptions{
		Users: []devstack.User{{Name: "admin", Password: "admin"}}, OAuth: true, Sessions: session,
	}})
	brokers, err := stack.BrokersOn(devstack.SASL)
	if err != nil {
		t.Fatal(err)
	}
	c, err := kafkawire.NewClient(kafkawire.Config{Brokers: brokers, SASL: &sasl.Login{
		Mechanism: "oauthbearer",
		Token:     func(context.Context) (string, error) { return devstack.UnsecuredToken("alice", time.Hour), nil },
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)

	began := time.Now()
	l, err := c.Dial(t.Context(), brokers[0])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.IsStale() {
		t.Error("a new link is stale")
	}
	stacktest.Eventually(t, "the link is stale", l.IsStale)
	if took := time.Since(began); took < session/2 || took > session {
		t.Errorf("it was stale after %s of a session of %s", took, session)
	}
}
