package devstack_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// Servers from the environment are used and never stopped, and only where the caller allows them.
func TestEnvironment(t *testing.T) {
	uri, brokers := stacktest.MongoURI(t), stacktest.Brokers(t)
	t.Setenv(devstack.EnvMongoDB, uri)
	t.Setenv(devstack.EnvKafka, strings.Join(brokers, ","))
	s, err := devstack.Start(t.Context(), devstack.Options{Mongods: 1, Brokers: 1, Env: true})
	if err != nil {
		t.Fatal(err)
	}
	if s.MongoURI() != uri || !slices.Equal(s.Brokers(), brokers) || s.Servers()[0].Origin != "environment" || s.Servers()[0].Version == "" {
		t.Errorf("got %+v", s.Servers())
	}

	for _, m := range slices.Concat(s.Mongods(), s.Kafkas()) {
		if err := m.Kill(); !errors.Is(err, devstack.ErrExternal) || m.PID() != 0 {
			t.Errorf("%s, process %d: %v", m.Name(), m.PID(), err)
		}
		if err := m.WaitReady(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Primary(t.Context()); err != nil {
		t.Error(err)
	}

	s.Stop()
	again, err := devstack.Start(t.Context(), devstack.Options{Mongods: 1, Env: true})
	if err != nil {
		t.Fatal("after Stop: ", err)
	}

	again.Stop()
	t.Setenv(devstack.EnvMongoDB, "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200")
	if _, err := devstack.Start(t.Context(), devstack.Options{Mongods: 1, Env: true}); err == nil || !strings.Contains(err.Error(), devstack.EnvMongoDB) {
		t.Errorf("a server that is not there: %v", err)
	}
}
