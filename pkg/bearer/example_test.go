package bearer_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/outrelay/outrelay/pkg/bearer"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// A sidecar, or Kubernetes, replaces the file before the token expires.
func ExampleFromFile() {
	dir, err := os.MkdirTemp("", "bearer")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "token")
	if err := os.WriteFile(path, []byte("eyJhbGciOi...\n"), 0o600); err != nil {
		fmt.Println(err)
		return
	}

	login := consumer.SASL{Mechanism: "oauthbearer", Token: bearer.FromFile(path)}
	token, err := login.Token(context.Background())
	fmt.Println(token, err)
	// Output: eyJhbGciOi... <nil>
}

func ExampleFromCommand() {
	login := consumer.SASL{Mechanism: "oauthbearer", Token: bearer.FromCommand("echo", "eyJhbGciOi...")}
	token, err := login.Token(context.Background())
	fmt.Println(token, err)
	// Output: eyJhbGciOi... <nil>
}

// Confluent Cloud needs two extensions in addition to the token.
func ExampleFromClientCredentials() {
	login := consumer.SASL{
		Mechanism: "oauthbearer",
		Token: bearer.FromClientCredentials(bearer.ClientCredentials{
			TokenURL:     "https://login.example.com/oauth2/token",
			ClientID:     "shipping",
			ClientSecret: os.Getenv("KAFKA_CLIENT_SECRET"),
			Scopes:       []string{"kafka"},
		}),
		Extensions: map[string]string{"logicalCluster": "lkc-123", "identityPoolId": "pool-abc"},
	}
	_ = consumer.WithSASL(login)
}
