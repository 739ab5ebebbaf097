package msk_test

import (
	"encoding/base64"
	"net/url"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/pkg/bearer/msk"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// The token is a signed request to the cluster's region: it names the key, but not the secret.
// The test sets the environment, so it is not parallel.
func TestATokenIsASignedRequest(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
	t.Setenv("AWS_CONFIG_FILE", t.TempDir()+"/none")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", t.TempDir()+"/none")
	token, err := msk.Token("eu-west-1")(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	text, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		t.Fatalf("%v in %q", err, token)
	}
	u, err := url.Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	if u.Host != "kafka.eu-west-1.amazonaws.com" || q.Get("Action") != "kafka-cluster:Connect" || !strings.HasPrefix(q.Get("X-Amz-Credential"), "AKIDEXAMPLE/") || q.Get("X-Amz-Signature") == "" || strings.Contains(string(text), "planted") {
		t.Errorf("got %s", text)
	}

	if _, err := msk.Token("")(t.Context()); err == nil {
		t.Error("no region: no error")
	}
}

func ExampleToken() {
	_ = consumer.WithSASL(consumer.SASL{Mechanism: "oauthbearer", Token: msk.Token("eu-west-1")})
}
