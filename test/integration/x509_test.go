//go:build unix

package integration

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// A relay logs in to MongoDB by its client certificate, without a password. A certificate that no user has is rejected with a
// reason.
func TestLoginToMongoDBByCertificate(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{
		TLS: true, Root: devstack.User{Name: "root", Password: rolePassword},
	}})
	dir := t.TempDir()
	write := func(name string) (cert, key string) {
		t.Helper()
		chain, private, err := stack.ClientCert(name)
		cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
		if err := errors.Join(err, os.WriteFile(cert, chain, 0o600), os.WriteFile(key, private, 0o600)); err != nil {
			t.Fatal(err)
		}
		return cert, key
	}
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, stack.CA(), 0o600); err != nil {
		t.Fatal(err)
	}

	s := kit.New(t, kit.Options{Stack: stack})
	create := bson.D{{Key: "createUser", Value: "CN=relay"}, {Key: "roles", Value: bson.A{bson.D{{Key: "role", Value: "root"}, {Key: "db", Value: "admin"}}}}}
	if err := s.Client.Database("$external").RunCommand(t.Context(), create).Err(); err != nil {
		t.Fatal(err)
	}
	address := strings.Replace(stack.MongoURI(), "root:"+rolePassword+"@", "", 1)
	s.SetConfig("mongodb.uri", strings.Replace(address, "authSource=admin", "authMechanism=MONGODB-X509", 1))
	use := func(name string) {
		t.Helper()
		cert, key := write(name)
		s.SetConfig("mongodb.tls", map[string]any{"ca": ca, "cert": cert, "key": key})
	}

	use("stranger")
	if code, out, errOut := s.RunCommand("doctor"); code == 0 || !strings.Contains(out+errOut, "user") {
		t.Errorf("a certificate without a user: exit code %d\n%s%s", code, out, errOut)
	}

	use("relay")
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: "1"}, "Placed", event.JSON(1)))
	s.CheckDelivery(topics)
}
