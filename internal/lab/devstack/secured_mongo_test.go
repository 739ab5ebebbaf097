//go:build unix

package devstack_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// A replica set with access control and TLS accepts only its root user, and presents a certificate of its authority. It
// presents a renewed certificate after a restart.
func TestSecuredReplicaSet(t *testing.T) {
	t.Parallel()
	root := devstack.User{Name: "root", Password: "root-pw"}
	s := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{TLS: true, Root: root}})
	within := func(limit time.Duration, opts *options.ClientOptions) error {
		c, err := mongo.Connect(opts.SetServerSelectionTimeout(limit))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Disconnect(context.WithoutCancel(t.Context())) }()
		return c.Database("shop").Collection("c").FindOne(t.Context(), bson.D{}).Err()
	}

	ask := func(opts *options.ClientOptions) error { return within(patience, opts) }
	rejects := func(opts *options.ClientOptions) error { return within(3*time.Second, opts) }
	works := func(err error) bool { return errors.Is(err, mongo.ErrNoDocuments) }
	if err := ask(options.Client().ApplyURI(s.MongoURI())); !works(err) {
		t.Errorf("as root: %v", err)
	}
	if err := ask(options.Client().ApplyURI(s.MongoURI()).SetTLSConfig(s.TLSConfig())); !works(err) {
		t.Errorf("as root over TLS: %v", err)
	}
	if err := rejects(options.Client().ApplyURI("mongodb://" + s.Mongods()[0].Addr() + "/?replicaSet=rs0")); err == nil || works(err) {
		t.Errorf("without a login: %v", err)
	}
	if err := rejects(options.Client().ApplyURI(s.MongoURIAs(devstack.User{Name: "root", Password: "other"}))); err == nil || works(err) {
		t.Errorf("with another password: %v", err)
	}

	before := s.TLSConfig()
	if err := s.RenewTLS(); err != nil {
		t.Fatal(err)
	}
	if err := s.Mongods()[0].Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := ask(options.Client().ApplyURI(s.MongoURI()).SetTLSConfig(s.TLSConfig())); !works(err) {
		t.Errorf("with the new authority: %v", err)
	}
	if err := rejects(options.Client().ApplyURI(s.MongoURI()).SetTLSConfig(before)); err == nil || works(err) {
		t.Errorf("with the old authority: %v", err)
	}
}
