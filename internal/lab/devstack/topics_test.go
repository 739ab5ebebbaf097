package devstack_test

import (
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// DeleteTopics removes topics with their records, and ignores topics that do not exist.
func TestDeleteTopics(t *testing.T) {
	t.Setenv(devstack.EnvMongoDB, stacktest.MongoURI(t))
	t.Setenv(devstack.EnvKafka, stacktest.Brokers(t)[0])
	s, err := devstack.Start(t.Context(), devstack.Options{Brokers: 1, Env: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()

	name := stacktest.Name(t)
	if err := s.CreateTopic(t.Context(), name, 1, 1); err != nil {
		t.Fatal(err)
	}
	if err := s.CreateTopic(t.Context(), name, 1, 1); err == nil {
		t.Fatal("a topic is made twice")
	}

	if err := s.DeleteTopics(t.Context(), name, name+"-none"); err != nil {
		t.Fatal(err)
	}
	if err := s.CreateTopic(t.Context(), name, 1, 1); err != nil {
		t.Errorf("a deleted topic is still there: %v", err)
	}

	if err := s.DeleteTopics(t.Context(), name); err != nil {
		t.Error(err)
	}
	if err := s.DeleteTopics(t.Context()); err != nil {
		t.Error("no topics: ", err)
	}
}
