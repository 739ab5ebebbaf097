package connect

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// The secret of a client of an authorization server is replaced in its file while the relay runs.
func TestRotatedClientSecretIsUsedForTheNextToken(t *testing.T) {
	t.Parallel()
	secrets := make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, secret, _ := r.BasicAuth()
		secrets <- secret
		w.Header().Set("Content-Type", "application/json")
		// A token without a lifetime is requested for each connection.
		fmt.Fprintf(w, `{"access_token": "token-%s", "token_type": "bearer"}`, secret)
	}))
	t.Cleanup(server.Close)

	dir := t.TempDir()
	file, configuration := filepath.Join(dir, "secret"), filepath.Join(dir, "outrelay.yaml")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file, "first\n")
	write(configuration, `
mongodb: { uri: "mongodb://h/shop" }
kafka:
  brokers: [k:1]
  sasl: { mechanism: oauthbearer, token: { oidc: { url: "`+server.URL+`", client_id: relay, client_secret: "${file:`+file+`}" } } }
`)
	cfg, _, err := config.Load(configuration, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	login, err := NewLogin(*cfg.Kafka.SASL, nil)
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{"first", "second"} {
		write(file, want+"\n")
		if token, err := login.Token(t.Context()); err != nil || token != "token-"+want || <-secrets != want {
			t.Errorf("token %q, %v; want one for the secret %s", token, err, want)
		}
	}
}
