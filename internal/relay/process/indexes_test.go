package process_test

import (
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func (b *bundle) indexesOf(coll *mongo.Collection) (names []string) {
	b.t.Helper()
	specs, err := coll.Indexes().ListSpecifications(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	for _, s := range specs {
		names = append(names, s.Name)
	}
	return names
}

// TestIndexesAreMadeAtTheStart: the declared indexes, and the index that the configuration requires.
func TestIndexesAreMadeAtTheStart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	b.start("recording=mark", "purge.ttl=2h")

	box := b.db.Collection("outbox")
	stacktest.Eventually(t, "the index of the expiry exists", func() bool { return slices.Contains(b.indexesOf(box), outboxes.SentIndexName) })
	if !b.allIndexes() || len(b.indexesOf(box)) != 3 {
		t.Errorf("there are %v", b.indexesOf(box))
	}
	// Each one is announced.
	b.log.wait(t, `createIndex({`)
}

// TestNoIndexIsMadeIfSwitchedOff: the relay works without any, and leaves all as it is.
func TestNoIndexIsMadeIfSwitchedOff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(2)
	stop := b.start("mongodb.indexes=false")
	b.consume(2)
	// A stop waits for the work outside of the delivery, so no index appears later.
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	if have := b.indexesOf(b.db.Collection("outbox")); len(have) != 1 {
		t.Errorf("indexes were made: %v", have)
	}
}

// allIndexes reports whether the outbox has the declared indexes.
func (b *bundle) allIndexes() bool {
	have := b.indexesOf(b.db.Collection("outbox"))
	want := outboxes.Indexes{Purge: true}.List()
	return !slices.ContainsFunc(want, func(i mongodb.Index) bool { return !slices.Contains(have, i.Name) })
}

// TestAFirstStartBesideAnOpenTransaction: while a transaction of a service is open, a relay that has to create its
// indexes blocks no insert and delivers. It creates them after the transaction.
func TestAFirstStartBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(5)
	box := b.db.Collection("outbox")
	open := stacktest.OpenTransaction(t, box)
	longestWait := stacktest.LongestInsertWait(t, b.db.Collection("outbox"))
	b.start("recording=mark", "purge.ttl=2h")
	b.consume(5)
	open.CommitAfter(5 * time.Second)
	if d := longestWait(); d > stacktest.InsertPatience {
		t.Errorf("an insert waited %v, want at most %v", d, stacktest.InsertPatience)
	}

	stacktest.Eventually(t, "all indexes exist", func() bool { return b.allIndexes() && slices.Contains(b.indexesOf(box), outboxes.SentIndexName) })
}

// TestAGrantedPrivilegeIsUsedByTheRunningRelay: indexes that it was not allowed to make are made soon after that is granted.
func TestAGrantedPrivilegeIsUsedByTheRunningRelay(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	node := stacktest.Name(t)
	grant := stacktest.FailCommand(t, "outrelay state "+node, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"createIndexes"}}, {Key: "errorCode", Value: 13},
	})

	b.startAs(func(r *process.Relay) { r.Hasten(10 * time.Second) }, "node="+node)
	b.log.wait(t, "an index is missing because of a missing privilege")
	if b.allIndexes() {
		t.Fatal("there are indexes without the privilege")
	}

	grant()
	stacktest.Eventually(t, "all indexes exist", b.allIndexes)
}
