package franz

import (
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// A server at a broker's address may request any number of iterations, before it has proved who it is.
func TestIterationsOfALoginAreBounded(t *testing.T) {
	t.Parallel()
	login := &sasl.Login{Mechanism: "SCRAM-SHA-256", User: "u", Password: func() (string, error) { return "p", nil }}
	session, first, err := mechanism{login}.Authenticate(t.Context(), "broker:9092")
	if err != nil {
		t.Fatal(err)
	}

	_, nonce, _ := strings.Cut(string(first), "r=")
	if _, _, err := session.Challenge([]byte("r=" + nonce + "x,s=c2FsdA==,i=30000000")); err == nil || !strings.Contains(err.Error(), "iterations") {
		t.Errorf("30 million iterations: %v", err)
	}
	if _, answer, err := session.Challenge([]byte("r=" + nonce + "x,s=c2FsdA==,i=4096")); err != nil || !strings.HasPrefix(string(answer), "c=") {
		t.Errorf("Kafka's default: %q, %v", answer, err)
	}
}
